"""File systems that are memory, that refuse direct reads, or that answer them from the page cache:
found out by trying, said in the plan, and counted."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cgroup
import pytest
from engine_tools import difference, result_of
from small_model import CONTEXT, IDS, SMALL, linux, open_small
from stores import cached_nbytes

from aegis import plan
from aegis.checkpoint import storage
from aegis.checkpoint.storage import DIRECT, REFUSED, UNKNOWN, Storage, storage_of
from aegis.checkpoint.store import Store
from aegis.convert.cache import embedded_path
from aegis.engine.limits import memory_limits
from aegis.planner import MemoryPlan
from aegis.planner.explain import explain_plan
from aegis.settings import READ_NBYTES
from aegis.tiers.staging import RUN_NBYTES

pytestmark = linux

MIB = 1 << 20
SHM = Path("/dev/shm")


def mount(*arguments: str | Path) -> None:
    """Mount something, or skip the test where that is not allowed."""
    try:
        subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing can be mounted here: {error}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder to mount over; whatever is there is unmounted."""
    folder = tmp_path / "place"
    folder.mkdir()
    yield folder
    while os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def journalled(place: Path, tmp_path: Path) -> Path:
    """A disk that takes direct reads and answers them from the page cache."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is missing")
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    mount("-o", "loop,data=journal", image, place)
    return place


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_memory_is_found_out_though_it_takes_direct_reads(
    kind: str, place: Path, store: Store
) -> None:
    mount("-t", kind, kind, place)
    assert storage_of(place / "not" / "there").kind == "memory"
    shutil.copytree(store.path, place / "store")
    found = storage_of(place / "store" / "resident.bin")
    assert (found.kind, found.there) == ("memory", True)
    assert found.reason == f"the store lies on {kind}"


def test_memory_behind_an_overlay_is_found_out(place: Path, tmp_path: Path) -> None:
    for name in ("memory", "lower"):
        (tmp_path / name).mkdir()
    mount("-t", "tmpfs", "tmpfs", tmp_path / "memory")
    try:
        for name in ("upper", "work"):
            (tmp_path / "memory" / name).mkdir()
        layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/memory/upper"
        mount("-t", "overlay", "overlay", "-o", f"{layers},workdir={tmp_path}/memory/work", place)
        assert storage_of(place).kind in ("memory", "unknown")
        (place / "file").write_bytes(bytes(8192))
        assert storage_of(place / "file").kind in ("memory", "unknown")
        subprocess.run(["umount", "-l", str(place)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "memory")], check=True)


def test_an_overlay_on_a_disk_is_as_good_as_the_disk(place: Path, tmp_path: Path) -> None:
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    if storage_of(tmp_path) != DIRECT:
        pytest.skip("temporary files do not lie on a disk that allows direct reads")
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mount("-t", "overlay", "overlay", "-o", layers, place)
    assert storage_of(place).kind in ("direct", "unknown")


def test_reads_that_only_seem_direct_are_found_out_and_leave_nothing(
    journalled: Path, sound_store: Store
) -> None:
    assert storage_of(journalled).kind == "buffered"
    shutil.copytree(sound_store.path, journalled / "store")
    os.sync()
    store = Store.open(journalled / "store")
    files = [store.resident_path, *store.expert_paths()]
    for file in files:  # What copying has left.
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert sum(map(cached_nbytes, files)) == 0
    found = storage_of(store.resident_path)
    assert (found.kind, found.there) == ("buffered", True)
    streaming = {"backend": "reference", "max_slots": SMALL.num_experts_per_tok}
    with open_small(sound_store, **streaming) as engine:
        expected = result_of(engine, IDS, 4)
    with open_small(store, **streaming, embedding="disk") as engine:
        assert difference(expected, result_of(engine, IDS, 4)) == ""
        assert "buffered: the file system answers direct ones" in engine.describe()
        assert dict(engine.plan.items)["page_cache"] > 0
        engine._opened.tiers._queue.drain()
        assert sum(map(cached_nbytes, files)) == 0


def refusing(when: str) -> Any:
    """An os.open, or os.preadv, that knows no direct reads."""
    real = getattr(os, when)

    def refuse(first: Any, *rest: Any, **options: Any) -> Any:
        direct = rest[0] & os.O_DIRECT if when == "open" else True
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(first, *rest, **options)

    return refuse


@pytest.mark.parametrize("when", ["open", "preadv"])
def test_refusing_direct_reads_is_found_out_at_once_or_at_the_first(
    when: str, sound_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if storage_of(sound_store.resident_path).kind != "direct":
        pytest.skip("temporary files do not lie on a disk that allows direct reads")
    monkeypatch.setattr(os, when, refusing(when))
    assert storage_of(sound_store.resident_path) == replace(REFUSED, there=True)


def test_a_table_on_disk_is_read_where_direct_reads_are_taken_and_refused(
    sound_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"embedding": "disk", "backend": "reference", "cap": "1GiB"}
    with open_small(sound_store, **options) as engine:
        expected = list(engine.generate(IDS, 4, ignore_eos=True))
    real = os.preadv

    def refuse(fd: int, *rest: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, *rest)

    monkeypatch.setattr(os, "preadv", refuse)
    with open_small(sound_store, **options) as engine:
        assert list(engine.generate(IDS, 4, ignore_eos=True)) == expected


def test_what_cannot_be_tried_is_unknown_and_counted_as_buffered(
    sound_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Any, *rest: Any, **options: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.os, "open", forbidden)
        patch.setattr(storage, "file_system", lambda place: "ext4")
        assert storage_of(sound_store.path).kind == "unknown"
    assert "not known before the first run" in UNKNOWN.describe()
    monkeypatch.setattr("aegis.engine.planning.storage_of", lambda place: UNKNOWN)
    assert items(planned(sound_store))["page_cache"] == 2 * READ_NBYTES


def planned(store: Store, cap: str | int = "300MiB", **options: Any) -> MemoryPlan:
    return plan(store.path, cap=cap, **({"context": CONTEXT, "backend": "reference"} | options))


def items(found: MemoryPlan) -> dict[str, int]:
    return dict(found.items)


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say how files are read."""

    def on(found: Storage) -> None:
        monkeypatch.setattr("aegis.engine.planning.storage_of", lambda place: found)
        monkeypatch.setattr("aegis.engine.opening.storage_of", lambda place: found)

    return on


