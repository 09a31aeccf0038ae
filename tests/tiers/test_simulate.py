"""A simulated run counts what a run counts, and its time adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_tools import made, traces

from aegis.tiers.belady import belady
from aegis.tiers.guess import GUESS_KINDS
from aegis.tiers.policy import POLICIES
from aegis.tiers.replay import replay
from aegis.tiers.simulate import Simulated, Tiering, Times, least_seconds, simulate
from aegis.tiers.trace import RoutingTrace
from aegis.tiers.virtual_disk import Disk

RECORD = 8192
TIMES = Times(layer_s=0.5, shared_s=0.25, expert_s=0.125, head_s=1)


@st.composite
def disks(draw: st.DrawFn) -> Disk:
    rate = draw(st.floats(1e2, 1e7))
    return Disk(rate, draw(st.floats(0, 1)), draw(st.integers(1, 4)))


@st.composite
def tierings(draw: st.DrawFn) -> Tiering:
    return Tiering(
        draw(st.integers(1, 60)),
        draw(st.sampled_from(sorted(POLICIES))),
        draw(st.sampled_from(GUESS_KINDS)),
        draw(st.integers(0, 16)),
    )


def run(trace: RoutingTrace, tiering: Tiering, disk: Disk, skip: int = 0) -> Simulated:
    return simulate(trace, tiering, disk=disk, times=TIMES, record_nbytes=RECORD, skip=skip)


@given(traces(), tierings(), disks(), st.integers(0, 25))
def test_every_choice_and_every_second_is_accounted_for(
    trace: RoutingTrace, tiering: Tiering, disk: Disk, skip: int
) -> None:
    tokens, layers, per_token = trace.shape
    counted = tokens - skip if skip < tokens else tokens
    found = run(trace, tiering, disk, skip)
    counters = found.counters
    assert (found.tokens, counters.choices) == (counted, counted * layers * per_token)
    assert found.compute_s == pytest.approx(counted * TIMES.token_s(layers, per_token))
    assert found.seconds == found.compute_s + found.wait_s
    assert found.tokens_per_s == pytest.approx(counted / found.seconds)
    assert counters.wait_s == found.wait_s >= 0
    assert 0 <= found.disk_share <= 1
    assert found.read_nbytes % RECORD == 0
    assert found.wasted_nbytes == RECORD * counters.wasted
    assert counters.useful + counters.wasted + counters.cancelled >= counters.late
    assert run(trace, tiering, disk, skip) == found


@given(traces(), tierings(), disks())
def test_the_disk_changes_no_count_where_nothing_is_guessed(
    trace: RoutingTrace, tiering: Tiering, disk: Disk
) -> None:
    unguessed = Tiering(tiering.slots, tiering.policy)
    found = run(trace, unguessed, disk)
    expected = replay(trace, tiering.slots, policy=tiering.policy)
    found.counters.wait_s = 0.0
    expected.read_nbytes *= 2  # Of records twice as large.
    assert found.counters == expected


@given(traces(), tierings(), disks())
def test_nothing_is_faster_than_the_bound_of_the_same_policy_without_guesses(
    trace: RoutingTrace, tiering: Tiering, disk: Disk
) -> None:
    tokens, layers, per_token = trace.shape
    found = run(trace, Tiering(tiering.slots, tiering.policy), disk)
    token_s = TIMES.token_s(layers, per_token)
    bound = least_seconds(found.counters.misses, tokens, disk, RECORD, token_s)
    assert found.seconds >= bound * (1 - 1e-9)
    assert bound >= tokens * token_s


@given(traces(), tierings(), disks())
def test_no_policy_and_no_guess_is_faster_than_beladys_bound(
    trace: RoutingTrace, tiering: Tiering, disk: Disk
) -> None:
    tokens, layers, per_token = trace.shape
    found, best = run(trace, tiering, disk), belady(trace, tiering.slots)
    token_s = TIMES.token_s(layers, per_token)
    assert found.counters.misses + found.counters.useful >= best.misses
    bound = least_seconds(best.misses, tokens, disk, RECORD, token_s)
    assert found.seconds >= bound * (1 - 1e-9)


def test_a_token_timed_by_hand() -> None:
    """Two layers of two experts; a disk of one record per second, one reader."""
    trace = made([[[0, 1], [2, 3]]], [[[2, 4]]], [[]])
    disk = Disk(RECORD, readers=1)
    found = run(trace, Tiering(9), disk)
    # Layer: 0.5, then a record at 1 s and at 2 s from then, while 0.25 + 0.125 are computed, and
    # 0.125 behind the last.
    assert found.wait_s == pytest.approx(2 * (0.75 + 0.875))
    assert found.disk_share == pytest.approx(4 / found.seconds)
    guessed = run(trace, Tiering(9, guess="cross-layer", guess_width=1), disk)
    # Expert 2 is read third. Layer 1 asks 0.625 s after its read has begun: it is late, and what
    # is missing comes behind it.
    assert (guessed.counters.late, guessed.counters.misses) == (1, 3)
    assert guessed.wait_s == pytest.approx(0.75 + 0.875 + (1 - 0.625 - 0.25) + 0.875)
    assert guessed.counters.useful == guessed.counters.guesses == 1


def test_where_nothing_takes_time_there_is_no_speed() -> None:
    trace = made([[[0, 1], [2, 3]]], [[[2, 4]]], [[]])
    found = simulate(trace, Tiering(9))
    assert (found.seconds, found.tokens_per_s, found.disk_share) == (0, None, 0)


def test_a_faster_disk_is_never_slower_without_guesses() -> None:
    trace = made([[[0, 1], [2, 3]]] * 9, [[[2, 4]]] * 9, [[]] * 9)
    rates = [RECORD * 2.0**power for power in range(-3, 6)]
    seconds = [run(trace, Tiering(2), Disk(rate, 0.01)).seconds for rate in rates]
    assert seconds == sorted(seconds, reverse=True)


def test_only_what_the_engine_would_ask_the_router_for_is_guessed() -> None:
    """Of a ranking, as many as there are experts per token, or the guess is wide."""
    ranked = [4, 5, 6, 7, 2, 3]
    trace = made([[[0, 1], [2, 3]]], [[ranked]], [[]])
    for width, issued in ((1, 1), (2, 2), (4, 4), (6, 6)):
        found = simulate(trace, Tiering(30, guess="cross-layer", guess_width=width))
        assert found.counters.guesses == issued
    again = made([[[0, 1], [2, 3]], [[0, 1], [2, 3]]], [[[2, 3, 4]], [[2, 3, 4]]], [[], []])
    found = simulate(again, Tiering(30, guess="cross-layer", guess_width=1), skip=1)
    assert (found.counters.guesses, found.counters.hits) == (0, 4)
