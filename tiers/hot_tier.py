"""The hot tier: slots that keep their expert until a hotter one comes."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from random import Random

from aegis.tiers.policy import Policy
from aegis.tiers.slots import NOWHERE, SlotPool

_SPARE = 64
"""Entries too many on the heap, beside as many as there are hot slots, until it is made anew."""


class HotTier:
    """Decides which resident experts stay; all slots but ``reserve`` may belong to it."""

    def __init__(self, slots: SlotPool, policy: Policy, reserve: int, seed: int) -> None:
        """reserve: slots left to reads; the hot tier never fills these."""
        self.slots = slots
        self.policy = policy
        self.reserve = reserve
        # Only speed depends on these draws, never a result; seeded so that runs can be compared.
        self._draw = Random(seed).random
        self._scores = policy.scores
        self._coldest: list[tuple[float, int]] = []
        """Heap of (score, key) with an entry for every hot key. Scores only grow: an entry that is
        behind, or of a key that is no longer hot, is put right when it comes to the top."""

    def consider(self, slot: int) -> bool:
        """A transient expert was used: it joins if there is room or it beats the victim."""
        slots = self.slots
        if len(slots.hot) < slots.capacity - self.reserve:
            self._heat(slot)
            return True
        victim = self._victim()
        if victim == NOWHERE:
            return False
        if not self.policy.prefers(slots.key_of[slot], slots.key_of[victim]):
            return False
        slots.cool(victim)
        self._heat(slot)
        return True

    def settle(self, slot: int) -> bool:
        """Let a transient expert join if there is room, whatever its score."""
        if len(self.slots.hot) >= self.slots.capacity - self.reserve:
            return False
        self._heat(slot)
        return True

    def _heat(self, slot: int) -> None:
        slots, key = self.slots, self.slots.key_of[slot]
        slots.heat(slot)
        heappush(self._coldest, (self.policy.scores[key], key))

    def _victim(self) -> int:
        """The unpinned hot slot that is worth least, or NOWHERE."""
        return self._sample() if self.policy.blind else self._find_coldest()

    def _sample(self) -> int:
        """Any hot slot, or NOWHERE where it is pinned."""
        hot = self.slots.hot
        slot = hot[int(self._draw() * len(hot))] if hot else NOWHERE
        return NOWHERE if slot == NOWHERE or self.slots.pins[slot] else slot

    def _find_coldest(self) -> int:
        """The coldest unpinned hot slot, or NOWHERE."""
        slots, scores = self.slots, self.policy.scores
        # Numbers of another scale cannot be compared; entries of what left in other ways pile up.
        if scores is not self._scores or len(self._coldest) > 2 * len(slots.hot) + _SPARE:
            self._list_all()
        pinned: list[tuple[float, int]] = []
        victim = self._top(pinned)
        if victim == NOWHERE and len(pinned) < len(slots.hot):
            # Ctrl-C between a slot's joining and its entry.
            self._list_all()
            pinned.clear()
            victim = self._top(pinned)
        for entry in pinned:
            heappush(self._coldest, entry)
        return victim

    def _top(self, pinned: list[tuple[float, int]]) -> int:
        """The coldest unpinned slot on the heap, whose entry stays; entries of pinned ones go."""
        slots, scores, heap = self.slots, self.policy.scores, self._coldest
        slot_of, hot_index, pins = slots.slot_of, slots.hot_index, slots.pins
        while heap:
            score, key = heap[0]
            slot = slot_of.get(key, NOWHERE)
            if slot == NOWHERE or hot_index[slot] == NOWHERE:
                heappop(heap)
            elif scores[key] != score:
                heapreplace(heap, (scores[key], key))
            elif pins[slot]:
                pinned.append(heappop(heap))
            else:
                return slot
        return NOWHERE

    def _list_all(self) -> None:
        """An entry for every hot key, and no others."""
        slots, scores = self.slots, self.policy.scores
        keys = [slots.key_of[slot] for slot in slots.hot]
        self._scores, self._coldest = scores, [(scores[key], key) for key in keys]
        heapify(self._coldest)

    def evict(self) -> int:
        """Empty the coldest hot slot; NOWHERE if every one is pinned."""
        slots = self.slots
        victim = self._victim()
        if victim == NOWHERE:
            victim = next((slot for slot in slots.hot if not slots.pins[slot]), NOWHERE)
        if victim != NOWHERE:
            slots.forget(victim)
        return victim

    def make_room(self) -> None:
        """Turn the coldest hot slots transient until ``reserve`` slots are not hot."""
        slots, scores = self.slots, self.policy.scores
        excess = len(slots.hot) - (slots.capacity - self.reserve)
        if excess < 1:
            return
        unpinned = [slot for slot in slots.hot if not slots.pins[slot]]
        unpinned.sort(key=lambda slot: scores[slots.key_of[slot]])
        for slot in reversed(unpinned[:excess]):
            slots.cool(slot)
