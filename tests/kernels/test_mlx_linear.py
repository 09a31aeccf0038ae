"""Products with resident weights of the mlx backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mlx_tools import needs_mlx

from aegis.kernels import formats
from aegis.kernels.base import Format, Weight
from aegis.kernels.formats import MlxArrays, f32_to_bf16

pytestmark = needs_mlx


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 24])
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_rows_are_filled_up_to_a_multiple_and_the_filling_is_dropped(rows: int, bits: int) -> None:
    import mlx.core as mx

    from aegis.kernels.mlx.device import open_device
    from aegis.kernels.mlx.linear import Linear
    from aegis.kernels.mlx.memory import MlxMemory

    rng = np.random.default_rng(bits)
    values = rng.normal(0, 1, (24, 64)).astype(np.float32)
    if bits:
        fmt = Format("affine", "bf16", bits, 64)
        codes = formats.pack_codes(rng.integers(0, 1 << bits, (24, 64), dtype=np.uint8), bits)
        params = f32_to_bf16(values[:, :1])
        arrays = MlxArrays(codes, params, f32_to_bf16(values[:, 1:2]))
    else:
        fmt, arrays = Format("dense", "bf16"), MlxArrays(f32_to_bf16(values))
    packed = formats.pack(arrays, fmt, "row")
    traits = open_device("f32", 1 << 20)
    memory = MlxMemory(traits)
    region = memory.resident(packed.size)
    region[:] = packed
    weight = Weight((24, 64), fmt, "row", region)
    x = rng.normal(0, 1, (rows, 64)).astype(np.float32)
    wanted = x.astype(np.float64) @ formats.dequantize(weight).astype(np.float64).T
    for multiple in (1, 8):
        linear = Linear(memory, replace(traits, row_multiple=multiple), weight)
        found = np.array(linear(mx.array(x)))
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
