"""Native router: scores, top-k, mixing weights and the guess for the next layer."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from attention_tools import (
    POOLS,
    chunkings,
    norm_rows,
    same_bits,
    values_of,
    vector,
    workspace,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from native_tools import fmt_of, isa, normal, random_weight, stored

from aegis.kernels import formats
from aegis.kernels.base import RouterSpec, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.router import NativeRouter

HIDDEN = 128


class Layers:
    """A router and the next layer's, with what a call returned copied out."""

    def __init__(self, experts: int, choices: int, bits: int = 8, **options: Any) -> None:
        rng = np.random.default_rng(options.get("seed", 0))
        normalise = options.get("normalise", True)
        rule = options.get("rule", {})
        self.spec = RouterSpec(HIDDEN, experts, choices, normalise, 1e-6, **rule)
        self.rows = options.get("max_tokens", 300)
        self.layers = [
            {
                "norm": vector(1 + 0.1 * normal(rng, HIDDEN)),
                "gate": random_weight(rng, (experts, HIDDEN), fmt_of(bits)),
            }
            for _ in range(2)
        ]
        if options.get("bias"):
            for layer in self.layers:
                layer["bias"] = vector(normal(rng, experts))
        if self.spec.scoring == "sigmoid":
            for layer in self.layers:
                layer["correction"] = vector(0.3 * normal(rng, experts))

    def block(self, pool: Any) -> NativeRouter:
        spec = self.spec
        space = workspace(
            max_tokens=self.rows,
            hidden_size=HIDDEN,
            num_experts=spec.num_experts,
            num_experts_per_tok=spec.num_experts_per_tok,
        )
        return NativeRouter(pool, space, spec, self.layers[0], spec, self.layers[1])

    def run(self, x: Any, pool: Any = POOLS[1], candidates: int = 4) -> tuple[Any, ...]:
        result = self.block(pool)(x, candidates)
        return tuple(
            part.copy() for part in (result.experts, result.weights, result.normed, result.guess)
        )

    def logits(self, x: Any, layer: int) -> Any:
        weights = self.layers[layer]
        gate = formats.dequantize(weights["gate"]).astype(np.float64)
        bias = values_of(weights["bias"]) if "bias" in weights else 0.0
        return norm_rows(x, weights["norm"], 1e-6) @ gate.T + bias


def rows(count: int, seed: int = 0) -> Any:
    return normal(np.random.default_rng(seed), count, HIDDEN)


def top(logits: Any, count: int) -> Any:
    return np.argsort(-logits, axis=-1, kind="stable")[..., :count]


def gate_of(logits: list[float]) -> Weight:
    """A gate whose logits for the normed row (1, 0, 0, ...) * sqrt(H) are these."""
    fmt = fmt_of(0, "f32")
    values = np.zeros((len(logits), HIDDEN), np.float32)
    values[:, 0] = np.asarray(logits, np.float32) / np.float32(np.sqrt(HIDDEN))
    return stored(formats.MlxArrays(formats.from_f32(values, fmt)), values.shape, fmt)


@pytest.mark.parametrize(("experts", "choices"), [(9, 2), (16, 4), (60, 4), (128, 8)])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("bits", [4, 8, 0])
@pytest.mark.parametrize("bias", [False, True])
def test_matches_float64(
    experts: int, choices: int, normalise: bool, bits: int, bias: bool
) -> None:
    layers = Layers(experts, choices, bits, normalise=normalise, bias=bias)
    x = rows(20)
    ids, weights, normed, _ = layers.run(x)
    logits = layers.logits(x, 0)
    chosen = np.sort(top(logits, choices), axis=-1)
    np.testing.assert_array_equal(ids, chosen)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p = np.take_along_axis(p / p.sum(axis=-1, keepdims=True), chosen, axis=-1)
    p = p / p.sum(axis=-1, keepdims=True) if normalise else p
    np.testing.assert_allclose(weights, p, rtol=1e-4)
    np.testing.assert_allclose(normed, norm_rows(x, layers.layers[0]["norm"], 1e-6), rtol=1e-5)


@pytest.mark.parametrize("candidates", [1, 6, 9, 50])
@pytest.mark.parametrize("bias", [False, True])
def test_guess_of_a_single_row_is_the_next_layers_best_logits(candidates: int, bias: bool) -> None:
    layers = Layers(9, 2, bias=bias)
    x = rows(1)
    guess = layers.run(x, candidates=candidates)[3]
    np.testing.assert_array_equal(guess, top(layers.logits(x, 1)[0], min(candidates, 9)))


