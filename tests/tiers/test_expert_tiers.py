import errno
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_fakes import (
    STRIDE,
    ShufflingPool,
    SlotReader,
    cached_nbytes,
    check_slots,
    open_files,
    write_expert_files,
)

from aegis.tiers import (
    GUESS_KINDS,
    POLICIES,
    ExpertFiles,
    ExpertTiers,
    PythonReadPool,
    ReadError,
    ReadPool,
    SlotError,
    facade,
    open_read_pool,
)
from aegis.tiers.prefetch import ReadQueue
from aegis.tiers.slots import RESIDENT
from aegis.tiers.stats import TierStats

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, ExpertFiles]]:
    """Expert files by number of experts per layer."""
    opened = {}
    for num_experts in (2, 5, 12):
        paths = write_expert_files(tmp_path_factory.mktemp("store"), NUM_LAYERS, num_experts)
        opened[num_experts] = open_files(paths, num_experts)
    yield opened
    for files in opened.values():
        files.close()


@dataclass
class Setup:
    """A drawn configuration of the tiers."""

    num_experts: int
    chosen: int
    num_slots: int
    staging_slots: int
    policy: str
    guess: str
    guess_width: int
    seed: int


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_experts = draw(st.sampled_from([2, 5, 12]))
    chosen = draw(st.integers(1, min(4, num_experts)))
    most = NUM_LAYERS * num_experts + 2
    num_slots = draw(st.one_of(st.just(chosen), st.integers(chosen, most)))
    return Setup(
        num_experts,
        chosen,
        num_slots,
        draw(st.one_of(st.just(1), st.integers(1, num_slots))),
        draw(st.sampled_from(list(POLICIES))),
        draw(st.sampled_from(GUESS_KINDS)),
        draw(st.integers(0, 16)),
        draw(st.integers(0, 1 << 32)),
    )


def open_tiers(
    files: ExpertFiles, memory: SlotReader, setup: Setup, pool: ReadPool | None
) -> ExpertTiers:
    return ExpertTiers(
        files,
        memory.slots,
        num_experts_per_tok=setup.chosen,
        staging_slots=setup.staging_slots,
        policy=setup.policy,
        guess=setup.guess,
        guess_width=setup.guess_width,
        pool=pool,
        seed=setup.seed,
    )


def decode_layer(
    tiers: ExpertTiers, memory: SlotReader, layer_index: int, chosen: list[int], ranked: list[int]
) -> None:
    """One layer as the engine does it; every expert comes once, with its own bytes."""
    with tiers.acquire(layer_index, np.array(chosen, dtype=np.int32)) as acquisition:
        delivered = memory.check(layer_index, acquisition.ready())
        tiers.guess((layer_index + 1) % NUM_LAYERS, ranked)
        while not acquisition.complete:
            delivered += memory.check(layer_index, acquisition.wait())
        assert sorted(delivered) == chosen
        assert acquisition.wait()[0].size == 0
    check_slots(memory.slots)


def prefill_layer(
    tiers: ExpertTiers,
    memory: SlotReader,
    layer_index: int,
    experts: list[int],
    next_guess: list[int] | None,
    rows: list[int] | None,
) -> None:
    delivered: list[int] = []
    for batch in tiers.prefill_layer(layer_index, experts, next_guess, rows):
        delivered += memory.check(layer_index, batch)
        check_slots(memory.slots)
    assert delivered == experts


def some_experts(rng: random.Random, num_experts: int, at_least: int = 0) -> list[int]:
    return sorted(rng.sample(range(num_experts), rng.randint(at_least, num_experts)))


