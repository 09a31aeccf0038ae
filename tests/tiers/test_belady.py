"""Belady's bound against everything that slots could have held."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_tools import made, traces

from aegis.tiers.belady import belady
from aegis.tiers.policy import POLICIES
from aegis.tiers.replay import replay
from aegis.tiers.trace import RoutingTrace

Held = frozenset[int]


@st.composite
def tiny(draw: st.DrawFn) -> RoutingTrace:
    """Small enough for every state of every slot to be tried."""
    layers, experts = draw(st.sampled_from([(1, 5), (2, 3), (3, 2)]))
    per_token = draw(st.integers(1, 2))
    tokens = draw(st.integers(1, 9 // layers + 2))
    choice = st.lists(
        st.integers(0, experts - 1), min_size=per_token, max_size=per_token, unique=True
    ).map(sorted)
    chosen = [[draw(choice) for _ in range(layers)] for _ in range(tokens)]
    return made(chosen, np.zeros((tokens, layers - 1, 1)), np.zeros((tokens, layers - 1, 1)))


def most_hits(trace: RoutingTrace, slots: int, skip: int) -> int:
    """By trying everything: what is kept of what was there is anybody's choice at every layer."""
    tokens, layers, per_token = trace.shape
    best: dict[Held, int] = {frozenset(): 0}
    for token in range(tokens):
        for layer in range(layers):
            chosen = {layer * trace.num_experts + int(e) for e in trace.chosen[token, layer]}
            after: dict[Held, int] = {}
            for held, hits in best.items():
                found = hits + (len(held & chosen) if token >= skip else 0)
                others = sorted(held - chosen)
                for size in range(min(len(others), slots - per_token) + 1):
                    for kept in combinations(others, size):
                        now = frozenset(chosen.union(kept))
                        after[now] = max(after.get(now, 0), found)
            best = after
    return max(best.values())


@given(tiny(), st.integers(0, 3), st.integers(0, 3))
def test_nothing_hits_more_often_and_something_as_often(
    trace: RoutingTrace, more: int, skip: int
) -> None:
    tokens, layers, per_token = trace.shape
    skip = min(skip, tokens - 1)
    slots = per_token + more
    found = belady(trace, slots, skip=skip)
    assert found.hits == most_hits(trace, slots, skip)
    assert found.choices == (tokens - skip) * layers * per_token


@given(traces(), st.integers(1, 60), st.integers(0, 25), st.sampled_from(sorted(POLICIES)))
def test_no_policy_passes_the_bound(
    trace: RoutingTrace, slots: int, skip: int, policy: str
) -> None:
    found, bound = replay(trace, slots, policy=policy, skip=skip), belady(trace, slots, skip=skip)
    assert found.choices == bound.choices
    assert found.hits <= bound.hits


@given(traces())
def test_with_a_slot_for_everybody_only_the_first_time_is_a_miss(trace: RoutingTrace) -> None:
    _, layers, _ = trace.shape
    found = belady(trace, layers * trace.num_experts)
    assert found.misses == replay(trace, layers * trace.num_experts).misses
    hits = [belady(trace, slots).hits for slots in range(1, 20)]
    assert hits == sorted(hits)


@pytest.mark.parametrize(("slots", "hits"), [(2, 1), (3, 3), (4, 5)])
def test_counted_by_hand(slots: int, hits: int) -> None:
    """One layer, two experts a token: 01 23 01 02 34."""
    trace = made([[[0, 1]], [[2, 3]], [[0, 1]], [[0, 2]], [[3, 4]]], [[]] * 5, [[]] * 5)
    assert belady(trace, slots).hits == hits
