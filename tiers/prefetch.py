"""The read queue: which expert is on its way into which slot, and what became of it."""

from __future__ import annotations

from time import perf_counter

from aegis.tiers.errors import DamagedExpertError, ReadError
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
        self.in_flight: dict[int, tuple[list[int], list[Counters]]] = {}
        """Ticket to (slots, the counters of the phase that issued it)."""
        self.ticket_of: dict[int, int] = {}
        """Slot to ticket."""
        self.failed: dict[int, ReadError] = {}
        """Expert key to what went wrong, until it is read again."""
        self._adopted: set[int] = set()
        """Keys of reads that are needed by somebody who did not begin them."""

    def start(self, slot: int, key: int, demand: bool) -> None:
        """Read expert ``key`` into the free ``slot``."""
        self.slots.begin(slot, key)
        layer_index, expert = divmod(key, self.files.num_experts)
        fd, offset, nbytes = self.files.locate(layer_index, expert)
        address = self.slots.address(slot)
        checksum = self.files.checksum(layer_index, expert)
        ticket = self.pool.submit(fd, offset, nbytes, address, demand, checksum)
        self._follow(ticket, [slot], demand)

    def start_run(self, slots: list[int], demand: bool) -> None:
        """One read for experts that follow each other in the file; each slot has been begun."""
        layer_index, expert = divmod(self.slots.key_of[slots[0]], self.files.num_experts)
        fd, offset, nbytes = self.files.locate(layer_index, expert)
        addresses = [self.slots.address(slot) for slot in slots]
        checksums = [self.files.checksum(layer_index, expert + i) for i in range(len(slots))]
        ticket = self.pool.submit_run(fd, offset, nbytes, addresses, demand, checksums)
        self._follow(ticket, slots, demand)

    def _follow(self, ticket: int, slots: list[int], demand: bool) -> None:
        self.in_flight[ticket] = (slots, self.counting)
        for slot in slots:
            self.ticket_of[slot] = ticket
            key = self.slots.key_of[slot]
            self.failed.pop(key, None)
            self._adopted.discard(key)
            if not demand:
                self.slots.guessed[slot] = True
                self.counting[key // self.files.num_experts].guesses += 1

    def promote(self, slot: int) -> None:
        """Somebody needs what another began to read: a guess becomes a demand."""
        self._adopted.add(self.slots.key_of[slot])
        self.pool.promote(self.ticket_of[slot])

    def forgive(self, key: int) -> bool:
        """Forget that a read failed, if others had begun it: that says nothing about the disk now.
        Such a read costs another one, never a token."""
        forgiven = key in self._adopted
        if forgiven:
            del self.failed[key]
        return forgiven

    def cancel(self, slot: int) -> None:
        """Withdraw the read into ``slot`` if the disk has not begun, freeing the slot.

        A run is withdrawn as a whole, once none of its other slots is pinned."""
        ticket = self.ticket_of[slot]
        if ticket not in self.in_flight:
            return  # Ctrl-C struck while its end was being noted; recovery sorts that out
        slots, counting = self.in_flight[ticket]
        if any(self.slots.pins[other] for other in slots if other != slot):
            return
        if not self.pool.cancel(ticket):
            return
        del self.in_flight[ticket]
        for other in slots:
            del self.ticket_of[other]
            if self.slots.guessed[other]:
                counting[self.slots.key_of[other] // self.files.num_experts].cancelled += 1
            self.slots.fail(other)

    def cancel_unpinned(self) -> None:
        """Withdraw every read that nobody waits for."""
        for slots, _ in list(self.in_flight.values()):
            if not self.slots.pins[slots[0]]:
                self.cancel(slots[0])

    def settle_unpinned(self) -> None:
        """Withdraw every read that nobody waits for, and wait for those that have begun."""
        self.cancel_unpinned()
        pins = self.slots.pins
        while tickets := [
            ticket
            for ticket, (slots, _) in self.in_flight.items()
            if not all(pins[slot] for slot in slots)
        ]:
            self._note(self.pool.wait_any(tickets, True))

    def collect(self) -> None:
        """Take note of the reads that have ended."""
        if self.in_flight:
            self._note(self.pool.wait_any(list(self.in_flight), False))

    def collect_blocking(self, layer_index: int) -> None:
        """The same, after at least one has (some must be under way); the time counts as that
        layer's waiting."""
        begin = perf_counter()
        try:
            ended = self.pool.wait_any(list(self.in_flight), True)
        finally:
            self.counting[layer_index].wait_s += perf_counter() - begin
        self._note(ended)

    def _note(self, tickets: list[int]) -> None:
        stride = self.files.stride
        for ticket in tickets:
            run, counting = self.in_flight.pop(ticket)
            damaged = self.pool.damaged(ticket)
            got = self.pool.result(ticket)
            layer_index, expert = divmod(self.slots.key_of[run[0]], self.files.num_experts)
            counting[layer_index].read_nbytes += max(0, got)
            for index, slot in enumerate(run):
                del self.ticket_of[slot]
                if got < stride or index in damaged:
                    self._fail(slot, got)
                else:
                    self.files.note_intact(layer_index, expert + index)
                    self.slots.arrive(slot)
                got -= min(stride, max(0, got))

    def _fail(self, slot: int, got: int) -> None:
        key, stride = self.slots.key_of[slot], self.files.stride
        layer_index, expert = divmod(key, self.files.num_experts)
        path, offset = str(self.files.paths[layer_index]), expert * stride
        if got < stride:
            self.failed[key] = ReadError(path, offset, stride, got)
        else:
            layer = self.files.layers[layer_index]
            self.failed[key] = DamagedExpertError(path, offset, stride, layer, expert)
        self.slots.fail(slot)

    def drain(self) -> None:
        """Withdraw what has not begun and wait for the rest."""
        for ticket in list(self.in_flight):
            for slot in self.in_flight[ticket][0]:
                self.slots.pins[slot] = 0
            self.cancel(self.in_flight[ticket][0][0])
        while self.in_flight:
            self._note(self.pool.wait_any(list(self.in_flight), True))
