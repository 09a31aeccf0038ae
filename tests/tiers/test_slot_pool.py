import ctypes
import sys

import cgroup
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tier_fakes import STRIDE, SlotReader, check_slots

from aegis.tiers import Arena, SlotError, SlotPool
from aegis.tiers.slots import NOWHERE, READING, RESIDENT

NUM_SLOTS = 7
KEYS = st.integers(0, 20)


class SlotMachine(RuleBasedStateMachine):
    """Any order of calls keeps the books right and every expert's bytes with its key."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = SlotReader(NUM_SLOTS)
        self.slots = self.memory.slots
        self.pinned: dict[int, int] = {}
        """Pins by key."""
        self.hot: set[int] = set()
        self.order: list[int] = []
        """Transient keys, oldest first."""
        self.guessed: set[int] = set()
        self.wasted: list[int] = []
        self.expected_waste: list[int] = []
        self.slots.on_waste = self.wasted.append

    def slot(self, state: int, data: st.DataObject) -> int:
        some = [slot for slot in range(NUM_SLOTS) if self.slots.state[slot] == state]
        return data.draw(st.sampled_from(some)) if some else NOWHERE

    def gone(self, key: int) -> None:
        if key in self.guessed:
            self.guessed.discard(key)
            self.expected_waste.append(key)
        self.hot.discard(key)
        if key in self.order:
            self.order.remove(key)

    @rule(key=KEYS, guessed=st.booleans())
    def read(self, key: int, guessed: bool) -> None:
        if key in self.slots.slot_of:
            return
        slots = self.slots
        victim = next(
            (
                old
                for old in self.order
                if slots.state[slots.slot_of[old]] == RESIDENT and not self.pinned.get(old)
            ),
            NOWHERE,
        )
        had_free = bool(slots.free)
        slot = slots.reclaim()
        if slot == NOWHERE:
            assert not had_free
            assert victim == NOWHERE
            return
        if not had_free:
            assert victim not in slots.slot_of
            self.gone(victim)
        slots.begin(slot, key)
        slots.guessed[slot] = guessed
        if guessed:
            self.guessed.add(key)
        self.order.append(key)

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        slot = self.slot(READING, data)
        if slot == NOWHERE:
            return
        word = self.slots.key_of[slot].to_bytes(4, "little")
        ctypes.memmove(self.slots.base + slot * STRIDE, word * (STRIDE // 4), STRIDE)
        self.slots.arrive(slot)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        slot = self.slot(READING, data)
        if slot == NOWHERE:
            return
        key = self.slots.key_of[slot]
        self.slots.fail(slot)
        self.pinned.pop(key, None)
        self.guessed.discard(key)
        self.order.remove(key)

    @rule(key=KEYS)
    def pin(self, key: int) -> None:
        if key in self.slots.slot_of:
            self.slots.pin(self.slots.slot_of[key])
            self.pinned[key] = self.pinned.get(key, 0) + 1

    @rule(key=KEYS)
    def unpin(self, key: int) -> None:
        if key not in self.slots.slot_of:
            return
        slot = self.slots.slot_of[key]
        if not self.pinned.get(key):
            with pytest.raises(SlotError, match="not pinned"):
                self.slots.unpin(slot)
            return
        self.slots.unpin(slot)
        self.pinned[key] -= 1

    @rule(data=st.data())
    def heat_or_cool(self, data: st.DataObject) -> None:
        slot = self.slot(RESIDENT, data)
        if slot == NOWHERE:
            return
        key = self.slots.key_of[slot]
        if key in self.hot:
            self.slots.cool(slot)
            self.hot.remove(key)
            self.order.insert(0, key)
        else:
            self.slots.heat(slot)
            self.hot.add(key)
            self.order.remove(key)

    @rule(key=KEYS)
    def refresh(self, key: int) -> None:
        if key in self.order:
            self.slots.refresh(self.slots.slot_of[key])
            self.order.remove(key)
            self.order.append(key)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        slot = self.slot(RESIDENT, data)
        if slot == NOWHERE:
            return
        key = self.slots.key_of[slot]
        if self.pinned.get(key):
            with pytest.raises(SlotError, match="cannot be evicted"):
                self.slots.forget(slot)
            return
        self.slots.forget(slot)
        self.gone(key)

    @precondition(lambda self: self.slots.capacity == NUM_SLOTS)
    @rule(count=st.integers(1, NUM_SLOTS))
    def shrink(self, count: int) -> None:
        slots = self.slots
        before = dict(slots.slot_of)
        fixed = [s for s in range(NUM_SLOTS) if slots.state[s] == READING or slots.pins[s]]
        released = slots.shrink(count)
        assert released == min(count, NUM_SLOTS - 1, NUM_SLOTS - 1 - max(fixed, default=-1))
        for key in before.keys() - slots.slot_of.keys():
            assert not self.pinned.get(key)
            self.gone(key)
        # A move makes the expert the newest of the transient ones.
        self.order = [slots.key_of[slot] for slot in slots.transient]

    @rule(count=st.integers(0, NUM_SLOTS))
    def grow(self, count: int) -> None:
        expected = min(count, NUM_SLOTS - self.slots.capacity)
        assert self.slots.grow(count) == expected

    @invariant()
    def books_are_right(self) -> None:
        slots = self.slots
        check_slots(slots)
        assert {slots.key_of[slot] for slot in slots.hot} == self.hot
        assert [slots.key_of[slot] for slot in slots.transient] == self.order
        assert {slots.key_of[s] for s in range(NUM_SLOTS) if slots.guessed[s]} == self.guessed
        assert sorted(self.wasted) == sorted(self.expected_waste)
        for key, slot in slots.slot_of.items():
            assert slots.pins[slot] == self.pinned.get(key, 0)
            if slots.state[slot] == RESIDENT:
                assert self.memory.read(slot)[:4] == key.to_bytes(4, "little")

    def teardown(self) -> None:
        self.memory.arena.close()


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(stateful_step_count=40)


def test_a_slot_is_only_used_as_its_state_allows() -> None:
    slots = SlotPool(2, STRIDE)
    slot = slots.reclaim()
    for call in (slots.arrive, slots.fail, slots.pin, slots.unpin, slots.forget):
        with pytest.raises(SlotError):
            call(slot)
    with pytest.raises(SlotError, match="not the next free one"):
        slots.begin(1 - slot, 5)
    slots.begin(slot, 5)
    with pytest.raises(SlotError):
        slots.begin(slot, 6)
    slots.begin(1 - slot, 6)
    with pytest.raises(SlotError, match="not the next free one"):
        slots.begin(slot, 7)


def test_slots_that_direct_reads_cannot_fill_are_refused() -> None:
    with pytest.raises(SlotError, match="multiples of 4096"):
        SlotPool(2, 1000)
    with pytest.raises(SlotError, match="at least one"):
        SlotPool(0, STRIDE)


def test_slots_given_back_at_the_end_of_the_arena_are_memory_given_back() -> None:
    memory = SlotReader(600, extra_nbytes=3 << 20)
    assert memory.slots.shrink(300) == 300
    given = memory.arena.released_nbytes
    assert 300 * STRIDE - (2 << 20) < given <= 300 * STRIDE
    assert memory.slots.slots_for(given - 1) < memory.slots.slots_for(given) == 300
    assert memory.slots.grow(1000) == 300
    assert memory.arena.released_nbytes == 0
    memory.arena.close()


def test_where_no_slot_can_go_no_memory_goes_either() -> None:
    arena = Arena(7 * STRIDE)
    slots = SlotPool.in_arena(arena, 4, STRIDE)
    for key in range(4):
        slots.begin(slots.reclaim(), key)
    assert slots.shrink(2) == 0
    assert (slots.capacity, arena.released_nbytes) == (4, 0)
    arena.close()


def filled(num_slots: int) -> SlotReader:
    """Slots that hold the experts of their own numbers, slot 0's being the oldest."""
    memory = SlotReader(num_slots)
    for key in range(num_slots):
        slot = memory.slots.reclaim()
        assert slot == key
        memory.slots.begin(slot, key)
        ctypes.memset(memory.slots.base + slot * STRIDE, key, STRIDE)
        memory.slots.arrive(slot)
    return memory


