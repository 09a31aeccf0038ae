"""The fixed pool of expert-sized slots: what lies where, what is pinned, what is being read.

A slot is free, reading or resident. One that holds an expert belongs either to the hot tier or to
the transient ones, which are reused oldest first. Lists and dicts of plain ints: this bookkeeping
runs for every layer of every token.
"""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict
from collections.abc import Callable

from aegis.kernels.base import SlotPart
from aegis.tiers.arena import Arena
from aegis.tiers.errors import SlotError
from aegis.tiers.store import READ_ALIGN

# Any numbers that differ would do.
FREE, READING, RESIDENT = 0, 1, 2  # mutate: equivalent
NOWHERE = -1  # mutate: equivalent


def _ignore(key: int) -> None:
    del key


def _nothing() -> None:
    """No computation outlasts its call."""


class SlotPool:
    """``num_slots`` slots of ``stride`` bytes from address ``base`` on (a SlotMemory)."""

    def __init__(
        self,
        num_slots: int,
        stride: int,
        base: int = 0,
        arena: Arena | None = None,
        parts: tuple[SlotPart, ...] = (),
    ) -> None:
        """base: where the slots lie, in whatever memory; 0 when only the bookkeeping is wanted.
        parts: where slots lie if they are not one range each."""
        if num_slots < 1:
            raise SlotError(f"a pool of {num_slots} slots was asked for; it needs at least one")
        if base % READ_ALIGN or stride % READ_ALIGN or stride < READ_ALIGN:
            raise SlotError(
                f"slots of {stride} bytes at {base:#x}: both must be multiples of {READ_ALIGN}"
            )
        self.num_slots = num_slots
        self.stride = stride
        self.base = base
        self.capacity = num_slots
        """Slots in use; those from here on were given back."""
        self.arena = arena
        self.state = [FREE] * num_slots
        self.key_of = [NOWHERE] * num_slots
        self.pins = [0] * num_slots
        self.guessed = [False] * num_slots
        """The slot was filled by a guess and nobody has chosen its expert since."""
        self.slot_of: dict[int, int] = {}
        self.free = list(range(num_slots - 1, -1, -1))
        self.transient: OrderedDict[int, None] = OrderedDict()
        self.hot: list[int] = []
        self.hot_index = [NOWHERE] * num_slots
        self.on_waste: Callable[[int], None] = _ignore
        """Called with the key of a guess that is dropped without ever being chosen."""
        self.parts = parts
        self.settle: Callable[[], None] = _nothing
        """Called before a slot is written to: waits for computations that may still read it."""
        # Until it is known, any number above all keys would do.
        self.experts_per_layer = 1 << 60  # mutate: equivalent
        self.resident: Counter[int] = Counter()
        """Layer to how many of its experts lie in slots."""
        self.changes: Counter[int] = Counter()
        """Layer to how often an expert of its has come, gone or moved."""

    @classmethod
    def in_arena(cls, arena: Arena, num_slots: int, stride: int, name: str = "slots") -> SlotPool:
        """Slots in a region of the arena. Take it last: only then can its end be given back."""
        region = arena.take(name, num_slots * stride, align=READ_ALIGN)
        return cls(num_slots, stride, int(region.ctypes.data), arena)

    def address(self, slot: int) -> int:
        """What the read pool knows a slot by: its address, or its number where slots have parts."""
        return slot if self.parts else self.base + slot * self.stride

    def begin(self, slot: int, key: int) -> None:
        """A free slot starts being read into; it becomes the newest transient one."""
        if self.state[slot] != FREE or slot != self.free[-1]:
            raise SlotError(f"slot {slot} cannot be read into: it is not the next free one")
        self.settle()
        self.free.pop()
        self.state[slot] = READING
        self.key_of[slot] = key
        self.slot_of[key] = slot
        self.transient[slot] = None

    def arrive(self, slot: int) -> None:
        """The read into ``slot`` ended well."""
        if self.state[slot] != READING:
            raise SlotError(f"slot {slot} is not being read into")
        self.state[slot] = RESIDENT
        self._note_resident(self.key_of[slot], +1)

    def _note_resident(self, key: int, change: int) -> None:
        layer = key // self.experts_per_layer
        self.resident[layer] += change
        self.changes.update((layer,))

    def fail(self, slot: int) -> None:
        """The read into ``slot`` failed or was withdrawn: the slot is free, its pins are void."""
        if self.state[slot] != READING:
            raise SlotError(f"slot {slot} is not being read into")
        self._drop(slot)

    def forget(self, slot: int) -> None:
        """Evict what lies in ``slot``."""
        if self.state[slot] != RESIDENT or self.pins[slot]:
            raise SlotError(f"slot {slot} cannot be evicted: it is pinned or holds nothing")
        if self.guessed[slot]:
            self.on_waste(self.key_of[slot])
        self._drop(slot)

    def _drop(self, slot: int) -> None:
        if self.hot_index[slot] != NOWHERE:
            self.cool(slot)
        if self.state[slot] == RESIDENT:
            self._note_resident(self.key_of[slot], -1)
        del self.transient[slot]
        del self.slot_of[self.key_of[slot]]
        self.key_of[slot] = NOWHERE
        self.state[slot] = FREE
        self.pins[slot] = 0
        self.guessed[slot] = False
        self.free.append(slot)

    def pin(self, slot: int) -> None:
        """Keep ``slot`` from being evicted or moved; pins count."""
        if self.state[slot] == FREE:
            raise SlotError(f"slot {slot} holds nothing that could be pinned")
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Undo one pin."""
        if not self.pins[slot]:
            raise SlotError(f"slot {slot} is not pinned")
        self.pins[slot] -= 1

    def heat(self, slot: int) -> None:
        """Move a transient slot into the hot tier."""
        del self.transient[slot]
        self.hot_index[slot] = len(self.hot)
        self.hot.append(slot)

    def cool(self, slot: int) -> None:
        """Move a hot slot to the transient ones, as the next to be reused."""
        index, last = self.hot_index[slot], self.hot[-1]
        self.hot[index] = last
        self.hot_index[last] = index
        self.hot.pop()
        self.hot_index[slot] = NOWHERE
        self.transient[slot] = None
        self.transient.move_to_end(slot, last=False)

    def refresh(self, slot: int) -> None:
        """Make a transient slot the newest one."""
        self.transient.move_to_end(slot)

    def rebuild(self) -> None:
        """Put the books in order after an interruption anywhere: what is resident stays, without
        pins; every other slot is free. No read may be under way."""
        hot = set(self.hot)
        resident: dict[int, int] = {}
        for slot in range(self.capacity):
            if self.state[slot] == RESIDENT:
                resident.setdefault(self.key_of[slot], slot)
        kept = set(resident.values())
        self.slot_of = resident
        self.resident.clear()
        for key in resident:
            self._note_resident(key, +1)
        self.free = [slot for slot in range(self.capacity - 1, -1, -1) if slot not in kept]
        self.hot = sorted(hot & kept)
        self.transient = OrderedDict.fromkeys(sorted(kept - hot))
        self.pins = [0] * self.num_slots
        self.hot_index = [NOWHERE] * self.num_slots
        for index, slot in enumerate(self.hot):
            self.hot_index[slot] = index
        for slot in range(self.num_slots):
            if slot not in kept:
                self.state[slot], self.key_of[slot] = FREE, NOWHERE
                self.guessed[slot] = False

    def reclaim(self) -> int:
        """A slot ready for ``begin``: free, else the oldest unpinned transient one; or NOWHERE."""
        if self.free:
            return self.free[-1]
        state, pins = self.state, self.pins
        for slot in self.transient:
            if state[slot] == RESIDENT and not pins[slot]:
                self.forget(slot)
                return slot
        return NOWHERE

    def shrink(self, count: int) -> int:
        """Give up to ``count`` slots from the end back; returns how many went.

        Experts move to a lower free slot, hot ones also over a transient one; the rest is
        forgotten. Stops at a slot that is pinned or being read."""
        before = self.capacity
        self.settle()
        while self.capacity > max(1, before - count):
            slot = self.capacity - 1
            if self.state[slot] == READING or self.pins[slot]:
                break
            if self.state[slot] == RESIDENT:
                self._vacate(slot)
            self.free.remove(slot)
            self.capacity = slot
        if self.capacity < before and self._at_end is not None:
            self._at_end.release_tail(self._behind(self.capacity))
        return before - self.capacity

    @property
    def _at_end(self) -> Arena | None:
        """The arena, if nothing lies behind the slots: only then can memory be given back."""
        arena = self.arena
        if arena is None:
            return None
        end = self.base - arena.base + self.num_slots * self.stride
        return arena if arena.used_nbytes == end else None

    def _behind(self, count: int) -> int:
        """Bytes of the arena behind the first ``count`` slots."""
        assert self.arena is not None
        return self.arena.nbytes - (self.base - self.arena.base) - count * self.stride

    def slots_in(self, nbytes: int, least: int) -> int:
        """How many slots must go so that ``nbytes`` more of memory are given back.

        Only whole ranges go: fewer than asked for where ``least`` slots must stay, and 0 where
        that leaves no range."""
        arena = self._at_end
        if arena is None or nbytes <= 0:
            return 0
        end = arena.nbytes - self._behind(self.capacity)
        first = arena.range_from(arena.nbytes - self._behind(least))
        begin = max(arena.range_of(end - nbytes), first)
        return max(0, self.capacity - self._before(begin))

    def _before(self, offset: int) -> int:
        """How many slots lie wholly before an offset into the arena."""
        assert self.arena is not None
        return (offset - (self.base - self.arena.base)) // self.stride

    def slots_for(self, nbytes: int) -> int:
        """How many given-back slots fit when up to ``nbytes`` of memory are taken back."""
        arena, gone = self._at_end, self.num_slots - self.capacity
        # A single byte makes no difference: memory comes and goes in pages.
        nbytes = max(0, nbytes)  # mutate: equivalent
        if arena is None or arena.released_nbytes <= nbytes:
            return gone
        end = arena.range_of(arena.nbytes - arena.released_nbytes + nbytes)
        # With the last slot comes what lies behind it, which would be more than asked for.
        return max(0, min(self._before(end), self.num_slots - 1) - self.capacity)

    def _vacate(self, slot: int) -> None:
        target = self._target_for(slot)
        if target == NOWHERE:
            self.forget(slot)
            return
        self._copy(slot, target)
        key, hot, guessed = self.key_of[slot], self.hot_index[slot] != NOWHERE, self.guessed[slot]
        self.guessed[slot] = False
        self.forget(slot)
        self.free.remove(target)
        self.free.append(target)
        self.begin(target, key)
        self.arrive(target)
        self.guessed[target] = guessed
        if hot:
            self.heat(target)

    def _copy(self, slot: int, target: int) -> None:
        """Bring the bytes of one slot into another."""
        # Where a part comes from in the record does not matter here.
        whole = SlotPart(0, self.stride, self.base, self.stride)  # mutate: equivalent
        for part in self.parts or (whole,):
            to, origin = (part.base + index * part.stride for index in (target, slot))
            ctypes.memmove(to, origin, part.nbytes)

    def _target_for(self, slot: int) -> int:
        """Where the expert of the last slot in use goes: every other one is a lower one."""
        if self.free:
            return min(self.free)
        if self.hot_index[slot] == NOWHERE:
            return NOWHERE
        for other in self.transient:
            if self.state[other] == RESIDENT and not self.pins[other]:
                self.forget(other)
                return other
        return NOWHERE

    def grow(self, count: int) -> int:
        """Take up to ``count`` given-back slots into use again; returns how many came."""
        count = min(count, self.num_slots - self.capacity)
        if count < 1:
            return 0
        if (arena := self._at_end) is not None:
            if self.capacity + count == self.num_slots:
                arena.restore_tail()  # With what lies behind the last slot.
            else:
                arena.restore_tail(self._behind(self.capacity + count))
        self.free[:0] = range(self.capacity + count - 1, self.capacity - 1, -1)
        self.capacity += count
        return count