def use_at_random(tiers: ExpertTiers, memory: SlotReader, setup: Setup, steps: int) -> int:
    """Prompts, tokens and shrinking in a drawn order; returns how many experts were asked for."""
    rng = random.Random(setup.seed)
    everyone = range(setup.num_experts)
    choices = 0
    for _ in range(steps):
        action = rng.choice(["token", "token", "token", "prompt", "release", "restore", "abandon"])
        if action == "token":
            for layer_index in range(NUM_LAYERS):
                chosen = sorted(rng.sample(everyone, setup.chosen))
                ranked = rng.sample(everyone, rng.randint(0, setup.num_experts))
                decode_layer(tiers, memory, layer_index, chosen, ranked)
                choices += len(chosen)
        elif action == "prompt":
            for layer_index in range(NUM_LAYERS):
                experts = some_experts(rng, setup.num_experts)
                guess = rng.choice([None, some_experts(rng, setup.num_experts)])
                rows = rng.choice([None, [rng.randint(1, 9) for _ in experts]])
                prefill_layer(tiers, memory, layer_index, experts, guess, rows)
                choices += len(experts)
            if rng.random() < 0.5:
                tiers.end_prefill()
        elif action == "release":
            if rng.random() < 0.5:
                tiers.release_nbytes(rng.randint(0, 2 * setup.num_slots * STRIDE))
            else:
                tiers.release_slots(rng.randint(0, setup.num_slots))
            assert memory.slots.capacity >= setup.chosen
        elif action == "restore":
            if rng.random() < 0.5:
                tiers.retake_nbytes(rng.randint(0, setup.num_slots * STRIDE))
            tiers.restore_slots()
            assert memory.slots.capacity == setup.num_slots
        else:
            experts = some_experts(rng, setup.num_experts, 1)
            choices += len(experts)
            visit = tiers.prefill_layer(0, experts, some_experts(rng, setup.num_experts))
            memory.check(0, next(visit))
            if rng.random() < 0.5:
                visit.close()
        check_slots(memory.slots)
    return choices


@given(setups())
def test_every_slot_handed_out_holds_its_experts_bytes(
    stores: dict[int, ExpertFiles], setup: Setup
) -> None:
    files, memory = stores[setup.num_experts], SlotReader(setup.num_slots)
    pool = ShufflingPool(setup.seed, threads=1 + setup.seed % 3)
    tiers = open_tiers(files, memory, setup, pool)
    choices = use_at_random(tiers, memory, setup, 12)
    tiers.close()
    check_slots(memory.slots)
    assert not any(memory.slots.pins)
    total = tiers.stats.totals()
    assert total.hits + total.misses + total.late == total.choices == choices
    assert total.hot_hits <= total.hits
    assert total.useful + total.wasted + total.cancelled <= total.guesses
    assert total.read_nbytes == pool.read_nbytes
    memory.arena.close()


