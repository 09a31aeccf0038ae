"""The read queue: which expert is on its way into which slot, and what became of it."""

from __future__ import annotations

from time import perf_counter

from aegis.tiers.errors import ReadError
from aegis.tiers.read_pool import ReadPool
from aegis.tiers.slots import SlotPool
from aegis.tiers.stats import Counters, TierStats
from aegis.tiers.store import ExpertFiles


class ReadQueue:
    """Reads in flight. Completions are only noticed in ``collect``, on the caller's thread."""

    def __init__(
        self, files: ExpertFiles, slots: SlotPool, pool: ReadPool, stats: TierStats
    ) -> None:
        self.files = files
        self.slots = slots
        self.pool = pool
        self.stats = stats
        self.counting: list[Counters] = stats.decode
        """Counters per layer of the phase that runs now."""
        self.in_flight: dict[int, tuple[int, list[Counters]]] = {}
        """Ticket to (slot, the counters of the phase that issued it)."""
        self.ticket_of: dict[int, int] = {}
        """Slot to ticket."""
        self.failed: dict[int, ReadError] = {}
        """Expert key to what went wrong, until it is read again."""

    def start(self, slot: int, key: int, demand: bool) -> None:
        """Read expert ``key`` into the free ``slot``."""
        layer_index, expert = divmod(key, self.files.num_experts)
        fd, offset, nbytes = self.files.locate(layer_index, expert)
        slots = self.slots
        slots.begin(slot, key)
        self.failed.pop(key, None)
        address = slots.base + slot * slots.stride
        ticket = self.pool.submit(fd, offset, nbytes, address, demand)
        self.in_flight[ticket] = (slot, self.counting)
        self.ticket_of[slot] = ticket
        if not demand:
            slots.guessed[slot] = True
            self.counting[layer_index].guesses += 1

    def promote(self, slot: int) -> None:
        """A guess has become a demand."""
        self.pool.promote(self.ticket_of[slot])

    def cancel(self, slot: int) -> bool:
        """Withdraw the read into ``slot`` if the disk has not begun; the slot is free then."""
        ticket = self.ticket_of[slot]
        if not self.pool.cancel(ticket):
            return False
        _, counting = self.in_flight.pop(ticket)
        del self.ticket_of[slot]
        if self.slots.guessed[slot]:
            counting[self.slots.key_of[slot] // self.files.num_experts].cancelled += 1
        self.slots.fail(slot)
        return True

    def cancel_unpinned(self) -> None:
        """Withdraw every read that nobody waits for."""
        for slot in list(self.ticket_of):
            if not self.slots.pins[slot]:
                self.cancel(slot)

    def settle_unpinned(self) -> None:
        """Withdraw every read that nobody waits for, and wait for those that have begun."""
        self.cancel_unpinned()
        pins = self.slots.pins
        while tickets := [t for t, (slot, _) in self.in_flight.items() if not pins[slot]]:
            self._note(self.pool.wait_any(tickets, True))

    def collect(self) -> None:
        """Take note of the reads that have ended."""
        if self.in_flight:
            self._note(self.pool.wait_any(list(self.in_flight), False))

    def collect_blocking(self, layer_index: int) -> None:
        """The same, after at least one has; the time counts as that layer's waiting."""
        if not self.in_flight:
            return
        begin = perf_counter()
        try:
            ended = self.pool.wait_any(list(self.in_flight), True)
        finally:
            self.counting[layer_index].wait_s += perf_counter() - begin
        self._note(ended)

    def _note(self, tickets: list[int]) -> None:
        slots, stride = self.slots, self.files.stride
        for ticket in tickets:
            slot, counting = self.in_flight.pop(ticket)
            del self.ticket_of[slot]
            got = self.pool.result(ticket)
            layer_index, expert = divmod(slots.key_of[slot], self.files.num_experts)
            counting[layer_index].read_nbytes += max(0, got)
            if got == stride:
                slots.arrive(slot)
                continue
            self.failed[slots.key_of[slot]] = ReadError(
                str(self.files.paths[layer_index]), expert * stride, stride, got
            )
            slots.fail(slot)

    def drain(self) -> None:
        """Withdraw what has not begun and wait for the rest."""
        for slot in list(self.ticket_of):
            self.cancel(slot)
        while self.in_flight:
            self._note(self.pool.wait_any(list(self.in_flight), True))
