"""One layer's chosen experts in decode: pinned, read where missing, handed out as they arrive."""

from __future__ import annotations

from types import TracebackType

import numpy as np

from aegis.tiers.errors import SlotError
from aegis.tiers.hot_tier import HotTier
from aegis.tiers.prefetch import ReadQueue
from aegis.tiers.slots import NOWHERE, RESIDENT
from aegis.tiers.staging import Batch


class Acquisition:
    """The chosen experts of one layer, pinned until ``release``. A context manager."""

    __slots__ = (
        "_arrived",
        "_first_key",
        "_held",
        "_hot",
        "_layer_index",
        "_missing",
        "_pending",
        "_queue",
        "_released",
        "complete",
    )

    def __init__(self, queue: ReadQueue, hot: HotTier, layer_index: int, chosen: list[int]) -> None:
        """Pins what is there or on its way; ``request`` then starts reads for the rest."""
        self._queue = queue
        self._hot = hot
        self._layer_index = layer_index
        self._first_key = first = layer_index * queue.files.num_experts
        self._arrived: list[tuple[int, int]] = []
        """(key, slot) that are there and not handed out."""
        self._pending: dict[int, int] = {}
        """Key to slot of reads under way."""
        self._missing: list[int] = []
        """Keys whose read has no slot yet."""
        self._held: list[int] = []
        """Pinned slots that were handed out."""
        self._released = False
        slots, counters = queue.slots, queue.counting[layer_index]
        slot_of, state, pins, guessed = slots.slot_of, slots.state, slots.pins, slots.guessed
        hits = hot_hits = 0
        for expert in chosen:
            slot = slot_of.get(first + expert, NOWHERE)
            if slot == NOWHERE:
                self._missing.append(first + expert)
                queue.failed.pop(first + expert, None)  # Of a guess, and of another time.
                continue
            pins[slot] += 1
            if guessed[slot]:
                guessed[slot] = False
                counters.useful += 1
            if state[slot] == RESIDENT:
                self._arrived.append((first + expert, slot))
                hits += 1
                hot_hits += slots.hot_index[slot] != NOWHERE
            else:
                self._pending[first + expert] = slot
                queue.promote(slot)
        counters.hits += hits
        counters.hot_hits += hot_hits
        counters.late += len(self._pending)
        counters.misses += len(self._missing)
        self.complete = not chosen
        """Every chosen expert has been handed out by ``ready`` or ``wait``."""

    def request(self) -> None:
        """Start reads for what is missing, as far as slots can be had now."""
        slots, queue = self._queue.slots, self._queue
        while self._missing:
            slot = slots.reclaim()
            if slot == NOWHERE:
                slot = self._hot.evict()
                if slot == NOWHERE:
                    return
            key = self._missing.pop(0)
            queue.start(slot, key, demand=True)
            slots.pin(slot)
            self._pending[key] = slot

    def ready(self) -> Batch:
        """What is there now and was not handed out before; never blocks, may be empty."""
        if self._pending or self._missing:
            self._queue.collect()
            self._sort_out()
        return self._hand_out()

    def coming(self) -> Batch | None:
        """What is on its way and will lie where, ascending; None while a read has no slot yet. A
        read that fails may be begun anew into another one."""
        if self._missing:
            return None
        first, pending = self._first_key, sorted(self._pending.items())
        experts = np.array([key - first for key, _ in pending], dtype=np.int32)
        return experts, np.array([slot for _, slot in pending], dtype=np.int32)

    def wait(self) -> Batch:
        """Block until more arrive and hand them out; empty once ``complete``.

        Raises ReadError; calling ``wait`` again retries that read, ``release`` gives up."""
        while not self.complete:
            if self._pending or self._missing:
                self._queue.collect()
                self._sort_out()
            if self._arrived:
                break
            self._raise_failure()
            if not self._queue.in_flight:
                raise SlotError("every slot is pinned by someone else; release these first")
            self._queue.collect_blocking(self._layer_index)
        return self._hand_out()

    def _sort_out(self) -> None:
        """Move what has arrived out of ``_pending``, what failed back to ``_missing``."""
        slots, failed = self._queue.slots, self._queue.failed
        for key, slot in list(self._pending.items()):
            if key in failed:
                del self._pending[key]
                self._missing.append(key)
                self._queue.forgive(key)
            elif slots.state[slot] == RESIDENT:
                del self._pending[key]
                self._arrived.append((key, slot))
        if any(key not in failed for key in self._missing):
            self.request()

    def _raise_failure(self) -> None:
        for key in self._missing:
            if key in self._queue.failed:
                raise self._queue.failed.pop(key)

    def _hand_out(self) -> Batch:
        arrived = self._arrived
        arrived.sort()
        first = self._first_key
        experts = np.array([key - first for key, _ in arrived], dtype=np.int32)
        slots = [slot for _, slot in arrived]
        # In this order: Ctrl-C in between must not make ``release`` unpin them twice.
        self._arrived = []
        self._held += slots
        self.complete = not (self._pending or self._missing)
        return experts, np.array(slots, dtype=np.int32)

    def release(self) -> None:
        """Unpin, count the choice and let the policy decide who stays. Idempotent."""
        if self._released:
            return
        self._released = True
        self.complete = True
        slots, hot = self._queue.slots, self._hot
        key_of, pins, hot_index, touch = slots.key_of, slots.pins, slots.hot_index, hot.policy.touch
        # By key, not as they came: who stays must not depend on the disk's order.
        for slot in sorted(self._held, key=key_of.__getitem__):
            pins[slot] -= 1
            touch(key_of[slot])
            if hot_index[slot] == NOWHERE and not hot.consider(slot):
                slots.refresh(slot)
        self._abandon()

    def _abandon(self) -> None:
        """What was never handed out: unpin it, withdraw reads that have not begun."""
        slots = self._queue.slots
        for _, slot in self._arrived:
            slots.unpin(slot)
        for key, slot in self._pending.items():
            if slots.key_of[slot] != key:
                continue  # its read failed meanwhile, which freed the slot
            slots.unpin(slot)
            if slot in self._queue.ticket_of:
                self._queue.cancel(slot)
        self._arrived, self._held, self._missing = [], [], []
        self._pending = {}

    def __enter__(self) -> Acquisition:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
