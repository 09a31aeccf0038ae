"""How many experts are read ahead: bounds for any history, and what it comes to for simple ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_fakes import STRIDE, CountingPool

from aegis.tiers import ExpertTiers, SlotPool
from aegis.tiers.guess_width import MAX_WIDTH, MOST, START, AdaptiveWidth, FixedWidth, open_width
from aegis.tiers.simulate import NoFiles

TOKENS, LAYERS, EXPERTS = 60, 40, 64
RANKING = list(range(20, 20 + MOST))

rankings = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=20)
outcomes = st.tuples(*(st.integers(0, MAX_WIDTH) for _ in range(3)))


@given(st.lists(st.tuples(rankings, st.sets(st.integers(0, 40)), outcomes)))
def test_the_width_stays_within_its_bounds_whatever_happens(
    history: list[tuple[list[tuple[int, int]], set[int], tuple[int, int, int]]],
) -> None:
    width = AdaptiveWidth()
    for absent, chosen, outcome in history:
        width.judge(absent, chosen)
        width.ended(*outcome)
        assert 1 <= width.reads <= MOST
        assert 1 <= width.ranks <= MOST


def after(right: int, withdrawn: int = 0, in_the_way: int = 0) -> AdaptiveWidth:
    """Many layers whose first so many of a ranking were chosen each time."""
    width = AdaptiveWidth()
    assert width.reads == width.ranks == START
    for _ in range(TOKENS * LAYERS):
        width.judge(list(enumerate(RANKING)), set(RANKING[:right]))
        width.ended(min(width.reads, width.ranks), withdrawn, in_the_way)
    return width


def test_more_are_read_while_all_are_right_and_none_is_in_the_way() -> None:
    width = after(right=MOST)
    assert (width.reads, width.ranks) == (MOST, MOST)


def test_a_rank_that_is_never_right_is_not_read() -> None:
    assert after(right=3).ranks == 3
    assert after(right=0).ranks == 1


def test_a_rank_that_is_right_again_is_read_again() -> None:
    width = after(right=2)
    for _ in range(TOKENS * LAYERS):
        width.judge(list(enumerate(RANKING)), set(RANKING[:8]))
    assert width.ranks == 8


@pytest.mark.parametrize(("withdrawn", "in_the_way"), [(1, 0), (0, 1)])
def test_fewer_are_read_while_the_disk_is_not_done_in_time(withdrawn: int, in_the_way: int) -> None:
    assert after(MOST, withdrawn, in_the_way).reads == 1


def test_a_number_that_somebody_chose_is_kept() -> None:
    for reads in range(MAX_WIDTH + 1):
        width = open_width(reads)
        assert isinstance(width, FixedWidth)
        width.judge([(0, 1)], set())
        width.ended(reads, reads, reads)
        assert (width.most, width.reads) == (reads, reads)
    for reads in (-1, MAX_WIDTH + 1):
        with pytest.raises(ValueError, match=f"guess width is {reads}; it must be from 0 to 16"):
            open_width(reads)


@pytest.mark.parametrize(("right", "least", "most"), [(8, 7, 8), (2, 1, 3)])
def test_tiers_read_as_many_ahead_as_turn_out_to_be_right(
    right: int, least: int, most: int
) -> None:
    """On a disk that is quick the rankings alone decide."""
    slots = SlotPool(24, STRIDE)
    with ExpertTiers(
        NoFiles(2, EXPERTS, STRIDE),
        slots,
        num_experts_per_tok=8,
        staging_slots=1,
        pool=CountingPool(),
    ) as tiers:
        issued = 0
        for token in range(600):
            # Other experts each time, so that all have to be read.
            shift = 11 * token % EXPERTS
            ranked = [(shift + rank) % EXPERTS for rank in range(MOST)]
            chosen = sorted(ranked[:right] + [(shift + 40 + i) % EXPERTS for i in range(8 - right)])
            with tiers.acquire(0, list(range(8))) as acquired:
                issued = tiers.guess(1, ranked)
                while not acquired.complete:
                    acquired.wait()
            with tiers.acquire(1, chosen) as acquired:
                while not acquired.complete:
                    acquired.wait()
    assert least <= issued <= most
