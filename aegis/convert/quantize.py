"""Affine quantisation of plain numbers, giving the bits that MLX's own quantiser gives.

The rule was read off ``mx.quantize`` on MLX's CPU, which is what ``mlx_lm.convert`` calls, and
tests compare the two. Everything is computed in float32, whatever the input's type. Per group of
``group_size`` neighbours in a row, ``affine_scales`` gives scale and bias; then
``code = clip(rint((w - bias) / scale), 0, 2^bits - 1)`` with that scale and bias, before these are
rounded (to nearest even) to the input's type. ``rint`` rounds halves to even.
"""

from __future__ import annotations

import numpy as np

from aegis.kernels.base import Format
from aegis.kernels.formats import (
    MlxArrays,
    Raw,
    affine_scales,
    from_f32,
    pack_codes,
    raw_dtype,
    to_f32,
)
from aegis.kernels.sizes import FormatError, check_format

_NUMBERS_AT_ONCE = 1 << 18
"""Numbers quantised at once, which bounds the temporaries to a few MiB."""


def quantize(raw: Raw, dtype: Format, bits: int, group_size: int) -> tuple[MlxArrays, Format]:
    """Raw numbers [rows, cols] of the dense format ``dtype`` as codes, scales and biases.

    Scales and biases are [rows, cols / group_size] of the same type as the numbers.

    Raises:
        FormatError: for a width or group that the format does not know, a number that is not
            finite, or a group that spreads too far for a scale in float32.
    """
    rows, cols = raw.shape
    fmt = Format("affine", dtype.dtype, bits, group_size)
    check_format((rows, cols), fmt, "row")
    params = (rows, cols // group_size)
    weight = np.empty((rows, cols * bits // 32), dtype=np.uint32)
    scales, biases = (np.empty(params, dtype=raw_dtype(fmt)) for _ in range(2))
    step = max(1, _NUMBERS_AT_ONCE // cols)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        weight[part], scales[part], biases[part] = _quantize_rows(raw[part], fmt)
    return MlxArrays(weight, scales, biases), fmt


def _quantize_rows(raw: Raw, fmt: Format) -> tuple[Raw, Raw, Raw]:
    values = to_f32(np.ascontiguousarray(raw), fmt).reshape(len(raw), -1, fmt.group_size)
    if fmt.dtype == "f32":
        values = values.copy()  # A view of the input, and the arithmetic below is in place.
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = values.min(axis=-1), values.max(axis=-1)
        scale, bias = affine_scales(low, high, fmt.bits)
    _refuse(low, high, scale)
    values -= bias[..., None]
    values /= scale[..., None]
    np.rint(values, out=values)
    np.clip(values, 0, (1 << fmt.bits) - 1, out=values)
    codes = values.astype(np.uint8).reshape(raw.shape)
    return pack_codes(codes, fmt.bits), from_f32(scale, fmt), from_f32(bias, fmt)


def _refuse(low: Raw, high: Raw, scale: Raw) -> None:
    # The smallest or the largest of numbers is NaN if one of them is.
    if not (np.isfinite(low) & np.isfinite(high)).all():
        raise FormatError("a number is not finite (NaN or infinity)")
    if not (np.isfinite(scale) & (scale != 0)).all():
        raise FormatError("the numbers of a group are too large to be given a scale")