def test_what_moves_to_a_lower_slot_stays_what_it_was() -> None:
    memory = filled(4)
    slots = memory.slots
    wasted: list[int] = []
    slots.on_waste = wasted.append
    slots.heat(3)
    slots.guessed[2] = True
    slots.forget(0)
    slots.forget(1)
    assert slots.shrink(2) == 2
    assert slots.slot_of == {3: 0, 2: 1}
    assert (slots.hot, list(slots.transient), wasted) == ([0], [1], [])
    assert slots.guessed == [False, True, False, False]
    assert [memory.read(slot)[0] for slot in (0, 1)] == [3, 2]
    check_slots(slots)
    memory.arena.close()


def test_where_nothing_is_free_what_is_not_hot_goes_with_its_slot() -> None:
    memory = filled(4)
    wasted: list[int] = []
    memory.slots.on_waste = wasted.append
    memory.slots.guessed[2] = True
    assert memory.slots.shrink(2) == 2
    assert memory.slots.slot_of == {0: 0, 1: 1}
    assert wasted == [2]
    check_slots(memory.slots)
    memory.arena.close()


def test_a_hot_expert_takes_the_oldest_slot_that_nobody_uses() -> None:
    memory = filled(6)
    slots = memory.slots
    for hot in (5, 4):
        slots.heat(hot)
    slots.pin(0)
    slots.refresh(1)
    assert slots.shrink(1) == 1
    assert slots.slot_of == {0: 0, 1: 1, 5: 2, 3: 3, 4: 4}
    assert slots.shrink(2) == 2
    assert slots.slot_of == {0: 0, 4: 1, 5: 2}
    assert (set(slots.hot), list(slots.transient)) == ({1, 2}, [0])
    check_slots(slots)
    slots.unpin(0)
    slots.forget(0)
    slots.begin(0, 7)
    assert slots.shrink(1) == 1
    assert slots.slot_of == {7: 0, 4: 1}
    check_slots(slots)
    memory.arena.close()


