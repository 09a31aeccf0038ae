"""What the design rests on: bits of experts depend on shapes, never on slots or on other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_tools import NUMBERS, needs_mlx
from numpy.typing import NDArray

from aegis.checkpoint.layout import place_experts
from aegis.kernels import formats
from aegis.kernels.base import (
    ExpertsSpec,
    Format,
    Numbers,
    Segment,
    SlotPart,
    SwigluClamp,
)
from aegis.kernels.formats import MlxArrays, f32_to_bf16
from aegis.kernels.sizes import MXFP4, RECORD_ALIGN
from aegis.tiers.scatter import Scatter

pytestmark = needs_mlx

HIDDEN, INNER, EXPERTS = 256, 128, 10
FORMATS = {
    "4bit": Format("affine", "bf16", 4, 64),
    "3bit": Format("affine", "bf16", 3, 64),
    "8bit": Format("affine", "bf16", 8, 64),
    "dense": Format("dense", "bf16"),
    "mxfp4": MXFP4,
}
CLAMP = SwigluClamp(0.75, 1.702)
"""Where experts are mxfp4; they then have biases, too."""


def _matrix(rng: np.random.Generator, rows: int, cols: int, fmt: Format) -> MlxArrays:
    if fmt.kind == "dense":
        return MlxArrays(f32_to_bf16(rng.normal(0, cols**-0.5, (rows, cols)).astype(np.float32)))
    codes = rng.integers(0, 1 << fmt.bits, (rows, cols), dtype=np.uint8)
    if fmt.kind == "mxfp4":
        exponents = rng.integers(119, 123, (rows, cols // 32), dtype=np.uint8)
        return MlxArrays(formats.pack_codes(codes, 4), exponents)
    scales = rng.normal(0, cols**-0.5 / (1 << fmt.bits), (rows, cols // 64)).astype(np.float32)
    biases = scales * -((1 << fmt.bits) - 1) / 2
    return MlxArrays(formats.pack_codes(codes, fmt.bits), f32_to_bf16(scales), f32_to_bf16(biases))


class Model:
    """A layer's experts as records, and banks that hold them in whatever slots."""

    def __init__(self, fmt: Format, numbers: Numbers) -> None:
        rng = np.random.default_rng(5)
        shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN)}
        shapes["down_proj"] = (HIDDEN, INNER)
        parts: dict[str, tuple[tuple[int, ...], Format]] = {n: (s, fmt) for n, s in shapes.items()}
        self.clamp = CLAMP if fmt == MXFP4 else None
        if self.clamp:
            vector = Format("dense", "f32")
            parts |= {f"{name}.bias": (shape[:1], vector) for name, shape in shapes.items()}
        self.numbers = numbers
        self.geometry = place_experts(parts, "row")
        self.records = np.zeros((EXPERTS, self.geometry.stride), np.uint8)
        for record in self.records:
            for segment in self.geometry.segments.values():
                if len(segment.shape) == 1:
                    values = rng.normal(0, 1, segment.shape).astype(np.float32)
                    arrays = MlxArrays(values.view(np.uint32))
                else:
                    arrays = _matrix(rng, *segment.shape, fmt)
                data = formats.pack(arrays, segment.format, "row", align=RECORD_ALIGN)
                record[segment.offset : segment.offset + segment.nbytes] = data

    def bank(self, num_slots: int, slot_of: dict[int, int]) -> Any:
        """A bank over slots that were filled as the readers fill them."""
        from aegis.kernels.mlx.bank import Bank
        from aegis.kernels.mlx.device import open_device
        from aegis.kernels.mlx.memory import MlxMemory

        traits = open_device(self.numbers, 1 << 20)
        memory = MlxMemory(traits)
        parts = memory.slots(num_slots, self.geometry.segments)
        for expert, slot in slot_of.items():
            _fill(parts, slot, self.records[expert])
        spec = ExpertsSpec(
            HIDDEN, INNER, EXPERTS, 8, 0, "row", self.geometry.segments, clamp=self.clamp
        )
        return Bank(traits, spec, memory.pools)

    def expected(self, x: NDArray[np.float64], expert: int) -> NDArray[np.float64]:
        """The same in float64."""
        record = self.records[expert]
        parts = {n: self._values(part, record) for n, part in self.geometry.segments.items()}
        gate, up = (
            parts[name] @ x + parts.get(f"{name}.bias", 0.0) for name in ("gate_proj", "up_proj")
        )
        alpha = 1.0
        if self.clamp:
            limit, alpha = self.clamp.limit, self.clamp.alpha
            gate, up = np.minimum(gate, limit), 1 + np.clip(up, -limit, limit)
        inner = gate / (1 + np.exp(-alpha * gate)) * up
        result: NDArray[np.float64] = parts["down_proj"] @ inner
        return result + parts.get("down_proj.bias", 0.0)

    def _values(self, segment: Segment, record: NDArray[np.uint8]) -> NDArray[np.float64]:
        from aegis.kernels.base import Weight

        data = record[segment.offset : segment.offset + segment.nbytes]
        weight = Weight(segment.shape, segment.format, "row", data)
        return formats.dequantize(weight, align=RECORD_ALIGN).astype(np.float64)


