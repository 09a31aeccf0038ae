"""A disk that exists as a few numbers, and a clock that only moves when it is told to.

Readers take reads as those of ``read_pool`` do: demands before guesses, first come first served
within each, one read per reader at a time. A read begins with the disk's latency, in which other
readers' data may flow; then its bytes come, after those of the reads that began before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf


@dataclass(frozen=True)
class Disk:
    """What is known of a disk; without arguments one that takes no time at all."""

    nbytes_per_s: float = inf
    """Of all readers together."""
    latency_s: float = 0.0
    """From the beginning of a read to its first byte."""
    readers: int = 2
    """How many reads are under way at once."""

    def __post_init__(self) -> None:
        """Refuse what is no disk."""
        if not (self.nbytes_per_s > 0 and 0 <= self.latency_s < inf and self.readers >= 1):
            raise ValueError(
                f"a disk of {self.nbytes_per_s} bytes/s, {self.latency_s} s latency and"
                f" {self.readers} readers: the rate and the readers must be positive"
            )

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes flow."""
        return nbytes / self.nbytes_per_s


class VirtualPool:
    """A read pool over such a disk (see ReadPool). Its clock stands still but in ``advance`` and
    where somebody waits."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.now = 0.0
        """Seconds since it was opened."""
        self.waited_s = 0.0
        """Seconds in which somebody stood waiting."""
        self.busy_s = 0.0
        """Seconds in which bytes flowed, of all reads that have begun."""
        self.read_nbytes = 0
        self._last = 0
        self._nbytes: dict[int, int] = {}
        """Ticket to size, until its result is taken."""
        self._queued: dict[int, bool] = {}
        """Tickets that have not begun, and whether they are demands."""
        self._demands: deque[int] = deque()
        self._guesses: deque[int] = deque()
        self._ends: dict[int, float] = {}
        """Ticket to when it ends, of those that have begun."""
        self._free = [0.0] * disk.readers
        """Heap: when each reader is free."""
        heapify(self._free)
        self._flows_until = 0.0

    @property
    def issued(self) -> int:
        """How many reads were asked for so far, withdrawn ones too."""
        return self._last

    @property
    def depth(self) -> int:
        """See ReadPool."""
        return len(self._queued) + sum(end > self.now for end in self._ends.values())

    def submit(
        self, fd: int, offset: int, nbytes: int, address: int, demand: bool, checksum: int = -1
    ) -> int:
        """See ReadPool."""
        del fd, offset, address, checksum
        return self._submit(nbytes, demand)

    def submit_run(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        addresses: Sequence[int],
        demand: bool,
        checksums: Sequence[int] = (),
    ) -> int:
        """See ReadPool."""
        del fd, offset, checksums
        return self._submit(nbytes * len(addresses), demand)

    def _submit(self, nbytes: int, demand: bool) -> int:
        self._last = ticket = self._last + 1
        self._nbytes[ticket] = nbytes
        if self._free[0] <= self.now:
            self._begin(ticket, self.now)
        else:
            self._queued[ticket] = demand
            (self._demands if demand else self._guesses).append(ticket)
        return ticket

    def _begin(self, ticket: int, now: float) -> None:
        """The reader that is free first takes a read."""
        flow = self.disk.seconds(self._nbytes[ticket])
        self._flows_until = end = max(now + self.disk.latency_s, self._flows_until) + flow
        self.busy_s += flow
        self.read_nbytes += self._nbytes[ticket]
        self._ends[ticket] = end
        heapreplace(self._free, end)

    def _next(self) -> int:
        """The ticket that a free reader takes; 0 if there is none."""
        for queue in (self._demands, self._guesses):
            while queue:
                ticket = queue.popleft()
                if self._queued.pop(ticket, None) is not None:
                    return ticket
        return 0

    def advance(self, seconds: float) -> None:
        """Time goes by."""
        self._reach(self.now + seconds)

    def _reach(self, when: float) -> None:
        """Let readers do what they do until then. Reads only queue while every reader is busy."""
        while self._queued and self._free[0] <= when:
            self._begin(self._next(), self._free[0])
        self.now = when

    def promote(self, ticket: int) -> bool:
        """See ReadPool."""
        if self._queued.get(ticket, True):
            return False
        self._queued[ticket] = True
        # Its entry among the guesses stays behind and is skipped: it has begun by then.
        self._demands.append(ticket)
        return True

    def cancel(self, ticket: int) -> bool:
        """See ReadPool."""
        if self._queued.pop(ticket, None) is None:
            return False
        del self._nbytes[ticket]
        return True

    def done(self, ticket: int) -> bool:
        """See ReadPool."""
        return self._ends.get(ticket, inf) <= self.now

    def wait(self, ticket: int) -> None:
        """See ReadPool."""
        self.wait_any([ticket])

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        """See ReadPool."""
        ends, now = self._ends, self.now
        ended = [ticket for ticket in tickets if ends.get(ticket, inf) <= now]
        if ended or not block or not tickets:
            return ended
        while not (under_way := [ends[ticket] for ticket in tickets if ticket in ends]):
            self._reach(self._free[0])
        # What begins later ends later.
        self._reach(max(self.now, min(under_way)))
        self.waited_s += self.now - now
        return [ticket for ticket in tickets if ends.get(ticket, inf) <= self.now]

    def damaged(self, ticket: int) -> list[int]:
        """See ReadPool."""
        del ticket
        return []

    def result(self, ticket: int) -> int:
        """See ReadPool."""
        del self._ends[ticket]
        return self._nbytes.pop(ticket)

    def close(self) -> None:
        """See ReadPool: there is nothing to stop."""