def test_guess_of_many_rows_counts_their_choices() -> None:
    layers = Layers(60, 3)
    x = rows(290)
    counts = np.bincount(top(layers.logits(x, 1), 3).reshape(-1), minlength=60)
    expected = [i for i in np.argsort(-counts, kind="stable") if counts[i]]
    np.testing.assert_array_equal(layers.run(x)[3], expected)


def test_no_guess_unless_asked_for_and_possible() -> None:
    layers = Layers(9, 2)
    for count in (1, 5):
        assert len(layers.run(rows(count), candidates=0)[3]) == 0
    space = workspace(hidden_size=HIDDEN, num_experts=9, num_experts_per_tok=2)
    last = NativeRouter(POOLS[0], space, layers.spec, layers.layers[0], None, None)
    assert len(last(rows(1), 6).guess) == 0


def test_a_guess_never_changes_the_routing() -> None:
    layers = Layers(60, 4)
    x = rows(7)
    alone, guessed = layers.run(x, candidates=0), layers.run(x, candidates=8)
    np.testing.assert_array_equal(alone[0], guessed[0])
    assert same_bits(alone[1], guessed[1])


@given(st.sampled_from([9, 60]), st.lists(st.integers(1, 149), max_size=5), st.integers(0, 99))
@settings(max_examples=15)
def test_chunks_and_threads_never_change_a_bit(experts: int, cuts: list[int], seed: int) -> None:
    layers = Layers(experts, 3, seed=seed)
    x = rows(150, seed)
    whole = layers.run(x, POOLS[0])
    for pool in POOLS:
        start, parts = 0, []
        for count in chunkings(150, cuts):
            parts.append(layers.run(x[start : start + count], pool))
            start += count
        np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), whole[0])
        for field in (1, 2):
            assert same_bits(np.concatenate([part[field] for part in parts]), whole[field])


def test_every_instruction_set_gives_the_same_bits() -> None:
    layers = Layers(60, 6, normalise=False)
    results = []
    for each in _native.isas():
        with isa(each):
            results.append(layers.run(rows(5)))
    for result in results:
        for part, first in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(part.view(np.uint32), first.view(np.uint32))


def test_ties_go_to_the_lower_expert() -> None:
    layers = Layers(20, 4)
    x = np.zeros((1, HIDDEN), np.float32)
    x[0, 0] = 1
    for layer in layers.layers:
        layer["norm"] = vector(np.ones(HIDDEN))
    layers.layers[0]["gate"] = gate_of([0, 0, 5, 0, 0, 5, 5] + 13 * [0])
    layers.layers[1]["gate"] = gate_of([0.0, -0.0, 0.0, 1.0] + 12 * [-1] + 4 * [0])
    ids, weights, _, guess = layers.run(x, candidates=6)
    assert ids.tolist() == [[0, 2, 5, 6]]
    assert weights[0, 1] == weights[0, 2] == weights[0, 3]
    assert guess.tolist() == [3, 0, 1, 2, 16, 17]


@pytest.mark.parametrize("count", [1, 4])
def test_nan_and_infinite_rows_yield_valid_distinct_experts(count: int) -> None:
    layers = Layers(20, 4)
    for value in (np.nan, np.inf, -np.inf, 3e38):
        x = np.full((count, HIDDEN), value, np.float32)
        ids, _, _, guess = layers.run(x, candidates=8)
        assert all(len(set(row)) == 4 and row == sorted(row) for row in ids.tolist())
        assert ids.min() >= 0
        assert ids.max() < 20
        assert len(set(guess.tolist())) == len(guess) > 0