def _fill(parts: tuple[SlotPart, ...], slot: int, record: NDArray[np.uint8]) -> None:
    """Write a record into a slot as a reader does."""
    scatter = Scatter(parts, len(record))
    (views,), copies = scatter.places([slot])
    at = 0
    for view in views:
        view[:] = record[at : at + len(view)].data
        at += len(view)
    assert at == len(record)
    Scatter.finish(copies)


def _bits(array: Any) -> bytes:
    import mlx.core as mx

    return np.array(array.astype(mx.float32)).tobytes()


def _rows(numbers: Numbers, count: int) -> Any:
    import mlx.core as mx

    values = np.random.default_rng(count).normal(0, 1, (count, HIDDEN)).astype(np.float32)
    rounded = formats.bf16_to_f32(f32_to_bf16(values))
    return mx.array(rounded).astype(mx.bfloat16 if numbers == "bf16" else mx.float32)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_through_its_experts_is_right_and_the_same_in_whatever_slots(
    kind: str, numbers: Numbers
) -> None:
    import mlx.core as mx

    model, chosen = Model(FORMATS[kind], numbers), [7, 2, 9, 0, 4, 5, 1, 8]
    x, mixed = _rows(numbers, 1), [0.25, 0.5, 0.0625, 1.0, 0.125, 0.375, 2.0, 0.75]
    weights = mx.array([mixed]).astype(x.dtype)
    found = set()
    for num_slots, shift in ((EXPERTS, 0), (EXPERTS, 3), (EXPERTS + 1, 7), (3 * EXPERTS, 19)):
        slot_of = {expert: (expert * 3 + shift) % num_slots for expert in range(EXPERTS)}
        assert len(set(slot_of.values())) == EXPERTS
        bank = model.bank(num_slots, slot_of)
        slots = mx.array([slot_of[expert] for expert in chosen], mx.uint32)
        out = bank.one(x, weights, slots)
        found.add(_bits(out))
    assert len(found) == 1
    row = np.array(x[0].astype(mx.float32)).astype(np.float64)
    wanted = sum(w * model.expected(row, e) for w, e in zip(mixed, chosen, strict=True))
    limit = 1e-5 if numbers == "f32" else 0.05
    assert (
        np.abs(np.array(out.astype(mx.float32))[0] - wanted).max() <= limit * np.abs(wanted).max()
    )


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_tile_does_not_depend_on_the_tiles_beside_it(kind: str, numbers: Numbers) -> None:
    import mlx.core as mx

    model = Model(FORMATS[kind], numbers)
    bank = model.bank(EXPERTS, {expert: expert for expert in range(EXPERTS)})
    size = 32
    tiles = _rows(numbers, 6 * size).reshape(6, size, HIDDEN)
    index = np.array([3, 3, 8, 0, 1, 9], np.uint32)
    slots = mx.arange(EXPERTS, dtype=mx.uint32)
    together = bank.tiles(tiles, slots, mx.array(index))
    for tile in range(6):
        one = bank.tiles(tiles[tile : tile + 1], slots, mx.array(index[tile : tile + 1]))
        assert _bits(one[0]) == _bits(together[tile])


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_of_a_tile_does_not_depend_on_the_other_rows(kind: str, numbers: Numbers) -> None:
    import mlx.core as mx

    model = Model(FORMATS[kind], numbers)
    bank = model.bank(EXPERTS, {expert: expert for expert in range(EXPERTS)})
    slots, index = mx.arange(EXPERTS, dtype=mx.uint32), mx.array([6], mx.uint32)
    one, other = _rows(numbers, 32)[None], _rows(numbers, 33)[None, 1:]
    mixed = mx.concatenate([one[:, :5], other[:, 5:]], axis=1)
    first, second = bank.tiles(one, slots, index), bank.tiles(mixed, slots, index)
    assert _bits(first[:, :5]) == _bits(second[:, :5])