def test_a_store_in_memory_is_an_item_of_the_plan(sound_store: Store, lies: Any) -> None:
    lies(DIRECT)
    usual = planned(sound_store)
    lies(Storage("memory", "the store lies on tmpfs", there=True))
    found = planned(sound_store)
    files = sum(path.stat().st_size for path in sound_store.path.rglob("*") if path.is_file())
    # store.json and tokenizer_config.json are small beside the rest.
    assert 0 <= files - items(found)["store"] < 64 << 10
    assert found.min_cap_nbytes - usual.min_cap_nbytes == items(found)["store"]
    assert found.total_nbytes == usual.total_nbytes + items(found)["store"]
    assert any(line.startswith("store in memory") for line in explain_plan(found))
    refused = planned(sound_store, cap=found.min_cap_nbytes - 1)
    assert not refused.feasible
    assert "store in memory" in refused.refusal()
    assert items(usual)["store"] == items(usual)["page_cache"] == items(found)["page_cache"] == 0


def test_a_store_that_is_there_already_takes_nothing_of_what_is_free(
    sound_store: Store, lies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = memory_limits()
    monkeypatch.setattr("aegis.engine.planning.memory_limits", lambda: limits)
    monkeypatch.setattr("aegis.engine.planning.resident_nbytes", lambda: 50 * MIB)
    frees = []
    for there in (False, True):
        lies(Storage("memory", "the store lies on tmpfs", there=there))
        frees.append(planned(sound_store).around.free_nbytes)
    before, after = frees
    assert before is not None
    assert after is not None
    assert after - before == items(planned(sound_store))["store"]


@pytest.mark.parametrize("io_threads", [1, 2, 5])
def test_reads_through_the_page_cache_are_an_item_of_the_plan(
    io_threads: int, sound_store: Store, lies: Any
) -> None:
    lies(DIRECT)
    with open_small(sound_store, backend="reference") as engine:
        arena_nbytes = engine.arena_nbytes
    lies(REFUSED)
    found = planned(sound_store, io_threads=io_threads)
    assert items(found)["page_cache"] == io_threads * READ_NBYTES
    assert any("buffered reads" in line for line in explain_plan(found))
    with open_small(sound_store, backend="reference", io_threads=io_threads) as engine:
        assert "buffered: the file system refuses direct ones" in engine.describe()
        assert engine._opened.files.mode == "buffered"
        assert engine.arena_nbytes == arena_nbytes
        assert engine.score(IDS).shape[0] == 1


def test_the_plan_knows_how_much_a_reader_brings_at_once() -> None:
    assert READ_NBYTES == RUN_NBYTES


def test_plan_and_run_say_where_the_store_lies(tmp_path: Path) -> None:
    if not SHM.is_dir() or storage_of(SHM).kind != "memory":
        pytest.skip("/dev/shm is no memory here")
    cache = SHM / f"aegis-test-{os.getpid()}"
    command = [sys.executable, "-m", "aegis", "plan", "--cap", "1GiB", "-c", "64"]
    env = {**os.environ, "PYTHONSAFEPATH": "1", "AEGIS_CACHE": str(cache)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, check=True
    )
    assert "store in memory" in done.stdout
    assert f"{cache}: in memory, since the store lies on tmpfs" in done.stderr
    assert not cache.exists()


def test_the_cap_holds_with_the_cache_in_memory() -> None:
    """The first run converts there: 79 MiB that the container is charged for."""
    cgroup.require()
    if not SHM.is_dir() or storage_of(SHM).kind != "memory":
        pytest.skip("/dev/shm is no memory here")
    cache = SHM / f"aegis-test-{os.getpid()}"
    env = {**os.environ, "PYTHONSAFEPATH": "1", "AEGIS_CACHE": str(cache)}
    base = [sys.executable, "-m", "aegis"]
    sizes = ["-c", "256"]
    asked = subprocess.run(
        [*base, "plan", "--json", "-q", "--cap", "1MiB", *sizes],
        capture_output=True,
        env=env,
        check=False,
    )
    cap = json.loads(asked.stdout)["min_cap_nbytes"]
    try:
        command = [*base, "run", "hello", "-q", "-n", "8", "--cap", f"{cap}B", *sizes]
        done = cgroup.run(command, cap, env=env)
        assert (done.rc, done.oom_kills) == (0, 0), done.stderr
        assert done.peak_nbytes > (embedded_path() / "model.safetensors").stat().st_size
    finally:
        shutil.rmtree(cache, ignore_errors=True)
