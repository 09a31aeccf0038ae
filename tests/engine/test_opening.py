"""What opening, closing, failing reads and kept arrays must leave behind: nothing."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_tools import store_of
from small_model import CONTEXT, IDS, MIB, SMALL, linux, needs_native, open_small

import aegis
from aegis import AegisError, Engine
from aegis.checkpoint.layout import ExpertBits
from aegis.checkpoint.store import Store
from aegis.convert.cache import embedded_path, ensure_store
from aegis.engine import memory, opening
from aegis.engine.governor import Governor, ProcessGauge
from aegis.errors import BackendError, ReadError, StoreError, UsageError
from aegis.kernels import registry
from aegis.kernels.base import Backend, BackendUnavailableError
from aegis.tiers import ArenaError, PythonReadPool
from aegis.tiers.read_pool import UNCHECKED
from aegis.tiers.slots import RESIDENT

pytestmark = pytest.mark.usefixtures("quick_open")

# Memory that a caller keeps


def check_slots(engine: Engine) -> int:
    """Every expert that lies in a slot is the one of the file; returns how many there are."""
    tiers = engine._opened.tiers
    slots, files = tiers.slots, tiers.files
    checked = 0
    for key, slot in slots.slot_of.items():
        if slots.state[slot] == RESIDENT:
            layer, expert = divmod(key, files.num_experts)
            with files.paths[layer].open("rb") as file:
                file.seek(expert * files.stride)
                record = file.read(files.record_nbytes)
            address = slots.base + slot * slots.stride
            assert ctypes.string_at(address, files.record_nbytes) == record, (layer, expert, slot)
            checked += 1
    return checked


@pytest.fixture(scope="module")
def embedded(cache: Path) -> Path:
    """The embedded model: its logits are large beside a slot."""
    return ensure_store(embedded_path()).path


@needs_native
def test_slots_make_room_for_scores_and_come_back(embedded: Path) -> None:
    smallest = aegis.plan(embedded, cap=1, context=CONTEXT).min_cap_nbytes
    with Engine.open(embedded, cap=smallest + 24 * MIB, context=CONTEXT) as engine:
        tiers, arena, plan = engine._opened.tiers, engine._opened.arena, engine.plan
        reserve = dict(plan.items)["runtime_reserve"]
        small = engine.score(IDS, last=2)
        assert check_slots(engine) == plan.total_slots
        assert tiers.slots.capacity == plan.total_slots
        tokens = list(engine.generate(IDS, 4, ignore_eos=True))
        room = engine._room.array(60, 49152)
        assert 1 < check_slots(engine) <= tiers.slots.capacity < plan.total_slots
        del room
        kept = engine.score((IDS * 6)[:60], last=None)
        assert 1 < check_slots(engine) <= tiers.slots.capacity < plan.total_slots
        assert kept.nbytes + small.nbytes <= (
            arena.released_nbytes + plan.unused_nbytes + reserve // 4
        )
        tail, first = kept[-1].tobytes(), engine.score(IDS, last=2)
        assert first.tobytes() == small.tobytes()
        assert list(engine.generate(IDS, 4, ignore_eos=True)) == tokens
        del kept, small, first
        assert engine.score((IDS * 6)[:60]).tobytes() == tail
        assert tiers.slots.capacity == plan.total_slots
        assert arena.released_nbytes == 0


@needs_native
def test_scores_that_do_not_fit_the_cap_are_refused_and_cost_no_slot(embedded: Path) -> None:
    smallest = aegis.plan(embedded, cap=1, context=CONTEXT).min_cap_nbytes
    ids = (IDS * 6)[:60]
    for more in (0, 1 * MIB, 6 * MIB):
        with Engine.open(embedded, cap=smallest + more, context=CONTEXT) as engine:
            slots = engine._opened.tiers.slots
            with pytest.raises(UsageError, match=r"60 rows of logits take 11\.2 MiB"):
                engine.score(ids, last=None)
            assert slots.capacity == slots.num_slots == engine.plan.total_slots
            assert len(engine.nll(ids)) == 59
            assert engine.score(ids, last=2).shape == (2, 49152)


# Reads that fail


def truncated(store: Store, layer: int) -> tuple[Path, bytes]:
    """Cut a layer's expert file; returns what restores it."""
    path = store.expert_paths()[layer]
    content = path.read_bytes()
    os.truncate(path, 0)
    return path, content


