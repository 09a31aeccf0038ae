"""Products with resident weights of the mlx backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_tools import needs_mlx

from aegis.kernels import formats
from aegis.kernels.base import Format, Weight
from aegis.kernels.formats import MlxArrays, f32_to_bf16
from aegis.kernels.sizes import MXFP4, RESIDENT_ALIGN, align_up

pytestmark = needs_mlx


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 24])
@pytest.mark.parametrize(("bits", "width"), [(0, 64), (4, 64), (8, 64), (4, 128), (3, 256)])
def test_rows_are_filled_up_to_a_multiple_and_the_filling_is_dropped(
    rows: int, bits: int, width: int
) -> None:
    import mlx.core as mx

    from aegis.kernels.mlx.device import open_device
    from aegis.kernels.mlx.linear import Linear
    from aegis.kernels.mlx.memory import MlxMemory

    rng = np.random.default_rng(bits)
    values = rng.normal(0, 1, (24, width)).astype(np.float32)
    if bits:
        fmt = Format("affine", "bf16", bits, min(width, 128))
        codes = formats.pack_codes(rng.integers(0, 1 << bits, (24, width), dtype=np.uint8), bits)
        groups = width // fmt.group_size
        params = f32_to_bf16(np.ascontiguousarray(values[:, :groups]))
        biases = f32_to_bf16(np.ascontiguousarray(values[:, groups : 2 * groups]))
        arrays = MlxArrays(codes, params, biases)
    else:
        fmt, arrays = Format("dense", "bf16"), MlxArrays(f32_to_bf16(values))
    packed = formats.pack(arrays, fmt, "row")
    traits = open_device("f32", 1 << 20)
    memory = MlxMemory(traits)
    region = memory.resident(packed.size)
    region[:] = packed
    weight = Weight((24, width), fmt, "row", region)
    x = rng.normal(0, 1, (rows, width)).astype(np.float32)
    wanted = x.astype(np.float64) @ formats.dequantize(weight).astype(np.float64).T
    ways = [(m, i, False) for m in (1, 8) for i in (True, traits.by_index)]
    ways = [way for way in ways if not (traits.wide_groups_in_tiles and width > 64)]
    for multiple, by_index, in_tiles in (*ways, (16, True, True), (16, traits.by_index, True)):
        changed = replace(
            traits,
            row_multiple=multiple,
            by_index=by_index,
            tile_rows=8,
            wide_groups_in_tiles=in_tiles,
        )
        linear = Linear(memory, changed, weight)
        found = np.array(linear(mx.array(x)))
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


FORMATS = [
    Format("affine", "bf16", 4, 64),
    Format("affine", "f32", 8, 64),
    Format("dense", "bf16"),
    MXFP4,
]


def _packed(rng: np.random.Generator, rows: int, cols: int, fmt: Format) -> np.ndarray[Any, Any]:
    """A random matrix as it lies in memory."""
    values = rng.normal(0, 1, (rows, cols)).astype(np.float32)
    if fmt.kind == "dense":
        return formats.pack(MlxArrays(f32_to_bf16(values)), fmt, "row")
    codes = formats.pack_codes(
        rng.integers(0, 1 << fmt.bits, (rows, cols), dtype=np.uint8), fmt.bits
    )
    if fmt.kind == "mxfp4":
        exponents = rng.integers(119, 123, (rows, cols // 32), dtype=np.uint8)
        return formats.pack(MlxArrays(codes, exponents), fmt, "row")
    params = [values[:, index : index + cols // 64] for index in (0, 1)]
    if fmt.dtype == "bf16":
        params = [f32_to_bf16(array) for array in params]
    return formats.pack(MlxArrays(codes, *(np.ascontiguousarray(p) for p in params)), fmt, "row")


class Region:
    """Matrices with a vector behind each, as a layer's projections lie in memory."""

    def __init__(self, rows: Sequence[int], kinds: Sequence[Format], gap: int) -> None:
        from aegis.kernels.mlx.device import open_device
        from aegis.kernels.mlx.memory import MlxMemory

        rng = np.random.default_rng(sum(rows))
        self.traits = open_device("f32", 1 << 20)
        self.memory = MlxMemory(self.traits)
        tensors: list[tuple[tuple[int, ...], Format, np.ndarray[Any, Any]]] = []
        for count, fmt in zip(rows, kinds, strict=True):
            tensors.append(((count, 128), fmt, _packed(rng, count, 128, fmt)))
            vector = rng.normal(0, 1, count).astype(np.float32).view(np.uint8)
            tensors.append(((count,), Format("dense", "f32"), vector))
        room = sum(align_up(data.size, RESIDENT_ALIGN) for *_, data in tensors)
        region, at, made = self.memory.resident(room + gap), 0, []
        for index, (shape, fmt, data) in enumerate(tensors):
            at += gap * (index == 2)
            region[at : at + data.size] = data
            made.append(Weight(shape, fmt, "row", region[at : at + data.size]))
            at += align_up(data.size, RESIDENT_ALIGN)
        self.weights, self.biases = made[::2], made[1::2]

    def expected(self, x: np.ndarray[Any, Any], biases: bool) -> np.ndarray[Any, Any]:
        """What all matrices make of x, beside each other, in float64."""
        outputs = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            out = x.astype(np.float64) @ formats.dequantize(weight).astype(np.float64).T
            outputs.append(out + (bias.data.view(np.float32) if biases else 0))
        return np.concatenate(outputs, axis=1)


@given(
    st.lists(st.sampled_from([16, 32, 64, 96]), min_size=2, max_size=3),
    st.sampled_from(FORMATS),
    st.integers(0, 3).map(lambda n: 64 * max(0, n - 2)),
    st.sampled_from([None, *FORMATS]),
    st.sampled_from([1, 5]),
)
def test_matrices_beside_each_other_are_one_product_where_they_can_be(
    rows: list[int], fmt: Format, gap: int, other: Format | None, count: int
) -> None:
    import mlx.core as mx

    from aegis.kernels.mlx.linear import SideBySide

    kinds = [fmt] * (len(rows) - 1) + [other or fmt]
    region = Region(rows, kinds, gap)
    x = np.random.default_rng(count).normal(0, 1, (count, 128)).astype(np.float32)
    wanted = region.expected(x, biases=True)
    together = SideBySide(region.memory, region.traits, region.weights, region.biases)
    # Bytes of a row's scales.
    nbytes = 32 if fmt.dtype == "f32" else 4
    sizes = [nbytes * n for n in rows]
    fits = fmt.kind == "dense" or not any(size % RESIDENT_ALIGN for size in sizes)
    assert (len(together._linears) == 1) == (not gap and fits and other in (None, fmt))
    found = np.array(together(mx.array(x)))
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_matrices_without_biases_are_one_product_only_if_nothing_lies_between_them() -> None:
    from aegis.kernels.mlx.linear import SideBySide

    region = Region([64, 64], [FORMATS[0]] * 2, 0)
    before = bytes(region.memory._bytes)
    assert len(SideBySide(region.memory, region.traits, region.weights)._linears) == 2
    assert bytes(region.memory._bytes) == before
