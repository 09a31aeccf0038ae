"""Attention over keys of every width that a family has, and products by head, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_tools import NUMBERS, needs_mlx

from aegis.kernels import formats
from aegis.kernels.base import Format, KVSpec, Numbers, Weight
from aegis.kernels.formats import MlxArrays, f32_to_bf16

pytestmark = needs_mlx

WITHIN = {"f32": 2e-5, "bf16": 0.03}
"""Of the largest output."""


def random_array(seed: int, shape: tuple[int, ...], numbers: Numbers) -> Any:
    """Normal numbers that activations can have, float32."""
    values = np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)
    return values if numbers == "f32" else formats.bf16_to_f32(f32_to_bf16(values))


def attended(
    q: Any, keys: Any, values: Any, start: int, scale: float, window: int | None, sinks: Any
) -> Any:
    """The same in float64, a row at a time: q [heads, T, D], keys and values [kv_heads, n, D]."""
    out = np.empty((*q.shape[:2], values.shape[2]))
    shared = len(q) // len(keys)
    for head, row in np.ndindex(q.shape[:2]):
        own = start + row + 1
        seen = slice(max(0, own - window) if window else 0, own)
        scores = keys[head // shared, seen].astype(np.float64) @ q[head, row] * scale
        most = max(scores.max(), sinks[head]) if sinks is not None else scores.max()
        shares = np.exp(scores - most)
        rest = np.exp(sinks[head] - most) if sinks is not None else 0.0
        out[head, row] = shares / (shares.sum() + rest) @ values[head // shared, seen]
    return out


@pytest.mark.parametrize(
    ("start", "rows"), [(0, 1), (0, 5), (0, 150), (150, 1), (145, 9), (96, 80)]
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "latent", "window", "sinks"),
    [
        (8, 2, 128, 0, None, False),
        (4, 2, 256, 0, None, False),
        (8, 2, 64, 0, None, True),
        (8, 2, 64, 0, 128, True),
        (8, 2, 64, 0, 16, True),
        (4, 1, 576, 512, None, False),
    ],
)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_queries_see_the_keys_up_to_their_own(
    numbers: Numbers,
    heads: int,
    kv_heads: int,
    width: int,
    latent: int,
    window: int | None,
    sinks: bool,
    start: int,
    rows: int,
) -> None:
    import mlx.core as mx

    from aegis.kernels.mlx.attention import MlxKVCache, over_keys
    from aegis.kernels.mlx.device import open_device
    from aegis.kernels.mlx.sizes import ATTENTION_ROWS

    traits, total = open_device(numbers, 1 << 20), start + rows
    nbytes = 4 if numbers == "f32" else 2
    kv = MlxKVCache(KVSpec(kv_heads, width, 320, nbytes, latent), traits)
    q = random_array(1, (heads, rows, width), numbers)
    keys, values = (random_array(seed, (kv_heads, total, width), numbers) for seed in (2, 3))
    extra = random_array(4, (heads,), numbers) if sinks else None

    def on_device(array: Any) -> Any:
        return mx.array(array).astype(traits.dtype)

    for first, end in ((0, start), (start, total)):
        if end > first:
            second = None if latent else on_device(values[None, :, first:end])
            kv.append(on_device(keys[None, :, first:end]), second, first)
    if latent:
        values = keys[..., :latent]
    step = None if traits.attention_is_fused(width) else ATTENTION_ROWS
    on_gpu = None if extra is None else on_device(extra)
    scale = 2 * width**-0.5
    out = over_keys(on_device(q[None]), kv, start, scale, step, window, on_gpu)
    found = np.array(out.astype(mx.float32))[0]
    wanted = attended(q, keys, values, start, scale, window, extra)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= WITHIN[numbers] * np.abs(wanted).max()


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("out", "width"), [(512, 128), (128, 512)])
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_each_head_has_a_matrix_of_its_own(
    numbers: Numbers, bits: int, out: int, width: int, rows: int
) -> None:
    import mlx.core as mx

    from aegis.kernels.mlx.device import open_device
    from aegis.kernels.mlx.linear import ByHead
    from aegis.kernels.mlx.memory import MlxMemory

    heads = 3
    rng = np.random.default_rng(bits)
    values = rng.normal(0, 1, (heads * out, width)).astype(np.float32)
    if bits:
        fmt = Format("affine", "bf16", bits, 64)
        codes = formats.pack_codes(rng.integers(0, 1 << bits, values.shape, dtype=np.uint8), bits)
        groups = width // 64
        params = (np.ascontiguousarray(values[:, n : n + groups]) for n in (0, groups))
        arrays = MlxArrays(codes, *map(f32_to_bf16, params))
    else:
        fmt, arrays = Format("dense", "bf16"), MlxArrays(f32_to_bf16(values))
    packed = formats.pack(arrays, fmt, "row")
    traits = open_device(numbers, 1 << 20)
    memory = MlxMemory(traits)
    region = memory.resident(packed.size)
    region[:] = packed
    weight = Weight(values.shape, fmt, "row", region)
    x = random_array(rows, (heads, rows, width), numbers)
    found = ByHead(memory, traits, weight, heads)(mx.array(x).astype(traits.dtype))
    matrices = formats.dequantize(weight).astype(np.float64).reshape(heads, out, width)
    wanted = np.einsum("hti,hoi->hto", x.astype(np.float64), matrices)
    assert found.shape == wanted.shape
    error = np.abs(np.array(found.astype(mx.float32)) - wanted).max()
    assert error <= WITHIN[numbers] * np.abs(wanted).max()