SIGMOID = [
    {"scoring": "sigmoid"},
    {"scoring": "sigmoid", "routed_scaling_factor": 2.5},
    {"scoring": "sigmoid", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    {"scoring": "sigmoid", "n_group": 8, "topk_group": 1},
]


def sigmoid_choice(layers: Layers, x: Any, layer: int) -> tuple[Any, Any]:
    """Sigmoids, and the same with corrections and without the groups that are left out."""
    spec = layers.spec
    p = 1 / (1 + np.exp(-layers.logits(x, layer)))
    groups = (p + values_of(layers.layers[layer]["correction"])).reshape(len(x), spec.n_group, -1)
    sums = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
    kept = top(sums, spec.topk_group)
    allowed = np.zeros(sums.shape, bool)
    np.put_along_axis(allowed, kept, True, axis=-1)
    return p, np.where(allowed[..., None], groups, -np.inf).reshape(p.shape)


@pytest.mark.parametrize("rule", SIGMOID)
@pytest.mark.parametrize("normalise", [True, False])
def test_sigmoids_match_float64(rule: dict[str, Any], normalise: bool) -> None:
    layers = Layers(64, 6, rule=rule, normalise=normalise)
    x = rows(40)
    ids, weights, _, guess = layers.run(x)
    p, ranks = sigmoid_choice(layers, x, 0)
    chosen = np.sort(top(ranks, 6), axis=-1)
    np.testing.assert_array_equal(ids, chosen)
    p = np.take_along_axis(p, chosen, axis=-1)
    p = p / p.sum(axis=-1, keepdims=True) if normalise else p
    np.testing.assert_allclose(weights, p * rule.get("routed_scaling_factor", 1), rtol=1e-4)
    counts = np.bincount(top(sigmoid_choice(layers, x, 1)[1], 6).reshape(-1), minlength=64)
    assert guess.tolist() == [i for i in np.argsort(-counts, kind="stable") if counts[i]]
    single = layers.run(x[:1], candidates=7)[3]
    np.testing.assert_array_equal(single, top(sigmoid_choice(layers, x[:1], 1)[1][0], 7))


@pytest.mark.parametrize("rule", SIGMOID)
def test_sigmoids_have_the_same_bits_in_chunks_on_every_instruction_set(
    rule: dict[str, Any],
) -> None:
    layers = Layers(64, 6, rule=rule)
    x = rows(130)
    whole = layers.run(x, POOLS[0])
    for each in _native.isas():
        with isa(each):
            parts = [layers.run(part, POOLS[2]) for part in (x[:1], x[1:100], x[100:])]
        for field in (0, 1):
            assert same_bits(np.concatenate([part[field] for part in parts]), whole[field])


def test_groups_of_equal_sums_go_to_the_lower_one() -> None:
    rule = {"scoring": "sigmoid", "n_group": 4, "topk_group": 2}
    layers = Layers(16, 4, rule=rule)
    x = np.zeros((1, HIDDEN), np.float32)
    x[0, 0] = 1
    for layer in layers.layers:
        layer["norm"], layer["correction"] = vector(np.ones(HIDDEN)), vector(np.zeros(16))
        # Sums of the two best: 1 + 0, 1 + 1, 1 + 1 and 1 + 1 as logits.
        layer["gate"] = gate_of([9, 0, 0, 0, 9, 9, 0, 0, 9, 0, 9, 0, 9, 9, 9, 0])
    ids, _, _, guess = layers.run(x, candidates=6)
    assert ids.tolist() == [[4, 5, 8, 10]]
    assert guess.tolist() == [4, 5, 8, 10, 6, 7]


def test_sigmoids_that_are_all_zero_give_no_nan() -> None:
    layers = Layers(16, 4, rule={"scoring": "sigmoid"})
    layers.layers[0]["norm"] = vector(np.ones(HIDDEN))
    layers.layers[0]["gate"] = gate_of([-500] * 16)
    x = np.zeros((1, HIDDEN), np.float32)
    x[0, 0] = 1
    assert layers.run(x)[1].tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("rule", [SIGMOID[0], SIGMOID[3]])
def test_nan_and_infinite_rows_yield_valid_distinct_experts_of_sigmoids(
    rule: dict[str, Any],
) -> None:
    layers = Layers(16, 2, rule=rule)
    for value in (np.nan, np.inf, -np.inf):
        ids, _, _, guess = layers.run(np.full((3, HIDDEN), value, np.float32), candidates=8)
        assert all(len(set(row)) == 2 and row == sorted(row) for row in ids.tolist())
        assert ids.min() >= 0
        assert ids.max() < 16
        assert len(set(guess.tolist())) == len(guess) > 0


@pytest.mark.parametrize(
    "rule", [{"n_group": 3}, {"n_group": 16, "topk_group": 3}, {"n_group": 2, "topk_group": 3}]
)
def test_groups_that_cannot_hold_the_choice_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot lie in"):
        Layers(16, 4, rule={"scoring": "sigmoid"} | rule).run(rows(1))


def test_corrections_for_other_experts_are_refused() -> None:
    layers = Layers(16, 4, rule={"scoring": "sigmoid"})
    layers.layers[0]["correction"] = vector(np.zeros(15))
    with pytest.raises(ValueError, match=r"\(15,\), expected \(16,\)"):
        layers.run(rows(1))


def test_a_router_that_does_not_fit_its_workspace_is_refused() -> None:
    layers = Layers(20, 4)
    with pytest.raises(ValueError, match="20 experts, 4 per token"):
        NativeRouter(POOLS[0], workspace(), layers.spec, layers.layers[0], None, None)
    with pytest.raises(ValueError, match="301 rows"):
        layers.run(rows(301))


def test_no_rows_yield_no_routing_and_no_guess() -> None:
    ids, weights, normed, guess = Layers(20, 4).run(rows(0), candidates=6)
    assert [len(part) for part in (ids, weights, normed, guess)] == [0, 0, 0, 0]
