"""The hot tier: slots that keep their expert until a hotter one comes."""

from __future__ import annotations

from math import inf
from random import Random

from aegis.tiers.policy import Policy
from aegis.tiers.slots import NOWHERE, SlotPool


class HotTier:
    """Decides which resident experts stay; all slots but ``reserve`` may belong to it."""

    def __init__(self, slots: SlotPool, policy: Policy, reserve: int, seed: int) -> None:
        """reserve: slots left to reads; the hot tier never fills these."""
        self.slots = slots
        self.policy = policy
        self.reserve = reserve
        # Only speed depends on these draws, never a result; seeded so that runs can be compared.
        self._draw = Random(seed).random

    def consider(self, slot: int) -> bool:
        """A transient expert was used: it joins if there is room or it beats a sampled victim."""
        slots = self.slots
        if len(slots.hot) < slots.capacity - self.reserve:
            slots.heat(slot)
            return True
        victim = self._sample()
        if victim == NOWHERE:
            return False
        if not self.policy.prefers(slots.key_of[slot], slots.key_of[victim]):
            return False
        slots.cool(victim)
        slots.heat(slot)
        return True

    def settle(self, slot: int) -> bool:
        """Let a transient expert join if there is room, whatever its score."""
        if len(self.slots.hot) >= self.slots.capacity - self.reserve:
            return False
        self.slots.heat(slot)
        return True

    def _sample(self) -> int:
        """The coldest of a few random unpinned hot slots, or NOWHERE."""
        slots, draw, scores = self.slots, self._draw, self.policy.scores
        hot, pins, key_of = slots.hot, slots.pins, slots.key_of
        best, best_score, count = NOWHERE, inf, len(hot)
        for _ in range(self.policy.samples if count else 0):
            slot = hot[int(draw() * count)]
            if not pins[slot]:
                score = scores[key_of[slot]]
                # Of those equally cold any will do.
                if score < best_score:  # mutate: equivalent
                    best, best_score = slot, score
        return best

    def evict(self) -> int:
        """Empty the coldest sampled hot slot; NOWHERE if every one is pinned."""
        slots = self.slots
        victim = self._sample()
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