@pytest.mark.parametrize("kind", ["native", "python"])
@pytest.mark.parametrize("threads", [1, 8])
def test_the_same_with_threads(stores: dict[int, ExpertFiles], kind: str, threads: int) -> None:
    pool = open_read_pool(threads) if kind == "native" else PythonReadPool(threads)
    for seed, num_slots in enumerate((3, 4, 9, 20, 38)):
        setup = Setup(12, 3, num_slots, 1 + num_slots // 3, "lfu", "cross-layer", 6, seed)
        memory = SlotReader(num_slots)
        tiers = open_tiers(stores[12], memory, setup, pool)
        use_at_random(tiers, memory, setup, 25)
        tiers.close()
        memory.arena.close()
    pool.close()


def test_prefill_fills_free_slots_for_good_and_decode_then_reads_nothing(
    stores: dict[int, ExpertFiles],
) -> None:
    memory = SlotReader(NUM_LAYERS * 12)
    setup = Setup(12, 4, NUM_LAYERS * 12, 12, "lfu", "cross-layer", 6, 0)
    with open_tiers(stores[12], memory, setup, None) as tiers:
        for layer_index in range(NUM_LAYERS):
            prefill_layer(tiers, memory, layer_index, list(range(12)), list(range(12)), None)
        read = tiers.stats.read_nbytes
        assert read == NUM_LAYERS * 12 * STRIDE
        for layer_index in range(NUM_LAYERS):
            prefill_layer(tiers, memory, layer_index, list(range(12)), list(range(12)), None)
        for layer_index in range(NUM_LAYERS):
            decode_layer(tiers, memory, layer_index, [1, 3, 7, 9], [0, 2, 4])
        assert tiers.stats.read_nbytes == read
        assert tiers.stats.hit_rate == 1.0
    memory.arena.close()


def test_prefill_skips_hot_experts_and_reads_the_others_once(
    stores: dict[int, ExpertFiles],
) -> None:
    memory = SlotReader(16)
    with open_tiers(stores[12], memory, Setup(12, 4, 16, 4, "lfu", "none", 0, 0), None) as tiers:
        for _ in range(3):
            decode_layer(tiers, memory, 1, [0, 4, 8, 11], [])
        tiers.begin_prefill()
        tiers.stats.reset()
        prefill_layer(tiers, memory, 1, list(range(12)), None, None)
        total = tiers.stats.totals("prefill")
        assert (total.hits, total.misses) == (4, 8)
        assert total.read_nbytes == 8 * STRIDE
    memory.arena.close()


def test_a_batch_leaves_half_of_the_staging_slots_for_reading(
    stores: dict[int, ExpertFiles],
) -> None:
    memory = SlotReader(8)
    with open_tiers(
        stores[12], memory, Setup(12, 4, 8, 8, "lfu", "none", 0, 0), ShufflingPool(0)
    ) as tiers:
        for batch in tiers.prefill_layer(0, list(range(12))):
            assert 1 <= len(memory.check(0, batch)) <= 4
    memory.arena.close()


def test_what_is_guessed_is_late_or_there_when_it_is_wanted(
    stores: dict[int, ExpertFiles],
) -> None:
    memory, pool = SlotReader(12), PythonReadPool(1)
    tiers = open_tiers(stores[12], memory, Setup(12, 2, 12, 4, "lfu", "cross-layer", 3, 0), pool)
    assert tiers.candidates == 3
    assert tiers.guess(1, [4, 5, 6, 7]) == 3
    assert tiers.guess(1, [4, 5, 6]) == 0
    decode_layer(tiers, memory, 1, [4, 9], [])
    total = tiers.stats.totals("decode")
    assert (total.guesses, total.useful, total.misses) == (3, 1, 1)
    assert total.hits + total.late == 1
    tiers.close()
    pool.close()
    memory.arena.close()


def test_a_guess_that_is_chosen_is_read_ahead_of_other_guesses(
    stores: dict[int, ExpertFiles],
) -> None:
    gate, order = threading.Event(), list[int]()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        gate.wait()
        order.append(offset // STRIDE)
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(12), PythonReadPool(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 2, 12, 4, "lfu", "cross-layer", 3, 0), pool)
    tiers.guess(1, [4, 5])
    tiers.guess(2, [6])
    acquisition = tiers.acquire(2, [6])
    gate.set()
    while not acquisition.complete:
        acquisition.wait()
    pool.close()
    # The one reader may have begun with the first guess, but not with the second.
    assert 5 not in order[: order.index(6)]
    memory.arena.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda tiers: tiers.acquire(1, [4]).release(),
        lambda tiers: tiers.begin_prefill(),
        lambda tiers: tiers.release_slots(1),
        lambda tiers: tiers.close(),
    ],
    ids=["choice", "prompt", "shrinking", "end"],
)
def test_guesses_that_nobody_needs_are_withdrawn_unless_they_have_begun(
    stores: dict[int, ExpertFiles], use: Callable[[ExpertTiers], None]
) -> None:
    begun = threading.Event()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        begun.set()
        for _ in range(1000):
            if pool.depth == 1:
                break
            time.sleep(0.01)
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(12), PythonReadPool(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 2, 12, 4, "lfu", "cross-layer", 4, 0), pool)
    assert tiers.guess(1, [4, 5, 6, 7]) == 4
    begun.wait()
    use(tiers)
    tiers.close()
    counters = tiers.stats.decode[1]
    assert (counters.guesses, counters.cancelled) == (4, 3)
    assert pool.read_nbytes == tiers.stats.read_nbytes == STRIDE
    check_slots(memory.slots)
    assert not any(memory.slots.pins)
    pool.close()
    memory.arena.close()


class Looks(PythonReadPool):
    """A pool of one reader that counts how often somebody looks for what has ended."""

    looks = 0

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        self.looks += 1
        return super().wait_any(tickets, block)


