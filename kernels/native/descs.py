"""From stored weights to the descriptors that the C++ kernels read."""

from __future__ import annotations

import numpy as np

from aegis.kernels.base import Format, Weight
from aegis.kernels.native import _native
from aegis.kernels.sizes import block_inputs, check_format, nbytes


def vector_address(weight: Weight) -> int:
    """Address of a stored float32 vector."""
    if weight.format.kind != "dense" or weight.format.dtype != "f32":
        raise ValueError("vectors are stored as float32: convert the model again")
    return _address(weight)


def linear_desc(weight: Weight, bias: Weight | None = None) -> _native.LinearDesc:
    """The descriptor of a weight in memory, which must outlive it."""
    if weight.layout != "il16":
        raise ValueError(f"the native backend reads layout il16, not {weight.layout}")
    rows, in_features = weight.shape
    size = nbytes(weight.shape, weight.format, "il16")
    if weight.data.nbytes < size:
        raise ValueError(
            f"a weight of shape {rows} x {in_features} needs {size} bytes, "
            f"but only {weight.data.nbytes} were given"
        )
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"a bias of {bias.shape} does not fit a weight of {rows} rows")
    bias_address = 0 if bias is None else vector_address(bias)
    return located_desc(_address(weight), (rows, in_features), weight.format, bias_address)


def located_desc(
    address: int, shape: tuple[int, int], fmt: Format, bias: int = 0
) -> _native.LinearDesc:
    """The descriptor of a weight at an address (or at an offset into a slot)."""
    check_format(shape, fmt, "il16")
    return _native.LinearDesc(
        address, shape[0], shape[1], fmt.bits, fmt.dtype, bias, block_inputs(fmt)
    )


def _address(weight: Weight) -> int:
    if not weight.data.flags.c_contiguous or weight.data.dtype != np.uint8:
        raise ValueError("a weight's bytes must be one contiguous uint8 array")
    return int(weight.data.ctypes.data)