def restore(path: Path, content: bytes) -> None:
    """Write the same file again: its inode is open in the engine."""
    with path.open("r+b") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("guess", ["cross-layer", "none"])
def test_a_file_cut_short_is_an_error_and_no_wrong_token(
    store: Store, backend: str, layer: int, guess: str
) -> None:
    if registry.reason(backend):
        pytest.skip(str(registry.reason(backend)))
    options = {"backend": backend, "guess": guess, "max_slots": 3}
    with open_small(store, **options) as engine:
        expected = engine.score(IDS, last=None)
        tokens = list(engine.generate(IDS, 6, ignore_eos=True))
        generator = engine.generate(IDS, 6, ignore_eos=True)
        started = [next(generator)]
        path, content = truncated(store, layer)
        try:
            with pytest.raises(ReadError, match=f"{path.name}: expected .* bytes at offset"):
                started.extend(generator)
            with pytest.raises(ReadError, match=path.name):
                engine.score(IDS[::-1])
        finally:
            restore(path, content)
        assert started == tokens[: len(started)]
        assert (
            list(engine.generate([*IDS, *started], 6 - len(started), ignore_eos=True))
            == (tokens[len(started) :])
        )
        assert engine.score(IDS, last=None).tobytes() == expected.tobytes()
        assert not any(engine._opened.tiers.slots.pins)


@pytest.mark.parametrize("prefill_step", [1, 4, 64])
def test_reads_that_fail_now_and_then_never_change_a_bit(
    store: Store, engine: Engine, monkeypatch: pytest.MonkeyPatch, prefill_step: int
) -> None:
    expected = engine.score(IDS, last=None).tobytes()
    tokens = list(engine.generate(IDS, 5, ignore_eos=True))
    calls, faulty = [0], [False]

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        calls[0] += 1
        if faulty[0] and calls[0] % 23 == 0:
            raise OSError(5, "Input/output error")
        if faulty[0] and calls[0] % 29 == 0:
            return 0
        return os.preadv(fd, views, offset)

    def pool(threads: int, drop_cache: bool = False) -> PythonReadPool:
        return PythonReadPool(threads, drop_cache, read)

    monkeypatch.setattr("aegis.tiers.facade.open_read_pool", pool)
    errors = 0
    with open_small(store, max_slots=4, prefill_step=prefill_step) as faulted:
        faulty[0] = True
        generated: list[int] = []
        while len(generated) < 5:
            try:
                generated.extend(
                    faulted.generate([*IDS, *generated], 5 - len(generated), ignore_eos=True)
                )
            except ReadError:
                errors += 1
                assert errors < 1000
        faulty[0] = False
        assert faulted.score(IDS, last=None).tobytes() == expected
        assert not any(faulted._opened.tiers.slots.pins)
    assert generated == tokens
    assert errors


def flip_bytes(store: Store, layer: int, experts: list[int], kind: ExpertBits = "4bit") -> None:
    """Damage one byte of each record, or undo it."""
    stride = store.layout.geometry(kind).stride
    with store.expert_paths(kind)[layer].open("r+b") as file:
        for expert in experts:
            file.seek(expert * stride + 100)
            byte = file.read(1)[0]
            file.seek(expert * stride + 100)
            file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("max_slots", [2, 12])