@example(
    stride=3 << 20,
    before=1 << 20,
    behind=0,
    asks=[(True, 1), (True, 0), (True, 9 << 20), (True, 1)],
    least=1,
)
@example(stride=65536, before=99, behind=0, asks=[(True, 8 << 20), (False, 5 << 20)], least=1)
@example(
    stride=3 << 20, before=1 << 20, behind=0, asks=[(True, 9 << 20), (False, 6 << 20)], least=1
)
@example(stride=4096, before=0, behind=9999, asks=[(True, 1 << 20), (False, 9 << 20)], least=1)
@example(stride=4096, before=0, behind=0, asks=[(True, 1), (False, 4096)], least=1)
@given(
    stride=st.sampled_from([4096, 65536, 300 << 10, 1 << 20, 3 << 20]),
    before=st.integers(0, 3 << 20),
    behind=st.integers(0, 80 << 10),
    asks=st.lists(
        st.tuples(st.booleans(), st.integers(-3, 9 << 20) | st.integers(-(1 << 20), 0)),
        min_size=1,
        max_size=6,
    ),
    least=st.integers(1, 4),
)
@settings(max_examples=30)
def test_memory_comes_and_goes_in_whole_ranges_and_as_much_as_was_asked_for(
    stride: int, before: int, behind: int, asks: list[tuple[bool, int]], least: int
) -> None:
    count = max(least + 1, (9 << 20) // stride)
    arena = Arena(before + 4096 + count * stride + behind)
    arena.take("before", before)
    slots = SlotPool.in_arena(arena, count, stride)
    begin = slots.base - arena.base
    for give, nbytes in asks:
        level = arena.released_nbytes
        if give:
            wanted = slots.slots_in(nbytes, least)
            assert not wanted or nbytes > 0
            assert slots.shrink(wanted) == wanted
            came = arena.released_nbytes - level
            # Everything else up to the slots that stay and down to a whole range is gone.
            possible = arena.nbytes - level - arena.range_from(begin + least * stride)
            assert (came == 0) == (wanted == 0)
            assert came >= min(nbytes, max(0, possible - behind - 4096))
            assert came <= nbytes + (2 << 20) + stride + behind + 4096
        else:
            slots.grow(slots.slots_for(nbytes))
            came = level - arena.released_nbytes
            assert 0 <= came <= max(0, nbytes)
            assert came > nbytes - (2 << 20) - stride or slots.capacity == count
        edge = arena.nbytes - arena.released_nbytes
        assert edge % (2 << 20) == 0 or edge > arena.nbytes // (2 << 20) * (2 << 20)
        assert slots.capacity >= least
        assert begin + slots.capacity * stride <= edge
        assert not arena.released_nbytes or slots.capacity < count
        check_slots(slots)
    arena.close()


def test_slots_that_are_not_at_the_end_of_an_arena_have_no_memory_to_give() -> None:
    arena = Arena(1200 * STRIDE)
    inside = SlotPool.in_arena(arena, 600, STRIDE)
    arena.take("behind", 600 * STRIDE)
    for slots in (inside, SlotPool(600, STRIDE)):
        assert slots.slots_in(1 << 20, 1) == 0
        assert slots.shrink(100) == 100
        assert slots.slots_for(0) == 100
        assert slots.grow(100) == 100
    arena.close()


def test_with_a_region_behind_the_slots_nothing_is_given_back() -> None:
    arena = Arena(1200 * STRIDE)
    slots = SlotPool.in_arena(arena, 600, STRIDE)
    arena.take("behind", 600 * STRIDE)[:] = 1
    assert slots.shrink(500) == 500
    assert arena.released_nbytes == 0
    arena.close()


RELEASE = """
import time
from aegis.tiers import Arena, SlotPool
arena = Arena(80 << 20)
arena.take("weights", 16 << 20)
slots = SlotPool.in_arena(arena, 64, 1 << 20)
for key in range(64):
    slots.begin(slots.reclaim(), key)
    slots.arrive(slots.slot_of[key])
assert slots.shrink(50) == 50
print("released", flush=True)
time.sleep(0.5)
"""


def test_the_charge_of_the_group_falls_by_what_was_given_back() -> None:
    cgroup.require()
    result = cgroup.run([sys.executable, "-P", "-c", RELEASE], 400 << 20, cold=False)
    assert (result.rc, result.stdout) == (0, "released\n"), result.stderr
    assert result.first_output is not None
    assert result.peak_nbytes - result.first_output.usage_nbytes > 47 << 20
