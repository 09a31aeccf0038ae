"""A computed disk does what reader threads do, at times that can be worked out by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.tiers.virtual_disk import Disk, VirtualPool


def submit(pool: VirtualPool, nbytes: int, demand: bool = True) -> int:
    return pool.submit(-1, 0, nbytes, 0, demand)


def test_latencies_overlap_and_bytes_follow_each_other() -> None:
    pool = VirtualPool(Disk(nbytes_per_s=10, latency_s=1, readers=2))
    first, second, third = (submit(pool, 20) for _ in range(3))
    assert pool.wait_any([first, second, third]) == [first]
    assert pool.now == pool.waited_s == 3
    assert pool.wait_any([second]) == [second]
    assert pool.now == 5
    pool.wait(third)  # It began at 3, when the first reader was free.
    assert (pool.now, pool.busy_s, pool.read_nbytes) == (7, 6, 60)
    assert [pool.result(ticket) for ticket in (first, second, third)] == [20] * 3


def test_one_reader_waits_for_the_latency_of_every_read() -> None:
    pool = VirtualPool(Disk(nbytes_per_s=10, latency_s=1, readers=1))
    tickets = [submit(pool, 20) for _ in range(2)]
    pool.advance(100)
    assert [pool.done(ticket) for ticket in tickets] == [True, True]
    assert pool.waited_s == 0
    last = submit(pool, 20)
    pool.wait(last)
    assert pool.now == 103


def test_demands_pass_guesses_and_a_promoted_guess_is_a_demand() -> None:
    pool = VirtualPool(Disk(nbytes_per_s=1, readers=1))
    running, guess, later, demand = (submit(pool, 1, demand) for demand in (True, False, False, 1))
    assert not pool.promote(running)
    assert not pool.promote(demand)
    assert pool.promote(later)
    assert not pool.promote(later)
    order = []
    left = [running, guess, later, demand]
    while left:
        [ended] = pool.wait_any(left)
        left.remove(ended)
        order.append(ended)
    assert order == [running, demand, later, guess]
    assert pool.depth == 0


def test_what_has_not_begun_is_withdrawn_and_costs_nothing() -> None:
    pool = VirtualPool(Disk(nbytes_per_s=1, readers=1))
    running, queued, other = (submit(pool, 1, False) for _ in range(3))
    assert pool.cancel(queued)
    assert not pool.cancel(queued)
    assert not pool.cancel(running)
    assert pool.depth == 2
    pool.wait(other)
    assert (pool.now, pool.read_nbytes) == (2, 2)


def test_without_numbers_nothing_takes_time() -> None:
    pool = VirtualPool(Disk())
    tickets = [submit(pool, 1 << 40, demand) for demand in (True, False, True)]
    assert pool.wait_any(tickets, block=False) == tickets
    assert pool.now == pool.waited_s == pool.busy_s == 0
    run = pool.submit_run(-1, 0, 5, [1, 2, 3], False)
    assert pool.result(run) == 15
    assert pool.damaged(tickets[0]) == []
    pool.close()


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans(), st.floats(0, 9)), min_size=1),
    st.integers(1, 5),
    st.floats(0, 3),
)
def test_every_read_ends_no_earlier_than_the_rate_allows(
    reads: list[tuple[int, bool, float]], readers: int, latency_s: float
) -> None:
    pool = VirtualPool(Disk(nbytes_per_s=7, latency_s=latency_s, readers=readers))
    tickets = []
    for nbytes, demand, pause in reads:
        tickets.append(submit(pool, nbytes, demand))
        pool.advance(pause)
    for ticket in tickets:
        pool.wait(ticket)
        assert pool.done(ticket)
    everything = sum(nbytes for nbytes, *_ in reads)
    assert pool.read_nbytes == everything
    assert pool.busy_s == pytest.approx(everything / 7)
    paused = sum(pause for *_, pause in reads)
    assert pool.now == pytest.approx(paused + pool.waited_s)
    assert pool.now >= everything / 7 - 1e-9
    slowest = latency_s * len(reads) + everything / 7 + paused
    assert pool.now <= slowest + 1e-9


@pytest.mark.parametrize(
    "wrong", [{"nbytes_per_s": 0}, {"latency_s": -1}, {"readers": 0}, {"latency_s": inf}]
)
def test_no_disk_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Disk(**wrong)  # type: ignore[arg-type]
