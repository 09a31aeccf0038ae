"""Routing for a shape is a trace that came with aegis, or one that is like it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_tools import traces

from aegis.predict.routing import CHARACTERS, make_trace, routing_for, with_layers
from aegis.synthetic.shipped import SHIPPED, shipped_trace
from aegis.tiers.replay import replay
from aegis.tiers.routing_stats import chosen_again, guessed_right, popular_share
from aegis.tiers.trace import RoutingTrace

LARGE = "synthetic:qwen3.6-35b-a3b"


def shipped(name: str) -> RoutingTrace:
    trace = shipped_trace(name)
    assert trace is not None
    return trace


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shape_that_was_recorded_is_replayed_as_it_was(name: str) -> None:
    trace = shipped(name)
    _, layers, per_token = trace.shape
    found = routing_for("some/model", layers, trace.num_experts, per_token)
    assert found.origin == f"the trace of {name}"
    assert (found.trace.chosen == trace.chosen).all()


@pytest.mark.parametrize("layers", [1, 2, 7, 41, 94])
def test_other_layers_are_left_out_or_come_again(layers: int) -> None:
    found = routing_for("some/model", layers, 256, 8)
    assert f"its 40 layers as {layers}" in found.origin
    assert found.trace.shape == (256, layers, 8)
    assert found.trace.guesses[0].shape[1] == layers - 1
    if layers > 1:
        known = guessed_right(shipped(LARGE), 1)
        assert guessed_right(found.trace, 1) == pytest.approx(known, abs=0.3)


@given(traces(), st.integers(1, 12))
def test_a_trace_of_any_layers_can_be_replayed(trace: RoutingTrace, layers: int) -> None:
    found = with_layers(trace, layers)
    assert replay(found, 9, guess="cross-layer").choices == found.chosen.size
    assert found.shape[1] == layers


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_made_is_as_uneven_repeated_and_guessable_as_what_was_recorded(name: str) -> None:
    trace = shipped(name)
    tokens, layers, per_token = trace.shape
    made = make_trace(CHARACTERS[name], layers, trace.num_experts, per_token, tokens)
    assert popular_share(made) == pytest.approx(popular_share(trace), rel=0.05)
    for measure in (lambda t: guessed_right(t, 1), chosen_again):
        assert measure(made) == pytest.approx(measure(trace), rel=0.06)
    for share in (1 / 12, 1 / 4, 1 / 2):
        slots = round(share * layers * trace.num_experts)
        here, there = (replay(one, slots, skip=tokens // 4).hit_rate for one in (made, trace))
        assert here == pytest.approx(there, abs=0.035)


def test_random_weights_route_like_the_large_shape_whatever_their_own() -> None:
    assert LARGE in routing_for("synthetic:small", 3, 16, 4).origin
    assert "embedded" in routing_for("some/model", 3, 16, 2).origin
    assert LARGE in routing_for("some/model", 3, 128, 8).origin


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(2, 40), st.integers(1, 8))
def test_what_is_made_is_the_same_every_time(layers: int, experts: int, per_token: int) -> None:
    per_token = min(per_token, experts)
    first, second = (
        make_trace(CHARACTERS[LARGE], layers, experts, per_token, tokens=9) for _ in range(2)
    )
    assert (first.chosen == second.chosen).all()
    assert (np.diff(first.chosen.astype(int), axis=-1) > 0).all()
    assert first.chosen.max() < experts
