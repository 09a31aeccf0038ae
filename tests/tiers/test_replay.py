"""Statistics of traces whose answers are known, and replays through the tiers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_tools import made, traces

from aegis.tiers.replay import replay
from aegis.tiers.routing_stats import chosen_again, guessed_right, popular_share
from aegis.tiers.trace import RoutingTrace


@pytest.fixture
def trace() -> RoutingTrace:
    """Two tokens, three layers, two experts each, guesses three wide."""
    return made(
        [[[0, 1], [2, 3], [4, 5]], [[0, 7], [2, 3], [6, 7]]],
        [[[2, 3, 0], [4, 0, 5]], [[3, 2, 0], [0, 1, 6]]],
        [[[5, 4, 0]], [[0, 1, 6]]],
    )


def test_counted_by_hand(trace: RoutingTrace) -> None:
    assert guessed_right(trace, 1) == (2 + 1 + 2 + 0) / 4
    assert guessed_right(trace, 2) == (2 + 0) / 2
    assert chosen_again(trace) == (1 + 2 + 0) / 3
    assert popular_share(trace) == (2 + 2 + 1) / 12


def test_what_cannot_be_known_is_none(trace: RoutingTrace) -> None:
    first = made(trace.chosen[:1, :1], np.zeros((1, 0, 3)), np.zeros((1, 0, 3)))
    assert guessed_right(first, 1) is None
    assert guessed_right(first, 2) is None
    assert chosen_again(first) is None


@given(traces(), st.integers(1, 60), st.sampled_from(["lfu", "lru", "random"]))
def test_every_choice_is_counted_and_nothing_is_read_twice_for_nothing(
    trace: RoutingTrace, slots: int, policy: str
) -> None:
    layers = trace.shape[1]
    plain = replay(trace, slots, policy=policy)
    assert plain.choices == trace.chosen.size
    assert plain.late == plain.useful == plain.guesses == 0
    assert replay(trace, slots, policy=policy) == plain
    all_of_them = replay(trace, layers * trace.num_experts, policy=policy)
    distinct = {(layer, e) for layer in range(layers) for e in trace.chosen[:, layer].flat}
    assert all_of_them.misses == len(distinct)
    guessed = replay(trace, slots, policy=policy, guess="cross-layer")
    assert guessed.choices == plain.choices
    assert guessed.useful <= guessed.guesses


@given(traces())
def test_guesses_that_are_always_right_leave_only_the_first_layer_to_miss(
    trace: RoutingTrace,
) -> None:
    slots = trace.shape[1] * trace.num_experts
    found = replay(trace, slots, guess="cross-layer", guess_width=trace.shape[2])
    first = {int(expert) for expert in trace.chosen[:, 0].flat}
    assert found.misses == len(first)


@given(traces(), st.integers(0, 20))
def test_what_is_skipped_is_not_counted(trace: RoutingTrace, skip: int) -> None:
    tokens, layers, per_token = trace.shape
    counted = tokens - skip if skip < tokens else tokens
    found = replay(trace, 10, skip=skip)
    assert found.choices == counted * layers * per_token
