"""Native experts block: any order, split, thread count and instruction set give the same bits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from hypothesis import given
from hypothesis import strategies as st
from native_tools import (
    MX,
    Slots,
    aligned,
    experts_spec,
    fmt_of,
    isa,
    normal,
    oracle,
    random_arrays,
    random_routing,
    random_slots,
    random_weight,
    rows_of,
    workspace_spec,
)

from aegis.kernels import formats
from aegis.kernels.base import ExpertsSpec, Routing, SwigluClamp, Weight
from aegis.kernels.native import _native, sizes
from aegis.kernels.native.moe import NativeExperts
from aegis.kernels.native.workspace import Workspace
from aegis.kernels.sizes import CODE_BITS, GROUPS

MAX_TOKENS = 200
POOLS = [_native.Pool(n) for n in (1, 2, 4)]


class Case:
    """A random block with everything around it."""

    def __init__(
        self,
        seed: int,
        shared: str = "gated",
        bits: tuple[int, int, int] = (4, 4, 4),
        multiplier: float = 1.0,
        group_size: int = 64,
        clamp: SwigluClamp | None = None,
    ) -> None:
        self.rng = rng = np.random.default_rng(seed)
        sizes = 128, max(192, 2 * group_size), 7, 3, 64 if shared != "none" else 0
        # Where there is one, there are the other as well.
        spec = experts_spec(*sizes, bits, group_size, biases=clamp is not None)
        self.spec = replace(spec, residual_multiplier=multiplier, clamp=clamp)
        self.shared = _shared(rng, shared)
        self.arrays = [
            {name: random_arrays(rng, s.shape, s.format) for name, s in self.spec.segments.items()}
            for _ in range(self.spec.num_experts)
        ]
        self.slots = random_slots(rng, self.spec, self.arrays)
        self.workspaces: list[Workspace] = []

    def block(self, pool: Any = POOLS[0], slots: Slots | None = None) -> NativeExperts:
        spec = workspace_spec(self.spec, MAX_TOKENS)
        workspace = Workspace(spec, aligned(sizes.workspace_nbytes(spec)))
        self.workspaces.append(workspace)
        return NativeExperts(pool, workspace, slots or self.slots, self.spec, self.shared)


CLAMP = SwigluClamp(0.75, 1.702)


def _shared(rng: np.random.Generator, kind: str) -> dict[str, Weight]:
    if kind == "none":
        return {}
    weights = {
        "gate_proj": random_weight(rng, (64, 128), fmt_of(4)),
        "up_proj": random_weight(rng, (64, 128), fmt_of(8)),
        "down_proj": random_weight(rng, (128, 64), fmt_of(0)),
    }
    if kind == "gated":
        weights["shared_expert_gate"] = random_weight(rng, (1, 128), fmt_of(8))
    return weights


def fused(block: NativeExperts, x: Any, routing: Routing, slots: Slots) -> Any:
    experts = np.unique(routing.experts).astype(np.int32)
    return block(x.copy(), routing, experts, slots.slot_of[experts])


def pieces(block: NativeExperts, x: Any, routing: Routing, slots: Slots, rng: Any) -> Any:
    """begin, add in random portions (any order where allowed), finish."""
    experts = np.unique(routing.experts).astype(np.int32)
    if len(x) <= block.unordered_rows:
        experts = rng.permutation(experts).astype(np.int32)
    block.begin(x.copy(), routing)
    for part in np.split(experts, np.sort(rng.integers(0, len(experts) + 1, 2))):
        block.add(part, slots.slot_of[part])
    return block.finish()


@pytest.mark.parametrize("shared", ["gated", "ungated", "none"])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize(
    ("bits", "group_size"), [((4, 3, 8), 64), ((2, 5, 6), 32), ((6, 2, 5), 128)]
)
def test_agrees_with_float64(
    shared: str, rows: int, multiplier: float, bits: tuple[int, int, int], group_size: int
) -> None:
    case = Case(rows, shared, bits, multiplier, group_size)
    x, routing = normal(case.rng, rows, 128), random_routing(case.rng, case.spec, rows)
    got = fused(case.block(), x, routing, case.slots)
    exact = oracle(x, routing, case.slots, case.shared, multiplier)
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shared", ["gated", "none"])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("bits", [(MX, MX, MX), (4, MX, 8)])
def test_mxfp4_biases_and_clamps_agree_with_float64(
    shared: str, rows: int, bits: tuple[int, int, int]
) -> None:
    case = Case(rows, shared, bits, clamp=CLAMP)
    x, routing = normal(case.rng, rows, 128), random_routing(case.rng, case.spec, rows)
    got = fused(case.block(), x, routing, case.slots)
    exact = oracle(x, routing, case.slots, case.shared, clamp=CLAMP)
    np.testing.assert_allclose(got, exact, rtol=0, atol=3e-5)


@given(
    st.integers(0, 2**32),
    st.sampled_from(["gated", "ungated", "none"]),
    st.sampled_from([1, 2, 5, 8, 9, 30, 90, MAX_TOKENS]),
    st.sampled_from([1.0, 0.22]),
    st.tuples(*[st.sampled_from([4, *CODE_BITS, MX])] * 3),
    st.sampled_from([64, *GROUPS]),
    st.sampled_from([None, CLAMP]),
)
def test_same_bits_however_it_is_computed(
    seed: int,
    shared: str,
    rows: int,
    multiplier: float,
    bits: tuple[int, int, int],
    group_size: int,
    clamp: SwigluClamp | None,
) -> None:
    case = Case(seed, shared, bits, multiplier, group_size, clamp)
    x, routing = normal(case.rng, rows, 128), random_routing(case.rng, case.spec, rows)
    block = case.block()
    expected = fused(block, x, routing, case.slots)
    for name in _native.isas()[:2]:
        with isa(name):
            for pool in POOLS:
                other = case.block(pool)
                assert np.array_equal(fused(other, x, routing, case.slots), expected)
                got = pieces(other, x, routing, case.slots, case.rng)
                assert np.array_equal(got, expected)
    cut = seed % rows
    parts = [(0, cut), (cut, rows)]
    split = [fused(block, x[a:b], rows_of(routing, a, b), case.slots) for a, b in parts if b > a]
    assert np.array_equal(np.concatenate(split), expected)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_scalar_code_gives_the_same_bits(rows: int) -> None:
    case = Case(rows)
    x, routing = normal(case.rng, rows, 128), random_routing(case.rng, case.spec, rows)
    expected = fused(case.block(), x, routing, case.slots)
    with isa("scalar"):
        assert np.array_equal(fused(case.block(), x, routing, case.slots), expected)


@given(
    st.integers(0, 2**32),
    st.tuples(*[st.sampled_from([3, 4, 8, MX])] * 3),
    st.sampled_from([-70, -45, -31, -20, 0, 15, 22, 43]),
    st.sampled_from([-64, 0, 44]),
)
def test_one_row_gives_the_bits_of_several_at_any_magnitude(
    seed: int, bits: tuple[int, int, int], exponent: int, outlier: int
) -> None:
    case = Case(seed, "gated", bits)
    x = np.ldexp(normal(case.rng, 2, 128), exponent)
    x[:, seed % 128] = np.ldexp(1.5, outlier)
    routing = random_routing(case.rng, case.spec, 2)
    with np.errstate(all="ignore"):
        both = fused(case.block(), x, routing, case.slots)
        for name in _native.isas():
            with isa(name):
                one = fused(case.block(), x[:1], rows_of(routing, 0, 1), case.slots)
                assert np.array_equal(one[0].view(np.uint32), both[0].view(np.uint32))


@given(st.integers(0, 2**32), st.sampled_from([1, 4, 12]))
def test_slots_and_packed_3bit_change_no_bit(seed: int, rows: int) -> None:
    case = Case(seed, bits=(3, 3, 3))
    wide: ExpertsSpec = experts_spec(128, 192, 7, 3, 64, (4, 4, 4))
    nibbles = [
        {n: a._replace(weight=formats.repack_codes(a.weight, 3, 4)) for n, a in parts.items()}
        for parts in case.arrays
    ]
    x, routing = normal(case.rng, rows, 128), random_routing(case.rng, case.spec, rows)
    expected = fused(case.block(), x, routing, case.slots)
    case.spec = wide
    moved = random_slots(case.rng, wide, nibbles)
    assert np.array_equal(fused(case.block(slots=moved), x, routing, moved), expected)


def test_scratch_size_is_the_same_in_python_and_cpp() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        hidden, inner = (int(n) * 64 for n in rng.integers(1, 9, 2))
        shared = int(rng.integers(0, 3)) * 64
        experts = int(rng.integers(4, 40))
        spec = experts_spec(hidden, inner, experts, int(rng.integers(1, 4)), shared, (4, 4, 4))
        tokens = int(rng.integers(1, 600))
        shape = (hidden, inner, shared, experts, spec.num_experts_per_tok, tokens)
        expected = _native.experts_scratch_nbytes(shape)
        assert sizes.experts_scratch_nbytes(workspace_spec(spec, tokens)) == expected


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gate_proj.bias", {"shape": (128,)}, r"gate_proj\.bias has shape \(128,\)"),
        ("down_proj.bias", {"format": fmt_of(0)}, r"down_proj\.bias is .*stored as float32"),
        ("up_proj.bias", {"offset": 1 << 20}, r"up_proj\.bias ends beyond its slot"),
    ],
)
def test_biases_that_do_not_fit_are_refused(name: str, changes: dict[str, Any], words: str) -> None:
    case = Case(0, clamp=CLAMP)
    part = replace(case.spec.segments[name], **changes)
    case.spec = replace(case.spec, segments={**case.spec.segments, name: part})
    with pytest.raises(ValueError, match=words):
        case.block()


def test_misuse_is_refused() -> None:
    case = Case(0)
    block = case.block()
    routing = random_routing(case.rng, case.spec, 12)
    x = normal(case.rng, 12, 128)
    chosen = np.unique(routing.experts).astype(np.int32)
    slots = case.slots.slot_of
    with pytest.raises(ValueError, match="before begin"):
        block.add(chosen, slots[chosen])
    block.begin(x, routing)
    with pytest.raises(ValueError, match="ascending"):
        block.add(chosen[::-1].copy(), slots[chosen[::-1]])
    block.begin(x, routing)
    block.add(chosen[:-1], slots[chosen[:-1]])
    with pytest.raises(ValueError, match="every chosen expert once"):
        block.finish()
    with pytest.raises(ValueError, match="slot 99"):
        block(x, routing, chosen, np.full(len(chosen), 99, np.int32))
    with pytest.raises(ValueError, match="expert 7 of 7"):
        block.begin(x, Routing(routing.experts * 0 + 7, routing.weights, routing.normed, chosen))
    many = random_routing(case.rng, case.spec, MAX_TOKENS + 1)
    with pytest.raises(ValueError, match="does not fit"):
        block.begin(normal(case.rng, MAX_TOKENS + 1, 128), many)


def test_workspace_too_small_is_refused() -> None:
    spec = workspace_spec(Case(0).spec, 4)
    with pytest.raises(ValueError, match="workspace needs"):
        Workspace(spec, aligned(sizes.workspace_nbytes(spec) - 1))
