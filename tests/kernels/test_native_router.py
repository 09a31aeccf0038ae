"""Native router: softmax, top-k, mixing weights and the guess for the next layer."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from attention_tools import POOLS, chunkings, norm_rows, same_bits, vector, workspace
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
        self.spec = RouterSpec(HIDDEN, experts, choices, normalise, 1e-6)
        self.rows = options.get("max_tokens", 300)
        self.layers = [
            {
                "norm": vector(1 + 0.1 * normal(rng, HIDDEN)),
                "gate": random_weight(rng, (experts, HIDDEN), fmt_of(bits)),
            }
            for _ in range(2)
        ]

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
        return norm_rows(x, weights["norm"], 1e-6) @ gate.T


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
def test_matches_float64(experts: int, choices: int, normalise: bool, bits: int) -> None:
    layers = Layers(experts, choices, bits, normalise=normalise)
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
def test_guess_of_a_single_row_is_the_next_layers_best_logits(candidates: int) -> None:
    layers = Layers(9, 2)
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


def test_a_router_that_does_not_fit_its_workspace_is_refused() -> None:
    layers = Layers(20, 4)
    with pytest.raises(ValueError, match="20 experts, 4 per token"):
        NativeRouter(POOLS[0], workspace(), layers.spec, layers.layers[0], None, None)
    with pytest.raises(ValueError, match="301 rows"):
        layers.run(rows(301))


def test_no_rows_yield_no_routing_and_no_guess() -> None:
    ids, weights, normed, guess = Layers(20, 4).run(rows(0), candidates=6)
    assert [len(part) for part in (ids, weights, normed, guess)] == [0, 0, 0, 0]
