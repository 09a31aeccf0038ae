"""Memory at any address: refused in a sentence where floats or words would lie across it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from attention_tools import Attention, vector
from native_tools import aligned, experts_spec, fmt_of, normal, random_weight, workspace_spec

from aegis.kernels.base import KVSpec, Weight
from aegis.kernels.native import _native, sizes
from aegis.kernels.native.attention import NativeKVCache
from aegis.kernels.native.descs import linear_desc

POOL = _native.Pool(1)
RNG = np.random.default_rng(0)
WEIGHT = random_weight(RNG, (64, 64), fmt_of(4))
DESC = linear_desc(WEIGHT)
F32, I32 = np.float32, np.int32


def shifted(shape: tuple[int, ...], dtype: Any = F32, by: int = 1) -> Any:
    """Zeros that start ``by`` bytes behind a cache line."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    found = aligned(nbytes + 16)[by : by + nbytes].view(dtype).reshape(shape)
    assert found.ctypes.data % 4 == by % 4
    return found


def zeros(*shape: int) -> Any:
    return np.zeros(shape, F32)


def weight_at(by: int) -> Weight:
    data = shifted((len(WEIGHT.data),), np.uint8, by)
    data[:] = WEIGHT.data
    return Weight(WEIGHT.shape, WEIGHT.format, "il16", data)


def experts(**odd: int) -> Any:
    spec = experts_spec(64, 64, 4, 2, 0, (4, 4, 4))
    parts = tuple(DESC for _ in range(3))
    nbytes = sizes.experts_scratch_nbytes(workspace_spec(spec, 1))
    where = {"base": 0, "stride": 4096, "scratch": 0} | odd
    scratch = aligned(nbytes + 8)
    slots = aligned(5 * 4096)
    block = _native.Experts(
        POOL,
        (64, 64, 0, 4, 2, 1),
        slots.ctypes.data + where["base"],
        where["stride"],
        4,
        parts,
        None,
        None,
        scratch.ctypes.data + where["scratch"],
        nbytes,
    )
    return block, scratch, slots


def begin_experts(x: Any, normed: Any, ids: Any, weights: Any) -> None:
    block, *_kept = experts()
    block.begin(x, normed, ids, weights)


def add_experts(ids: Any, slots: Any) -> None:
    block, *_kept = experts()
    block.begin(zeros(1, 64), zeros(1, 64), np.zeros((1, 2), I32), zeros(1, 2))
    block.add(ids, slots)


def gather(ids: Any, rows: Any, out: Any) -> None:
    _native.gather(DESC, ids, rows, out)


IDS, SLOTS = np.zeros((1, 2), I32), np.zeros(1, I32)
ATTENTION = Attention()
CALLS: dict[str, Callable[[], object]] = {
    "x of a linear": lambda: _native.linear(POOL, DESC, shifted((1, 64)), zeros(1, 64)),
    "out of a linear": lambda: _native.linear(POOL, DESC, zeros(1, 64), shifted((1, 64))),
    "a weight": lambda: linear_desc(weight_at(1)),
    "a weight at two bytes": lambda: linear_desc(weight_at(2)),
    "a bias": lambda: linear_desc(
        WEIGHT, Weight((64,), fmt_of(0, "f32"), "il16", shifted((256,), np.uint8))
    ),
    "a cache": lambda: NativeKVCache(
        KVSpec(1, 64, 16), shifted((sizes.kv_nbytes(KVSpec(1, 64, 16)),), np.uint8)
    ),
    "x of attention": lambda: ATTENTION.block(POOL)(shifted((1, 64)), ATTENTION.cache(), 0),
    "x of a norm": lambda: _native.rms_norm(shifted((1, 64)), zeros(64), 1e-6, zeros(1, 64)),
    "the weight of a norm": lambda: _native.rms_norm(
        zeros(1, 64), shifted((64,)), 1e-6, zeros(1, 64)
    ),
    "ids": lambda: gather(shifted((1,), I32), None, zeros(1, 64)),
    "rows": lambda: gather(np.zeros(1, I32), shifted((1, 576), np.uint8), zeros(1, 64)),
    "out of rows": lambda: gather(np.zeros(1, I32), None, shifted((1, 64))),
    "slots": lambda: experts(base=1),
    "strides": lambda: experts(stride=4095),
    "scratch": lambda: experts(scratch=2),
    "x of experts": lambda: begin_experts(shifted((1, 64)), zeros(1, 64), IDS, zeros(1, 2)),
    "normed": lambda: begin_experts(zeros(1, 64), shifted((1, 64)), IDS, zeros(1, 2)),
    "choices": lambda: begin_experts(zeros(1, 64), zeros(1, 64), shifted((1, 2), I32), zeros(1, 2)),
    "mix": lambda: begin_experts(zeros(1, 64), zeros(1, 64), IDS, shifted((1, 2))),
    "added experts": lambda: add_experts(shifted((1,), I32), SLOTS),
    "added slots": lambda: add_experts(SLOTS, shifted((1,), I32)),
}


@pytest.mark.parametrize("what", CALLS)
def test_memory_off_its_alignment_is_refused_in_a_sentence(what: str) -> None:
    with pytest.raises(ValueError, match=r"bytes behind a multiple of 4: use memory that is"):
        CALLS[what]()


def test_four_bytes_are_enough() -> None:
    x, by_four = normal(RNG, 3, 64), shifted((3, 64), F32, 4)
    by_four[:] = x
    bias = vector(normal(RNG, 64))
    for by in (4, 12):
        expected, out = zeros(3, 64), shifted((3, 64), F32, 4)
        _native.linear(POOL, linear_desc(WEIGHT, bias), x, expected)
        moved = weight_at(by)
        _native.linear(POOL, linear_desc(moved, bias), by_four, out)
        assert np.array_equal(out, expected)
