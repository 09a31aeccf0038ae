"""Reads that fail and calls that are interrupted: an error, and everything goes on."""

import errno
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from tier_fakes import (
    STRIDE,
    SlotReader,
    check_slots,
    open_files,
    write_expert_files,
)
from tier_runs import (
    NUM_LAYERS,
    Setup,
    decode_layer,
    open_tiers,
    prefill_layer,
    use_at_random,
)

from aegis.tiers import (
    ExpertFiles,
    PythonReadPool,
    ReadError,
    SlotError,
    facade,
)
from aegis.tiers.prefetch import ReadQueue
from aegis.tiers.slots import RESIDENT
from aegis.tiers.stats import TierStats


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


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_read_ahead_that_fails_costs_a_read_and_no_token(
    stores: dict[int, ExpertFiles], phase: str
) -> None:
    """The disk failed while nobody needed the expert, and works again when somebody does."""
    begun, fail = threading.Event(), threading.Event()
    ahead = stores[12].locate(1, 0)[1]
    failures: list[int] = []

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        if fd == stores[12].locate(1, 0)[0] and offset == ahead and not failures:
            begun.set()
            fail.wait()
            failures.append(errno.EIO)
            raise OSError(errno.EIO, "")
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(24), PythonReadPool(2, read=read)
    setup = Setup(12, 4, 24, 12, "lfu", "cross-layer", 6, 0)
    tiers = open_tiers(stores[12], memory, setup, pool)
    delivered: list[int] = []
    if phase == "decode":
        assert tiers.guess(1, [0]) == 1
        begun.wait()
        with tiers.acquire(1, [0, 1, 2, 3]) as acquisition:
            fail.set()
            while not acquisition.complete:
                delivered.extend(memory.check(1, acquisition.wait()))
        assert sorted(delivered) == [0, 1, 2, 3]
    else:
        for batch in tiers.prefill_layer(0, list(range(12)), list(range(12))):
            memory.check(0, batch)
        begun.wait()
        visit = tiers.prefill_layer(1, list(range(12)))
        fail.set()
        for batch in visit:
            delivered.extend(memory.check(1, batch))
        assert delivered == list(range(12))
    assert failures
    tiers.close()
    pool.close()
    memory.arena.close()


def test_having_been_needed_early_once_excuses_no_later_read(
    stores: dict[int, ExpertFiles],
) -> None:
    begun, go = threading.Event(), threading.Event()
    failing: list[bool] = []

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        begun.set()
        go.wait()
        if failing and failing.pop():
            raise OSError(errno.EIO, "")
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(4), PythonReadPool(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 2, 4, 2, "lfu", "cross-layer", 1, 0), pool)
    assert tiers.guess(1, [5]) == 1
    begun.wait()
    for layer, experts in ((1, [5]), (0, [0, 1, 2, 3])):
        with tiers.acquire(layer, experts) as acquisition:
            go.set()
            while not acquisition.complete:
                memory.check(layer, acquisition.wait())
    failing.append(True)
    with tiers.acquire(1, [5]) as acquisition, pytest.raises(ReadError):
        acquisition.wait()
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


def test_a_guess_that_failed_long_ago_is_no_error_while_slots_are_held(
    stores: dict[int, ExpertFiles],
) -> None:
    failures: list[int] = []

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        if not failures:
            failures.append(errno.EIO)
            raise OSError(errno.EIO, "")
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(4), PythonReadPool(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 2, 4, 2, "lfu", "cross-layer", 1, 0), pool)
    assert tiers.guess(1, [5]) == 1
    while not failures or pool.depth:
        time.sleep(1e-3)
    held = [tiers.acquire(0, [expert, expert + 1]) for expert in (0, 2)]
    for acquisition in held:
        while not acquisition.complete:
            acquisition.wait()
    waiting = tiers.acquire(1, [5])
    with pytest.raises(SlotError, match="every slot is pinned"):
        waiting.wait()
    for acquisition in held:
        acquisition.release()
    waiting.request()
    memory.check(1, waiting.wait())
    waiting.release()
    tiers.close()
    pool.close()
    memory.arena.close()
