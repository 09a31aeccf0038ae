"""What MLX's kernels may read behind arrays lies in the arrays' own allocations.

One of its kernels on CUDA reads behind narrow matrices and behind what they multiply (see
``sizes.inputs_behind``). Here every product is watched: where its arrays end, and where their
allocations do.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_tools import ON_GPU, needs_mlx

from aegis.checkpoint.layout import place_experts
from aegis.kernels import sizes as stored
from aegis.kernels.base import ExpertsSpec, Format, SlotPart, Weight
from aegis.kernels.mlx import sizes
from aegis.kernels.sizes import MXFP4, RECORD_ALIGN, RESIDENT_ALIGN, align_up

pytestmark = needs_mlx

EXPERTS = 4
FORMATS = st.one_of(
    st.builds(
        Format,
        st.just("affine"),
        st.sampled_from(["bf16", "f16", "f32"]),
        st.sampled_from([3, 4, 8]),
        st.sampled_from([32, 64, 128]),
    ),
    st.just(MXFP4),
)
NARROW = st.sampled_from([64, 128, 192, 256, 384])
ROWS = st.sampled_from([64, 128, 256])


def _address(array: Any) -> int:
    """Where an evaluated array's numbers begin."""
    import mlx.core as mx

    mx.eval(array)
    view = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return int(np.array(view, copy=False).ctypes.data)


