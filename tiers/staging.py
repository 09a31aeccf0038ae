"""Prefill: each needed expert of a layer once, in file order, through the slots that are not hot.

Reads run ahead of the caller as far as slots allow: first the rest of this layer, then what the
next layer will probably need. Everything on its way or waiting is pinned, so a slot is never reused
under the caller, and what is next in order can always be had: if later experts hold every slot,
the last of them gives way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aegis.tiers.errors import ReadError, SlotError
from aegis.tiers.hot_tier import HotTier
from aegis.tiers.prefetch import ReadQueue
from aegis.tiers.scatter import RUN_NBYTES
from aegis.tiers.slots import NOWHERE, RESIDENT

Batch = tuple[NDArray[np.int32], NDArray[np.int32]]
"""(experts ascending, the slot of each), both int32 of equal length."""


class Staging:
    """The slots of prefill and what was read ahead into them."""

    def __init__(self, queue: ReadQueue, hot: HotTier, size: int) -> None:
        """size: slots that are kept out of the hot tier while prefill runs."""
        self.queue = queue
        self.slots = queue.slots
        self.hot = hot
        self._wanted = size
        self.ahead: dict[int, int] = {}
        """Expert key to slot of pinned reads for the next layer."""

    @property
    def size(self) -> int:
        """Slots that serve prefill: as planned, or fewer when slots were given back."""
        return min(self._wanted, self.slots.capacity)

    @property
    def run_limit(self) -> int:
        """Experts per read. Small records gain threefold from being read together, large ones next
        to nothing; a run must leave half of the slots for computing meanwhile."""
        return max(1, min(RUN_NBYTES // self.slots.stride, self.size // 2))

    def drop_ahead(self) -> None:
        """Unpin what was read ahead; withdraw what has not begun."""
        for key, slot in self.ahead.items():
            if self.slots.key_of[slot] == key:
                self.slots.unpin(slot)
                if slot in self.queue.ticket_of:
                    self.queue.cancel(slot)
        self.ahead.clear()


class LayerVisit:
    """Iterator over one layer's batches. After a ReadError ``next`` tries that read again."""

    def __init__(
        self,
        staging: Staging,
        layer_index: int,
        experts: list[int],
        next_guess: Sequence[int],
        rows: Sequence[int] | None,
    ) -> None:
        self._staging = staging
        self._queue = staging.queue
        self._slots = staging.slots
        self._layer_index = layer_index
        self._num_experts = self._queue.files.num_experts
        first = layer_index * self._num_experts
        self._first_key = first
        self._keys = [first + expert for expert in experts]
        self._rows = None if rows is None else dict(zip(self._keys, rows, strict=True))
        self._position = 0
        self._held: list[int] = []
        self._slot: dict[int, int] = {}
        """Pinned and not handed out: resident or on its way."""
        self._missing: list[int] = []
        after = first + self._num_experts
        # File order: the ring then holds what will be asked for first.
        self._ahead = [after + expert for expert in sorted(next_guess)]
        self._adopt()

    def _adopt(self) -> None:
        """Pin what is there or on its way, drop what was read ahead in vain, note the rest."""
        slots, counters = self._slots, self._queue.counting[self._layer_index]
        for key in self._keys:
            slot = slots.slot_of.get(key, NOWHERE)
            if slot == NOWHERE:
                counters.misses += 1
                self._missing.append(key)
                continue
            slots.pin(slot)
            self._slot[key] = slot
            if slots.state[slot] == RESIDENT:
                counters.hits += 1
                counters.hot_hits += slots.hot_index[slot] != NOWHERE
            else:
                counters.late += 1
                self._queue.promote(slot)
            if slots.guessed[slot]:
                slots.guessed[slot] = False
                counters.useful += 1
        for key in self._slot:
            if key in self._staging.ahead:
                slots.unpin(self._staging.ahead.pop(key))
        self._staging.drop_ahead()

    def __iter__(self) -> LayerVisit:
        return self

    def __next__(self) -> Batch:
        self._finish_batch()
        if self._position == len(self._keys):
            raise StopIteration
        while True:
            self._queue.collect()
            if error := self._take_failures():
                raise error
            self._issue()
            if batch := self._arrived():
                return self._hand_out(batch)
            if self._queue.in_flight:
                self._queue.collect_blocking(self._layer_index)
            else:
                self._steal()

    @property
    def exhausted(self) -> bool:
        """Every batch was handed out and is no longer in use."""
        return self._position == len(self._keys) and not self._held

    def _take_failures(self) -> ReadError | None:
        """Note all experts of ours whose read failed as missing; one error speaks for them."""
        error = None
        for key in list(self._queue.failed):
            if self._slot.pop(key, None) is not None:
                insort(self._missing, key)
                if not self._queue.forgive(key):
                    error = self._queue.failed.pop(key)
        return error

    def _issue(self) -> None:
        """Start reads while slots can be had: this layer first, then the next one."""
        while self._missing and self._start_run(self._missing, self._slot, demand=True):
            pass
        while not self._missing and self._ahead:
            if self._ahead[0] in self._slots.slot_of:
                del self._ahead[0]
            elif not self._start_run(self._ahead, self._staging.ahead, demand=False):
                return

    def _start_run(self, keys: list[int], pinned: dict[int, int], demand: bool) -> bool:
        """One read for the first keys as long as they follow each other and slots can be had."""
        slots, run, limit = self._slots, list[int](), self._staging.run_limit
        while keys and len(run) < limit:
            key = keys[0]
            if run and (key != slots.key_of[run[-1]] + 1 or key in slots.slot_of):
                break
            slot = slots.reclaim()
            if slot == NOWHERE:
                break
            slots.begin(slot, key)
            slots.pin(slot)
            run.append(slot)
            pinned[key] = slot
            del keys[0]
        if run:
            self._queue.start_run(run, demand)
        return bool(run)

    def _arrived(self) -> list[int]:
        """The next keys in order that are there, using up to half of the staging slots."""
        slots, room = self._slots, max(1, self._staging.size // 2)
        batch: list[int] = []
        for key in self._keys[self._position :]:
            slot = self._slot.get(key, NOWHERE)
            if slot == NOWHERE or slots.state[slot] != RESIDENT:
                break
            if slots.hot_index[slot] == NOWHERE:
                if not room:
                    break
                room -= 1
            batch.append(key)
        return batch

    def _hand_out(self, keys: list[int]) -> Batch:
        self._position += len(keys)
        self._held = [self._slot.pop(key) for key in keys]
        return (
            np.array([key - self._first_key for key in keys], dtype=np.int32),
            np.array(self._held, dtype=np.int32),
        )

    def _finish_batch(self) -> None:
        """The caller is done with the batch: count it, let the hot tier choose, unpin."""
        slots, hot = self._slots, self._staging.hot
        for slot in self._held:
            slots.unpin(slot)
            if self._rows is not None:
                hot.policy.touch(slots.key_of[slot], self._rows[slots.key_of[slot]])
            if slots.hot_index[slot] == NOWHERE:
                if self._rows is not None:
                    hot.consider(slot)
                else:
                    hot.settle(slot)
        self._held = []

    def _steal(self) -> None:
        """Nothing moves: evict the last expert in order, or a hot one of another layer."""
        for key in sorted(self._slot, reverse=True):
            slot = self._slot.pop(key)
            self._slots.unpin(slot)
            insort(self._missing, key)
            if not self._slots.pins[slot]:
                self._slots.forget(slot)
                return
        if self._staging.hot.evict() == NOWHERE:
            raise SlotError("every slot is pinned by someone else; release what was acquired first")

    def close(self) -> None:
        """Stop here: unpin everything and withdraw reads that have not begun."""
        self._finish_batch()
        self._take_failures()
        for slot in self._slot.values():
            self._slots.unpin(slot)
            if slot in self._queue.ticket_of:
                self._queue.cancel(slot)
        self._slot.clear()
        self._missing.clear()
        self._position = len(self._keys)