@pytest.mark.parametrize("python_pool", [False, True])
def test_a_damaged_layer_is_an_error_and_no_wrong_token(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    max_slots: int,
    python_pool: bool,
) -> None:
    if registry.reason(backend):
        pytest.skip(str(registry.reason(backend)))
    options = {"backend": backend, "max_slots": max_slots}
    with open_small(store, **options) as engine:
        expected = engine.score(IDS, last=None).tobytes()
        tokens = list(engine.generate(IDS, 6, ignore_eos=True))
    if python_pool:
        monkeypatch.setattr("aegis.tiers.facade.open_read_pool", PythonReadPool)
    everyone = list(range(SMALL.num_experts))
    said = r"layer_001\.bin: the record of layer 1, expert \d at offset \d+ is damaged"
    flip_bytes(store, 1, everyone)
    try:
        with open_small(store, **options) as engine:
            for _ in range(2):
                with pytest.raises(ReadError, match=said):
                    engine.score(IDS)
                with pytest.raises(ReadError, match=said):
                    list(engine.generate(IDS, 6, ignore_eos=True))
                with pytest.raises(ReadError, match=said):
                    list(engine.generate(IDS[:1], 6, ignore_eos=True))
            flip_bytes(store, 1, everyone)
            everyone = []
            assert list(engine.generate(IDS, 6, ignore_eos=True)) == tokens
            assert engine.score(IDS, last=None).tobytes() == expected
            assert not any(engine._opened.tiers.slots.pins)
    finally:
        flip_bytes(store, 1, everyone)


@pytest.mark.parametrize("max_slots", [2, 12])
def test_a_damaged_expert_is_an_error_exactly_where_it_is_chosen(
    store: Store, max_slots: int
) -> None:
    prompts = [[token] for token in IDS[:4]] + [IDS[:3], IDS[4:7]]
    everyone = range(SMALL.num_experts)
    with open_small(store, guess="none") as engine:
        expected = [engine.score(ids).tobytes() for ids in prompts]
        files = engine._opened.files
        chosen = [files.checksum(1, expert) == UNCHECKED for expert in everyone]
    assert any(chosen)
    assert not all(chosen)
    for expert in everyone:
        flip_bytes(store, 1, [expert])
        outcomes, errors = [], []
        try:
            with open_small(store, max_slots=max_slots) as damaged:
                for ids in prompts:
                    try:
                        outcomes.append(damaged.score(ids).tobytes())
                    except ReadError as error:
                        errors.append(str(error))
                        outcomes.append(b"")
        finally:
            flip_bytes(store, 1, [expert])
        assert bool(errors) == chosen[expert]
        assert all(f"layer 1, expert {expert} at" in error for error in errors)
        for found, right in zip(outcomes, expected, strict=True):
            assert found in (b"", right)


def test_the_checksums_are_those_of_the_files_that_are_streamed() -> None:
    choices = replace(SMALL, bits=(4,))
    with store_of(choices, seed=12, experts3bit=True) as both:
        everyone = list(range(choices.num_experts))
        flip_bytes(both, 0, everyone, "3bit")
        with open_small(both) as engine:
            engine.score(IDS)
        with open_small(both, experts="3bit") as engine:
            with pytest.raises(ReadError, match=r"experts-3bit/layer_000\.bin: the record of"):
                engine.score(IDS)
            flip_bytes(both, 0, everyone, "3bit")
            engine.score(IDS)


# Opening and closing


def settled_tasks() -> int:
    """Threads of this process; the kernel needs a moment to end one that was joined."""
    seen: list[int] = []
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        seen.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return seen[-1]


@linux
def test_closing_twice_is_fine_and_leaves_no_thread_and_no_file(store: Store) -> None:
    open_small(store).close()
    tasks, files = settled_tasks(), len(os.listdir("/proc/self/fd"))
    engine = open_small(store, threads=2, io_threads=8)
    engine.score(IDS)
    next(engine.generate(IDS, 5, ignore_eos=True))
    assert len(os.listdir("/proc/self/task")) > tasks
    engine.close()
    engine.close()
    assert settled_tasks() == tasks
    assert len(os.listdir("/proc/self/fd")) == files
    assert engine.stats.totals().choices
    assert engine.ledger()