class Products:
    """Stands in for MLX's two quantised products: computes nothing, looks at what it is given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import mlx.core as mx

        from aegis.kernels.mlx import memory

        self.seen = 0
        self._whole: list[tuple[int, int, Any]] = []
        """Begin and end of what views were made of. It is kept: addresses name one thing only."""
        found = memory.host_view

        def host_view(array: Any) -> Any:
            view = found(array)
            address = int(view.ctypes.data)
            self._whole.append((address, address + view.nbytes, array))
            return view

        patch.setattr(memory, "host_view", host_view)
        patch.setattr(mx, "quantized_matmul", self._product)
        patch.setattr(mx, "gather_qmm", self._product)

    def _product(self, x: Any, codes: Any, scales: Any, *others: Any, **options: Any) -> Any:
        import mlx.core as mx

        rows, bits = codes.shape[-2], options["bits"]
        kind = "affine" if others[0] is not None else "mxfp4"
        fmt = Format(kind, "bf16", bits, options["group_size"])
        behind = sizes.inputs_behind((rows, x.shape[-1]), fmt)
        assert self._room(codes) >= behind * bits // 8
        assert self._room(x) >= behind * x.dtype.size
        self.seen += bool(behind)
        which = options.get("rhs_indices")
        lead = x.shape[:-2] if which is None else np.broadcast_shapes(x.shape[:-2], which.shape)
        return mx.zeros((*lead, x.shape[-2], rows), x.dtype)

    def _room(self, array: Any) -> int:
        """Bytes between the end of an array and that of its allocation."""
        start = _address(array)
        ends = [end for first, end, _ in self._whole if first <= start < end]
        # Before what MLX allocates on a CPU it writes down how much that is.
        end = ends[0] if ends else start + ctypes.c_size_t.from_address(start - 8).value
        assert end >= start + array.nbytes
        return end - start - array.nbytes


def _traits(numbers: str = "bf16") -> Any:
    """The CPU, taken for a GPU of NVIDIA."""
    from aegis.kernels.mlx.device import open_device

    opened = open_device("f32", 1 << 20)
    return replace(opened, numbers=numbers, reads_behind=numbers != "f32", tile_rows=16)


def _fits(width: int, fmt: Format) -> bool:
    return width % max(64, fmt.group_size) == 0


needs_cpu = pytest.mark.skipif(ON_GPU, reason="looks at how MLX allocates on a CPU")


@needs_cpu
@given(
    st.lists(st.tuples(ROWS, NARROW, FORMATS), min_size=1, max_size=3),
    st.sampled_from([1, 3, 64]),
    st.booleans(),
)
def test_nothing_is_read_behind_resident_weights_and_what_they_multiply(
    matrices: list[tuple[int, int, Format]], count: int, by_index: bool
) -> None:
    import mlx.core as mx

    from aegis.kernels.mlx.linear import ByHead, Linear
    from aegis.kernels.mlx.memory import MlxMemory

    matrices = [each for each in matrices if _fits(each[1], each[2])]
    with pytest.MonkeyPatch.context() as patch:
        products, traits = Products(patch), replace(_traits(), by_index=by_index)
        memory, at, weights = MlxMemory(traits), 0, []
        nbytes = [stored.nbytes((rows, width), fmt, "row") for rows, width, fmt in matrices]
        region = memory.resident(sum(align_up(size, RESIDENT_ALIGN) for size in nbytes))
        for (rows, width, fmt), size in zip(matrices, nbytes, strict=True):
            weights.append(Weight((rows, width), fmt, "row", region[at : at + size]))
            at += align_up(size, RESIDENT_ALIGN)
        for weight in weights:
            x = mx.ones((count, weight.shape[1]), mx.bfloat16)
            assert Linear(memory, traits, weight)(x).shape == (count, weight.shape[0])
            for heads in (1, 2):
                x = mx.ones((heads, count, weight.shape[1]), mx.bfloat16)
                out = ByHead(memory, traits, weight, heads)(x)
                assert out.shape == (heads, count, weight.shape[0] // heads)
        narrow = [m for m in matrices if sizes.inputs_behind((m[0], m[1]), m[2])]
        assert products.seen >= 2 * len(narrow)


@needs_cpu
@given(NARROW, NARROW, FORMATS, st.integers(1, 5), st.booleans())
def test_nothing_is_read_behind_slots_copies_of_experts_and_what_they_multiply(
    hidden: int, inner: int, fmt: Format, num_slots: int, chunk: bool
) -> None:
    import mlx.core as mx

    from aegis.kernels.mlx.bank import Bank
    from aegis.kernels.mlx.memory import MlxMemory

    hidden, inner = (align_up(width, max(64, fmt.group_size)) for width in (hidden, inner))
    shapes = dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden))
    shapes["down_proj"] = (hidden, inner)
    geometry = place_experts({name: (shape, fmt) for name, shape in shapes.items()}, "row")
    with pytest.MonkeyPatch.context() as patch:
        products, traits = Products(patch), _traits()
        memory = MlxMemory(traits)
        memory.slots(num_slots, geometry.segments)
        spec = ExpertsSpec(hidden, inner, EXPERTS, 2, 0, "row", geometry.segments)
        bank, slots = Bank(traits, spec, memory.pools), mx.array([0, num_slots - 1], mx.uint32)
        if chunk:
            x = mx.ones((5, 16, hidden), mx.bfloat16)
            index = mx.array([0, 0, 1, 1, 1], mx.uint32)
            assert bank.tiles(x, slots, index).shape == x.shape
        else:
            x = mx.ones((1, hidden), mx.bfloat16)
            assert bank.one(x, mx.ones((1, 2), mx.bfloat16), slots).shape == x.shape
        joined = [(2 * inner, hidden), (hidden, inner)]
        assert products.seen == sum(bool(sizes.inputs_behind(shape, fmt)) for shape in joined)


@given(NARROW, ROWS, FORMATS, st.integers(1, 4))
def test_slots_are_filled_where_matrices_lie_and_direct_reads_may_go(
    width: int, rows: int, fmt: Format, num_slots: int
) -> None:
    from aegis.kernels.mlx.memory import MlxMemory

    width = align_up(width, max(64, fmt.group_size))
    shapes = dict.fromkeys(("gate_proj", "up_proj"), (rows, width))
    shapes["down_proj"] = (width, align_up(rows, 128))
    geometry = place_experts({name: (shape, fmt) for name, shape in shapes.items()}, "row")
    memory = MlxMemory(_traits("f32"))
    parts = memory.slots(num_slots, geometry.segments)
    for part in parts:
        if not part.nbytes % RECORD_ALIGN:
            assert not part.base % RECORD_ALIGN
        _fill(part, num_slots)
    for name, pools in memory.pools.items():
        for pool in pools:
            assert pool.shape[0] == num_slots
            numbers = np.frombuffer(_bytes(pool), np.uint8).reshape(num_slots, -1)
            assert [set(row.tolist()) for row in numbers] == [{n + 1} for n in range(num_slots)]
            assert name in shapes


def _fill(part: SlotPart, num_slots: int) -> None:
    for slot in range(num_slots):
        ctypes.memset(part.base + slot * part.stride, slot + 1, part.nbytes)


def _bytes(pool: Any) -> bytes:
    return ctypes.string_at(_address(pool), pool.nbytes)


@given(st.lists(st.integers(1, 5), max_size=2), st.integers(1, 300), st.integers(0, 3))
def test_inputs_with_room_are_the_same_numbers_in_a_larger_allocation(
    lead: list[int], width: int, count: int
) -> None:
    import mlx.core as mx

    from aegis.kernels.mlx.linear import with_room

    x = mx.random.normal((*lead, 2, width))
    mx.eval(x)
    gc.collect()
    before = mx.get_active_memory()
    roomy = with_room(x, count)
    mx.eval(roomy)
    assert bool((roomy == x).all())
    if count:
        taken = mx.get_active_memory() - before
        assert taken >= x.nbytes + count * width * 4


@pytest.mark.parametrize(
    ("shape", "fmt", "behind"),
    [
        ((128, 64), Format("affine", "bf16", 8, 64), 128),
        ((256, 128), Format("affine", "bf16", 4, 32), 64),
        ((256, 192), Format("affine", "bf16", 4, 64), 0),
        ((128, 128), Format("affine", "bf16", 8, 128), 256),
        ((128, 256), Format("affine", "bf16", 8, 128), 128),
        ((128, 2048), Format("affine", "bf16", 8, 64), 0),
        ((128, 128), MXFP4, 64),
        ((192, 64), Format("affine", "bf16", 8, 64), 0),
        ((128, 64), Format("affine", "bf16", 3, 64), 0),
        ((128, 64), Format("dense", "bf16"), 0),
    ],
)
def test_three_tiles_of_every_row_are_read(
    shape: tuple[int, int], fmt: Format, behind: int
) -> None:
    assert sizes.inputs_behind(shape, fmt) == behind
    assert behind <= sizes.ROOM_NBYTES