def test_waiting_for_a_read_leaves_the_processor_alone(stores: dict[int, ExpertFiles]) -> None:
    begun, go = threading.Event(), threading.Event()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        begun.set()
        go.wait()
        go.clear()
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(2), Looks(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 1, 2, 1, "lfu", "cross-layer", 1, 0), pool)
    timer = threading.Timer(0.05, go.set)
    timer.start()
    decode_layer(tiers, memory, 0, [7], [])
    timer.join()
    begun.clear()
    assert tiers.guess(1, [3]) == 1
    begun.wait()
    timer = threading.Timer(0.05, go.set)
    timer.start()
    tiers.close()
    assert pool.looks < 20
    timer.join()
    pool.close()
    memory.arena.close()


def test_a_slot_goes_once_the_guess_that_is_being_read_into_it_is_there(
    stores: dict[int, ExpertFiles],
) -> None:
    begun, go = threading.Event(), threading.Event()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        if offset == 4 * STRIDE:
            begun.set()
            go.wait()
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(2), Looks(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 1, 2, 1, "lfu", "cross-layer", 1, 0), pool)
    decode_layer(tiers, memory, 0, [0], [4])
    begun.wait()
    looks = pool.looks
    timer = threading.Timer(0.05, go.set)
    timer.start()
    assert tiers.release_slots(1) == 1
    assert pool.looks < looks + 10
    assert tiers.stats.decode[1].wasted == 1
    check_slots(memory.slots)
    timer.join()
    tiers.close()
    pool.close()
    memory.arena.close()


def test_the_previous_choice_can_be_the_guess(stores: dict[int, ExpertFiles]) -> None:
    memory = SlotReader(8)
    setup = Setup(12, 4, 8, 4, "lfu", "previous", 4, 0)
    with open_tiers(stores[12], memory, setup, None) as tiers:
        assert tiers.candidates == 0
        assert tiers.guess(0) == 0
        decode_layer(tiers, memory, 0, [0, 1, 2, 3], [])
        for layer_index in (1, 2):
            decode_layer(tiers, memory, layer_index, [4, 5, 6, 7], [])
        decode_layer(tiers, memory, 0, [0, 1, 2, 3], [])
        assert tiers.stats.decode[1].guesses == 4
        decode_layer(tiers, memory, 1, [4, 5, 6, 8], [])
        assert tiers.stats.decode[1].useful == 3
    memory.arena.close()


def test_a_file_truncated_after_open_is_a_read_error_and_nothing_else_breaks(
    tmp_path: Path,
) -> None:
    paths = write_expert_files(tmp_path, NUM_LAYERS, 12)
    whole = paths[1].read_bytes()
    memory = SlotReader(8)
    setup = Setup(12, 4, 8, 4, "lfu", "none", 0, 0)
    with open_files(paths, 12) as files, open_tiers(files, memory, setup, None) as tiers:
        os.truncate(paths[1], 5 * STRIDE + 100)
        with pytest.raises(ReadError, match="truncated") as caught:
            decode_layer(tiers, memory, 1, [0, 3, 5, 9], [])
        error = caught.value
        assert error.file == str(paths[1])
        assert (error.offset, error.got) in {(5 * STRIDE, 100), (9 * STRIDE, 0)}
        assert error.expected == STRIDE
        check_slots(memory.slots)
        assert not any(memory.slots.pins)
        decode_layer(tiers, memory, 0, [0, 3, 5, 9], [])
        with pytest.raises(ReadError, match=r"layer_001\.bin"):
            prefill_layer(tiers, memory, 1, list(range(12)), [], None)
        prefill_layer(tiers, memory, 2, list(range(12)), [], None)
        paths[1].write_bytes(whole)
        prefill_layer(tiers, memory, 1, list(range(12)), [], None)
        decode_layer(tiers, memory, 1, [0, 3, 5, 9], [])
    memory.arena.close()


