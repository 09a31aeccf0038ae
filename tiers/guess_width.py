"""How many experts are worth reading ahead for a layer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

MAX_WIDTH = 16
START = 6
"""Reads per layer before anything is known."""
MOST = 12
"""Experts that are ranked for a layer: of those behind them next to none is chosen."""

WORTH = 1 / 3
"""A read ahead is begun where it is right at least so often: one that is right saves the time of a
read, one that is wrong is in the way of the layer's own for half of that time in the mean."""
_UP, _DOWN = 1 / 50, 1 / 8
_FADING = 1 / 256
"""Share of a rank's latest outcome in its rate."""


class Width(Protocol):
    """Says how far down a ranking reads are issued, and how many."""

    most: int
    """How many experts must be ranked."""
    reads: int
    """Reads to issue for a layer, at most."""
    ranks: int
    """Only the first so many of a ranking are read."""
    learns: bool
    """Whether ``judge`` and ``ended`` make a difference."""

    def judge(self, absent: Sequence[tuple[int, int]], chosen: set[int]) -> None:
        """(rank, expert) of a ranking's experts that lay in no slot, and what was chosen then."""

    def ended(self, issued: int, withdrawn: int, in_the_way: int) -> None:
        """Of so many reads issued for a layer so many had not begun when it did not choose their
        experts, and so many had begun and not ended."""


class FixedWidth:
    """A number that somebody chose."""

    learns = False

    def __init__(self, reads: int) -> None:
        self.most = self.reads = reads
        self.ranks = sys.maxsize

    def judge(self, absent: Sequence[tuple[int, int]], chosen: set[int]) -> None:
        """Nothing is learnt."""

    def ended(self, issued: int, withdrawn: int, in_the_way: int) -> None:
        """Nothing is learnt."""


class AdaptiveWidth:
    """As many as the disk brings in time, of ranks that are right often enough."""

    learns = True
    most = MOST

    def __init__(self) -> None:
        self.reads, self.ranks = START, START
        self._reads = float(START)
        self._rate = [1.0] * START + [0.0] * (MOST - START)
        """How often an absent expert of each rank was chosen, lately."""

    def judge(self, absent: Sequence[tuple[int, int]], chosen: set[int]) -> None:
        """Ranks beyond the current width are judged too: they cost no read."""
        rate = self._rate
        for rank, expert in absent:
            if rank >= MOST:
                break
            rate[rank] += _FADING * ((expert in chosen) - rate[rank])
        ranks = MOST
        while ranks > 1 and rate[ranks - 1] < WORTH:
            ranks -= 1
        self.ranks = ranks

    def ended(self, issued: int, withdrawn: int, in_the_way: int) -> None:
        """A few more while none is in the way of what a layer wants, fewer where some are."""
        reads = self._reads
        if in_the_way:
            reads -= _DOWN * in_the_way
        elif withdrawn:
            reads -= _UP
        elif issued >= self.reads:
            reads += _UP
        self._reads = reads = min(max(1.0, reads), float(MOST))
        self.reads = int(reads + 0.5)


def open_width(reads: int | None) -> Width:
    """None: it adapts itself."""
    if reads is None:
        return AdaptiveWidth()
    if not 0 <= reads <= MAX_WIDTH:
        raise ValueError(f"guess width is {reads}; it must be from 0 to {MAX_WIDTH}, or None")
    return FixedWidth(reads)