@linux
def test_closing_gives_the_memory_back(store: Store) -> None:
    with open_small(store, context=4096, prefill_step=512) as engine:
        nbytes = engine._opened.arena.nbytes
        before = memory.resident_nbytes()
    assert memory.resident_nbytes() <= before - nbytes * 3 // 4


@linux
def test_an_open_that_fails_leaves_no_thread_and_no_file(store: Store) -> None:
    open_small(store).close()
    tasks, files = settled_tasks(), len(os.listdir("/proc/self/fd"))
    resident = store.resident_path
    content = resident.read_bytes()
    resident.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    try:
        with pytest.raises(StoreError, match="damaged"):
            open_small(store, threads=2)
    finally:
        resident.write_bytes(content)
    assert len(os.listdir("/proc/self/fd")) == files
    assert settled_tasks() == tasks


@linux
def test_an_open_that_is_interrupted_at_its_end_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cap above all: engines that are open may take the sum of theirs."""
    open_small(store).close()
    tasks, files = settled_tasks(), len(os.listdir("/proc/self/fd"))
    gauges = len(ProcessGauge._all)

    def interrupted(governor: Governor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Governor, "read_limits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_small(store, threads=2)
    assert len(ProcessGauge._all) == gauges
    assert len(os.listdir("/proc/self/fd")) == files
    assert settled_tasks() == tasks


@linux
def test_memory_that_the_system_refuses_is_an_error_in_a_sentence(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_small(store).close()
    tasks, files = settled_tasks(), len(os.listdir("/proc/self/fd"))

    def refuse(nbytes: int) -> None:
        raise ArenaError(f"the system refused {nbytes} bytes of memory")

    monkeypatch.setattr(opening, "Arena", refuse)
    with pytest.raises(AegisError, match=r"refused [0-9]+ bytes of memory"):
        open_small(store, threads=2)
    assert len(os.listdir("/proc/self/fd")) == files
    assert settled_tasks() == tasks


@linux
@pytest.mark.parametrize("while_doing", ["create", "open_workspace", "bind_slots"])
def test_a_backend_that_fails_at_open_is_an_error_in_a_sentence(
    store: Store, monkeypatch: pytest.MonkeyPatch, while_doing: str
) -> None:
    open_small(store).close()
    tasks, files = settled_tasks(), len(os.listdir("/proc/self/fd"))
    create = registry.create

    def fail(*_: object) -> None:
        raise BackendUnavailableError("the driver has gone")

    def failing(*arguments: Any) -> Backend:
        backend = create(*arguments)
        if while_doing == "create":
            backend.close()
            fail()
        monkeypatch.setattr(backend, while_doing, fail)
        return backend

    monkeypatch.setattr(registry, "create", failing)
    with pytest.raises(BackendError, match=r"^the driver has gone$"):
        open_small(store, threads=2)
    assert len(os.listdir("/proc/self/fd")) == files
    assert settled_tasks() == tasks


def test_two_engines_open_at_once_do_not_disturb_each_other(store: Store, engine: Engine) -> None:
    other_ids = IDS[::-1]
    expected = [list(engine.generate(ids, 6, ignore_eos=True)) for ids in (IDS, other_ids)]
    scores = [engine.score(ids).tobytes() for ids in (IDS, other_ids)]
    with open_small(store, max_slots=2) as second:
        one = engine.generate(IDS, 6, ignore_eos=True)
        two = second.generate(other_ids, 6, ignore_eos=True)
        found = [(next(one), next(two)) for _ in range(6)]
        assert [[a for a, _ in found], [b for _, b in found]] == expected
        assert [engine.score(IDS).tobytes(), second.score(other_ids).tobytes()] == scores
        second.close()
        assert engine.score(IDS).tobytes() == scores[0]