@pytest.mark.parametrize("end", ["truncated", "broken"])
def test_of_a_read_that_ends_early_whole_records_are_there_and_errors_say_what_came(
    tmp_path: Path, end: str
) -> None:
    def fail(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    paths = write_expert_files(tmp_path, 1, 6)
    memory, stats = SlotReader(6), TierStats(1)
    pool = PythonReadPool(1, read=fail if end == "broken" else None)
    with open_files(paths, 6) as files:
        os.truncate(paths[0], 2 * STRIDE + 100)
        queue, slots = ReadQueue(files, memory.slots, pool, stats), memory.slots
        for slot in range(4):
            slots.begin(slot, slot)
        queue.start_run([0, 1, 2, 3], demand=True)
        queue.collect_blocking(0)
        got = {key: error.got for key, error in queue.failed.items()}
        if end == "truncated":
            assert (slots.slot_of, got) == ({0: 0, 1: 1}, {2: 100, 3: 0})
            assert stats.decode[0].read_nbytes == 2 * STRIDE + 100
        else:
            assert (slots.slot_of, got) == ({}, dict.fromkeys(range(4), -errno.EIO))
            assert stats.decode[0].read_nbytes == 0
        check_slots(slots)
        assert queue.in_flight == queue.ticket_of == {}
    pool.close()
    memory.arena.close()


def test_an_io_error_in_the_middle_of_a_token_can_be_retried(
    stores: dict[int, ExpertFiles],
) -> None:
    broken = threading.Event()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        if broken.is_set() and offset == 5 * STRIDE:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(8), PythonReadPool(2, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 4, 8, 1, "lfu", "none", 0, 0), pool)
    broken.set()
    acquisition = tiers.acquire(0, [1, 4, 5, 6])
    delivered: list[int] = []

    def take_all() -> None:
        while not acquisition.complete:
            delivered.extend(memory.check(0, acquisition.wait()))

    with pytest.raises(ReadError, match="Input/output error"):
        take_all()
    assert 5 not in delivered
    broken.clear()
    take_all()
    assert sorted(delivered) == [1, 4, 5, 6]
    acquisition.release()

    broken.set()
    tiers.end_prefill()
    visit = tiers.prefill_layer(1, list(range(12)))
    delivered.clear()

    def visit_all() -> None:
        for batch in visit:
            delivered.extend(memory.check(1, batch))

    with pytest.raises(ReadError):
        visit_all()
    assert delivered == list(range(len(delivered)))
    broken.clear()
    visit_all()
    assert delivered == list(range(12))
    tiers.close()
    pool.close()
    memory.arena.close()


def test_an_interrupted_wait_leaves_everything_usable(stores: dict[int, ExpertFiles]) -> None:
    gate = threading.Event()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        gate.wait()
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(4), PythonReadPool(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 4, 4, 4, "lfu", "none", 0, 0), pool)
    with tiers.acquire(0, [0, 1, 2, 3]) as acquisition:
        assert acquisition.ready()[0].size == 0
    gate.set()
    decode_layer(tiers, memory, 1, [4, 5, 6, 7], [])
    tiers.close()
    pool.close()
    memory.arena.close()


@pytest.mark.parametrize("owner", ["usual pool", "Python pool", "shared pool"])
def test_after_ctrl_c_anywhere_recovery_keeps_what_is_resident(
    stores: dict[int, ExpertFiles], owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupt(Exception):
        pass

    if owner == "Python pool":
        monkeypatch.setattr(facade, "open_read_pool", PythonReadPool)
    owned = owner != "shared pool"
    memory, shared = SlotReader(9), PythonReadPool(2)
    setup = Setup(12, 3, 9, 4, "lfu", "cross-layer", 6, 0)
    tiers = open_tiers(stores[12], memory, setup, None if owned else shared)
    for at_line in range(5, 400, 5):
        lines = 0

        def interrupt(frame: FrameType, event: str, arg: object) -> object:
            nonlocal lines
            module = str(frame.f_globals["__name__"])
            if module.startswith("aegis.tiers.") and (owned or "read_pool" not in module):
                lines += event == "line"
            if lines == at_line:  # noqa: B023 - used in this turn only
                raise Interrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with pytest.raises(Interrupt):
                use_at_random(tiers, memory, replace(setup, seed=at_line), 20)
        finally:
            sys.settrace(before)
        slots = memory.slots
        resident = {
            slots.key_of[slot] for slot in range(slots.capacity) if slots.state[slot] == RESIDENT
        }
        tiers.recover()
        check_slots(memory.slots)
        assert not any(memory.slots.pins)
        assert set(slots.slot_of) == resident
        use_at_random(tiers, memory, setup, 3)
    tiers.close()
    shared.close()
    memory.arena.close()


@pytest.mark.parametrize("method", ["damaged", "result"])
def test_ctrl_c_while_the_end_of_a_read_is_noted_is_not_masked_by_another_error(
    stores: dict[int, ExpertFiles], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    memory, pool = SlotReader(9), PythonReadPool(2)
    tiers = open_tiers(stores[12], memory, Setup(12, 3, 9, 4, "lfu", "none", 0, 0), pool)

    def interrupt(ticket: int) -> int:
        raise KeyboardInterrupt

    for use in (
        lambda: decode_layer(tiers, memory, 0, [1, 4, 5], []),
        lambda: prefill_layer(tiers, memory, 1, list(range(12)), None, None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(pool, method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                use()
        tiers.recover()
        check_slots(memory.slots)
        use()
    tiers.close()
    pool.close()
    memory.arena.close()


def test_two_layers_may_be_held_at_once_as_far_as_slots_go(
    stores: dict[int, ExpertFiles],
) -> None:
    memory = SlotReader(4)
    setup = Setup(12, 2, 4, 1, "lfu", "none", 0, 0)
    with open_tiers(stores[12], memory, setup, None) as tiers:
        first, second = tiers.acquire(0, [0, 1]), tiers.acquire(1, [0, 1])
        third = tiers.acquire(2, [0, 1])
        for layer_index, acquisition in enumerate((first, second)):
            while not acquisition.complete:
                memory.check(layer_index, acquisition.wait())
        with pytest.raises(SlotError, match="pinned by someone else"):
            third.wait()
        first.release()
        while not third.complete:
            memory.check(2, third.wait())
        with pytest.raises(ValueError, match="use prefill_layer"):
            tiers.acquire(0, [0, 1, 2, 3, 4])
        second.release()
        third.release()
        third.release()
    memory.arena.close()


def test_a_prompt_needs_one_slot_that_nobody_else_holds(stores: dict[int, ExpertFiles]) -> None:
    memory = SlotReader(2)
    setup = Setup(12, 2, 2, 1, "lfu", "none", 0, 0)
    with open_tiers(stores[12], memory, setup, None) as tiers:
        held = tiers.acquire(0, [0, 1])
        while not held.complete:
            held.wait()
        visit = tiers.prefill_layer(1, [3])
        with pytest.raises(SlotError, match="release what was acquired first"):
            next(visit)
        held.release()
        assert memory.check(1, next(visit)) == [3]
        assert list(visit) == []
    check_slots(memory.slots)
    memory.arena.close()


def test_what_was_never_handed_out_can_be_given_up(stores: dict[int, ExpertFiles]) -> None:
    def read(fd: int, views: list[memoryview], offset: int) -> int:
        if offset == 5 * STRIDE:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(4), PythonReadPool(1, read=read)
    with open_tiers(stores[12], memory, Setup(12, 2, 4, 1, "lfu", "none", 0, 0), pool) as tiers:
        decode_layer(tiers, memory, 0, [0, 1], [])
        tiers.acquire(0, [0, 1]).release()
        given_up = tiers.acquire(0, [5])
        pool.wait_any(list(tiers._queue.in_flight))
        # Another layer takes note of the failure, which frees the slot.
        decode_layer(tiers, memory, 1, [0], [])
        given_up.release()
        check_slots(memory.slots)
        assert not any(memory.slots.pins)
    pool.close()
    memory.arena.close()


def test_sizes_that_cannot_work_are_refused(stores: dict[int, ExpertFiles]) -> None:
    memory = SlotReader(4)
    for changes, message in (
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"staging_slots": 0}, "staging_slots is 0"),
        ({"staging_slots": 5}, "staging_slots is 5"),
    ):
        sizes = {"num_experts_per_tok": 2, "staging_slots": 2} | changes
        with pytest.raises(ValueError, match=message):
            ExpertTiers(stores[12], memory.slots, **sizes)
    with pytest.raises(ValueError, match="slots of 8192 bytes"):
        ExpertTiers(stores[12], SlotReader(4, 8192).slots, num_experts_per_tok=2, staging_slots=2)
    memory.arena.close()


def process_read_nbytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("no read_bytes")


@pytest.mark.parametrize("direct", [True, False])
def test_bytes_counted_are_bytes_read_and_no_page_cache_stays(tmp_path: Path, direct: bool) -> None:
    if not os.access("/proc/self/io", os.R_OK):
        pytest.skip("this system does not say what a process reads")
    stride, num_experts = 1 << 18, 24
    paths = write_expert_files(tmp_path, NUM_LAYERS, num_experts, stride)
    memory = SlotReader(20, stride)
    rng = random.Random(0)
    with open_files(paths, num_experts, stride) as files:
        if direct and files.mode != "direct":
            pytest.skip(files.reason)
    with ExpertFiles(paths, stride, stride, num_experts, direct) as files:
        setup = Setup(num_experts, 4, 20, 8, "lfu", "cross-layer", 6, 0)
        with open_tiers(files, memory, setup, None) as tiers:
            before = process_read_nbytes()
            for layer_index in range(NUM_LAYERS):
                everyone = list(range(num_experts))
                prefill_layer(tiers, memory, layer_index, everyone, everyone, None)
            for _ in range(8):
                for layer_index in range(NUM_LAYERS):
                    chosen = sorted(rng.sample(range(num_experts), 4))
                    ranked = rng.sample(range(num_experts), 6)
                    decode_layer(tiers, memory, layer_index, chosen, ranked)
        read = process_read_nbytes() - before
        if not direct and read == 0:
            pytest.skip("this file system keeps its pages in memory")
        assert tiers.stats.read_nbytes > 32 << 20
        assert abs(read - tiers.stats.read_nbytes) <= 0.02 * read
        assert sum(map(cached_nbytes, paths)) == 0
    memory.arena.close()


def test_statistics_are_kept_per_layer_and_phase_and_can_be_reset(
    stores: dict[int, ExpertFiles],
) -> None:
    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        time.sleep(0.02)
        return os.preadv(fd, views, offset)

    begun = time.perf_counter()
    memory, pool = SlotReader(12), PythonReadPool(1, read=slow)
    setup = Setup(12, 4, 12, 4, "lfu", "none", 0, 0)
    with open_tiers(stores[12], memory, setup, pool) as tiers:
        prefill_layer(tiers, memory, 0, [1, 2], None, None)
        decode_layer(tiers, memory, 1, [0, 1, 2, 3], [])
        assert tiers.stats.prefill[0].misses == 2
        assert tiers.stats.decode[0].choices == 0
        assert tiers.stats.decode[1].misses == 4
        assert 0 < tiers.stats.decode[1].wait_s <= time.perf_counter() - begun
        told = tiers.stats.as_dict()
        assert told["decode"]["total"]["read_nbytes"] == 4 * STRIDE
        assert told["decode"]["layers"][1]["choices"] == 4
        tiers.stats.reset()
        assert tiers.stats.totals().choices == 0
        decode_layer(tiers, memory, 1, [0, 1, 2, 3], [])
        assert tiers.stats.hit_rate == 1.0
        with pytest.raises(ValueError, match="'decode', 'prefill' or None"):
            tiers.stats.totals("both")
    pool.close()
    memory.arena.close()


def test_slots_that_a_token_needs_do_not_go_where_no_range_would_come_of_it(
    tmp_path: Path,
) -> None:
    stride = 1 << 20
    paths = write_expert_files(tmp_path, 1, 4, stride)
    memory = SlotReader(4, stride)
    with (
        ExpertFiles(paths, stride, stride, 4) as files,
        ExpertTiers(files, memory.slots, num_experts_per_tok=3, staging_slots=1) as tiers,
    ):
        # Three slots reach into the last range of 2 MiB.
        assert tiers.release_nbytes(1) == 0
        assert (memory.slots.capacity, memory.arena.released_nbytes) == (4, 0)
        assert tiers.stats.given_back.times == 0
    memory.arena.close()
