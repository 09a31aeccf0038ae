"""What doctor says of machines that are not here: every part is injected."""

from __future__ import annotations

import errno
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_tools import GIB, HEALTHY, MIB, changed, write_root

from aegis.checkpoint import storage
from aegis.checkpoint.pagecache import drop_pages
from aegis.checkpoint.storage import CACHED, DIRECT, REFUSED, Storage, file_system, storage_of
from aegis.doctor import disk, huge_pages
from aegis.doctor.advice import find_problems
from aegis.doctor.cache import inspect_cache
from aegis.doctor.disk import USUAL_RECORD_NBYTES, DiskTest, measure_disk
from aegis.doctor.facts import Facts, embedded_model, gather
from aegis.doctor.huge_pages import HugePages, read_setting, try_huge_pages
from aegis.doctor.processor import read_processor
from aegis.doctor.report import describe, to_json
from aegis.engine.limits import MemoryGroup, MemoryLimits
from aegis.tiers.errors import ArenaError

README = Path(__file__).resolve().parents[2] / "README.md"

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="direct I/O as Linux has it")

# Processor


def test_an_x86_processor_has_a_name_and_instruction_sets(tmp_path: Path) -> None:
    flags = "fpu avx2 fma f16c avx512f avx512bw avx512dq"
    text = f"processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: {flags}\n\nprocessor : 1\n"
    found = read_processor(write_root(tmp_path, {"proc/cpuinfo": text}))
    assert found.name == "Some CPU @ 2 GHz"
    assert found.instructions == ("avx2",)


def test_an_arm_processor_is_named_by_its_board_and_part(tmp_path: Path) -> None:
    text = "processor : 0\nFeatures : fp asimd\nCPU implementer : 0x41\nCPU part : 0xd0c\n"
    files = {"proc/cpuinfo": text, "proc/device-tree/model": "Some Board\0"}
    found = read_processor(write_root(tmp_path, files))
    assert found.name == "Some Board (implementer 0x41 part 0xd0c)"
    assert found.instructions == ("neon",)


def test_without_proc_there_is_still_a_processor(tmp_path: Path) -> None:
    found = read_processor(tmp_path)
    assert found.name
    assert found.cores >= found.usable_cores >= 1
    assert found.architecture == platform.machine()


def test_affinity_and_quota_bound_the_usable_cores(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
    found = read_processor(write_root(tmp_path, files))
    assert found.quota_cores == 1.5


# Huge pages


@pytest.mark.parametrize("setting", ["always", "madvise", "never"])
def test_the_huge_page_setting_is_the_word_in_brackets(setting: str, tmp_path: Path) -> None:
    text = "always madvise never\n".replace(setting, f"[{setting}]")
    root = write_root(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert read_setting(root) == setting


def test_a_system_without_the_setting_is_said_so(tmp_path: Path) -> None:
    assert read_setting(tmp_path) is None


@pytest.mark.parametrize(
    ("free", "size"), [(None, 32 * MIB), (GIB, 32 * MIB), (50 * MIB, 12 * MIB), (MIB, 0)]
)
def test_a_test_arena_takes_a_quarter_of_what_is_free(free: int | None, size: int) -> None:
    assert try_huge_pages(free).arena_nbytes == size


def test_no_memory_for_a_test_arena_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise ArenaError("no memory")

    monkeypatch.setattr(huge_pages, "Arena", refuse)
    assert try_huge_pages(GIB).huge_nbytes is None


# Storage

MOUNTS = """\
1 0 8:1 / / rw - ext4 /dev/a rw
2 1 0:5 / /mnt/my\\040disk rw - xfs /dev/b rw
3 1 0:6 / /mnt rw - tmpfs none rw
4 3 0:7 / /mnt rw - overlay none rw
5 1 0:8 / /mntx rw shared:1 master:2 - nfs4 host:/ rw
6 1 0:9 / /odd\x0c\u2028\r\x85name rw - tmpfs none rw
broken
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/home/x", "ext4"),
        ("/mnt/my disk/cache", "xfs"),
        ("/mnt/other", "overlay"),
        ("/mntx", "nfs4"),
        ("/mnty", "ext4"),
        ("/odd\x0c\u2028\r\x85name/x", "tmpfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(
    place: str, kind: str, tmp_path: Path
) -> None:
    root = write_root(tmp_path, {"proc/self/mountinfo": MOUNTS})
    assert file_system(Path(place), root) == kind
    assert file_system(Path(place), tmp_path / "nothing") is None


def test_looking_at_a_cache_leaves_nothing_behind(tmp_path: Path) -> None:
    found = inspect_cache(tmp_path / "not" / "there")
    assert found.writable
    assert found.free_nbytes
    assert found.stores == 0
    assert found.direct in (True, False, None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_cache_should_be_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not inspect_cache(tmp_path / "file").writable
    assert not inspect_cache(tmp_path / "file" / "cache").writable


def refusing_direct(error: int, usual: Callable[..., int] = os.open) -> Callable[..., int]:
    def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(error, os.strerror(error))
        return usual(path, flags, *rest, **more)

    return opened


@linux_only
def test_a_file_system_that_refuses_direct_reads_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "file_system", lambda _: "ext4")
    monkeypatch.setattr(os, "open", refusing_direct(errno.EINVAL))
    assert inspect_cache(tmp_path).direct is False


@linux_only
def test_in_a_read_only_cache_a_store_tells_about_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = storage_of(tmp_path).kind
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "store.json").touch()
    with (tmp_path / "model" / "resident.bin").open("wb") as file:
        file.write(bytes(8192))
        file.flush()
        os.fsync(file.fileno())
        drop_pages(file.fileno())

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "read-only")
        return usual(path, flags, *rest, **more)

    usual = os.open
    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = inspect_cache(tmp_path)
    assert (found.storage.kind, found.writable, found.stores) == (truth, False, 1)


# Disk


@pytest.fixture
def small_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with little, whatever the file system of temporary files is."""
    monkeypatch.setattr(disk, "FILE_NBYTES", 16 * MIB)
    monkeypatch.setattr(disk, "_ROUND_NBYTES", 8 * MIB)
    monkeypatch.setattr(disk, "_ROUNDS", 1)
    monkeypatch.setattr(disk, "storage_of", lambda _: DIRECT)


RECORDS = (USUAL_RECORD_NBYTES, 65536)


def assert_measured(found: DiskTest, folder: Path) -> None:
    assert (found.skipped, found.folder, found.file_nbytes) == (None, folder, 16 * MIB)
    kinds = {(speed.record_nbytes, speed.huge_pages) for speed in found.speeds}
    assert kinds == {(record, pages) for record in RECORDS for pages in (True, False)}
    assert all(speed.nbytes_per_s > 0 for speed in found.speeds)
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("small_test")
def test_records_of_each_size_are_read_into_both_kinds_of_pages(tmp_path: Path) -> None:
    assert_measured(measure_disk(tmp_path / "cache", RECORDS, None), tmp_path)


@pytest.mark.usefixtures("small_test")
def test_without_direct_io_reads_are_measured_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_go_direct", lambda _: False)
    found = measure_disk(tmp_path, RECORDS, None)
    assert not found.direct
    assert_measured(found, tmp_path)


@pytest.mark.usefixtures("small_test")
def test_direct_reads_that_come_from_the_page_cache_are_not_called_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "storage_of", lambda _: CACHED)
    found = measure_disk(tmp_path, RECORDS, None)
    assert not found.direct
    assert_measured(found, tmp_path)


@pytest.mark.usefixtures("small_test")
def test_direct_io_that_is_accepted_and_then_refused_is_measured_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = disk._write

    def refuse(fd: int, nbytes: int, direct: bool) -> int:
        if direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, nbytes, direct)

    monkeypatch.setattr(disk, "_go_direct", lambda _: True)
    monkeypatch.setattr(disk, "_write", refuse)
    assert_measured(measure_disk(tmp_path, RECORDS, None), tmp_path)


def test_no_more_than_256_mib_and_a_quarter_of_the_free_space_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        f_frsize = f_blocks = 1

        def __init__(self, free: int) -> None:
            self.f_bavail = free

    monkeypatch.setattr(disk, "storage_of", lambda _: DIRECT)
    for free, room in ((100 * GIB, 256 * MIB), (GIB // 2, 128 * MIB), (99 * MIB, 24 * MIB)):
        monkeypatch.setattr(disk.os, "statvfs", lambda _, free=free: Disk(free))
        assert disk._room(tmp_path) == room
    monkeypatch.setattr(disk.os, "statvfs", lambda _: Disk(20 * MIB))
    assert "too little free space" in str(measure_disk(tmp_path, RECORDS, None).skipped)


def test_a_file_is_never_larger_than_what_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_WRITE_SECONDS", 0.0)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        assert disk._write(file.fileno(), 64 * MIB, False) == disk.LEAST_FILE_NBYTES
    assert (tmp_path / "file").stat().st_size == disk.LEAST_FILE_NBYTES


def test_a_cache_in_memory_is_not_measured_and_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "storage_of", lambda _: Storage("memory"))
    found = measure_disk(tmp_path, RECORDS, None)
    assert found.skipped == f"{tmp_path} lies in memory"
    assert found.speeds == ()


@pytest.mark.usefixtures("small_test")
def test_with_a_read_only_cache_the_disk_of_temporary_files_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache := tmp_path / "cache").mkdir()
    (other := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(storage.tempfile, "gettempdir", lambda: str(other))
    monkeypatch.setattr(storage, "is_writable", lambda folder: folder != cache)
    assert_measured(measure_disk(cache, RECORDS, None), other)
    monkeypatch.setattr(storage, "is_writable", lambda _: False)
    found = measure_disk(cache, RECORDS, None)
    assert found.skipped == " and ".join(
        f"{folder} cannot be written" for folder in (cache, other, "/var/tmp")
    )


@pytest.mark.usefixtures("small_test")
def test_a_disk_that_fails_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(disk, "_write", fail)
    found = measure_disk(tmp_path, RECORDS, None)
    assert found.failed
    assert str(found.skipped).endswith("failed: Disk quota exceeded")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_test")
def test_a_read_that_fails_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_write", lambda *_: 32 * MIB)  # of which nothing is there
    found = measure_disk(tmp_path, RECORDS, None)
    assert found.failed
    assert str(found.skipped).endswith("failed: short read")


def test_too_little_memory_to_read_into_is_no_error(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, RECORDS, 4 * MIB)
    assert (found.skipped, found.failed) == ("too little memory is free to try", False)


# Problems

MLX, NATIVE, REFERENCE = HEALTHY.backends
NO_NATIVE = replace(
    HEALTHY,
    backends=(MLX, replace(NATIVE, reason="not built"), REFERENCE),
    default_backend="reference",
    compiler=None,
)
SLOW = [replace(speed, nbytes_per_s=200 * MIB) for speed in HEALTHY.disk.speeds]


def memory(free: int, **fields: Any) -> Facts:
    return replace(HEALTHY, memory=MemoryLimits(total=32 * GIB, available=free, swap=0, **fields))


def limited(limit: int, usage: int) -> Facts:
    group = MemoryGroup(2, Path("/sys/fs/cgroup/box/memory.max"), limit, usage, 0)
    return memory(24 * GIB, groups=(group,))


MACHINES = {
    "huge_pages_never": changed("huge_pages", setting="never", huge_nbytes=0),
    "huge_pages_not_given": changed("huge_pages", huge_nbytes=6 * MIB),
    "one_core": changed("processor", usable_cores=1),
    "isa_not_available": changed("processor", wanted_isa="sse9"),
    "isa_not_best": changed("processor", isa="avx2", wanted_isa="avx2"),
    "no_vector_instructions": changed("processor", isa="scalar", isas=("scalar",)),
    "no_native_backend": NO_NATIVE,
    "backend_not_available": replace(HEALTHY, wanted_backend="mlx"),
    "no_cuda_headers": replace(HEALTHY, lacks_cuda_headers=True),
    "little_memory": limited(200 * MIB, 60 * MIB),
    "little_memory_for_context": memory(200 * MIB),
    "default_cap_too_small": memory(500 * MIB),
    "embedded_model": replace(HEALTHY, model=None, model_error="config.json is damaged"),
    "swap": replace(HEALTHY, swap_nbytes=2 * GIB),
    "address_space": replace(HEALTHY, address_space_nbytes=GIB),
    "no_cache_folder": replace(HEALTHY, cache=None, cache_error="no home"),
    "cache_read_only": changed("cache", writable=False, stores=0),
    "cache_in_memory": changed("cache", file_system="tmpfs", storage=Storage("memory")),
    "cache_on_network": changed("cache", file_system="nfs4"),
    "cache_in_container": changed("cache", file_system="overlay"),
    "no_direct_io": changed("cache", storage=REFUSED),
    "little_disk": changed("cache", free_nbytes=100 * MIB),
    "slow_disk": changed("disk", speeds=SLOW),
    "disk_failed": changed("disk", speeds=(), skipped="it failed", failed=True),
}


def test_a_machine_with_nothing_wrong_has_no_problems() -> None:
    assert find_problems(HEALTHY) == []
    assert list(describe(HEALTHY, []))[-1] == "no problems found"


@pytest.mark.parametrize("name", MACHINES)
def test_each_problem_is_named_with_its_remedy(name: str) -> None:
    problems = find_problems(MACHINES[name])
    assert [problem.name for problem in problems] == [name]
    text = "\n".join(describe(MACHINES[name], problems))
    assert f"{problems[0].severity}: {problems[0].what}\n" in text
    assert f"-> {problems[0].advice}" in text


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (changed("cache", writable=False, stores=3), "note"),
        (changed("cache", free_nbytes=5 * GIB), "note"),
        (changed("processor", isa="scalar", wanted_isa="scalar"), "problem"),
        (changed("processor", quota_cores=0.5), "problem"),
    ],
)
def test_what_only_matters_sometimes_is_a_note(facts: Facts, severity: str) -> None:
    assert [problem.severity for problem in find_problems(facts)] == [severity]


def test_problems_come_before_notes() -> None:
    facts = replace(MACHINES["huge_pages_never"], swap_nbytes=GIB)
    assert [problem.severity for problem in find_problems(facts)] == ["problem", "note"]


def test_without_a_compiler_that_is_said_and_with_one_how_to_see_what_failed() -> None:
    without, with_one = NO_NATIVE, replace(NO_NATIVE, compiler="/usr/bin/g++")
    assert "no C++ compiler" in find_problems(without)[0].what
    assert "/usr/bin/g++" in find_problems(with_one)[0].what
    assert "-v" in find_problems(with_one)[0].advice


# The cap


@pytest.mark.parametrize(
    ("facts", "cap"),
    [
        (HEALTHY, 21 * GIB),
        (limited(2 * GIB, GIB), 896 * MIB),
        (memory(100 * MIB), 84 * MIB),
        (memory(0), 0),
        (replace(HEALTHY, memory=MemoryLimits(None, None, None)), None),
    ],
)
def test_the_sensible_cap_is_free_memory_less_a_margin(facts: Facts, cap: int | None) -> None:
    assert facts.sensible_cap_nbytes == cap
    assert any(line.startswith("cap ") for line in describe(facts, []))


def test_the_embedded_models_smallest_cap_is_the_plans() -> None:
    from aegis import plan

    model = embedded_model()
    smallest = plan(cap=1)
    assert model.min_cap_nbytes == smallest.min_cap_nbytes
    assert model.short_min_cap_nbytes == plan(cap=1, context=512).min_cap_nbytes
    assert plan(cap=model.everything_nbytes).total_slots == 30 * 16


# Everything together


def test_facts_of_a_machine_elsewhere_are_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "proc/cpuinfo": "model name : Fake\nflags : fpu\n",
        "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n"
        "SwapTotal: 1024 kB\nSwapFree: 512 kB\n",
        "proc/self/cgroup": "0::/box\n",
        "proc/self/mountinfo": "1 0 8:1 / / rw - btrfs /dev/a rw\n",
        "sys/fs/cgroup/box/memory.max": str(400 * MIB),
        "sys/fs/cgroup/box/memory.current": str(100 * MIB),
        "sys/fs/cgroup/box/memory.stat": "inactive_file 0\n",
        "sys/fs/cgroup/box/cpu.max": "100000 100000\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    }
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    facts = gather(disk=False, root=write_root(tmp_path / "root", files))
    assert facts.processor.name == "Fake"
    assert facts.processor.quota_cores == 1.0
    assert facts.memory.container_limit == 400 * MIB
    assert facts.memory.free == 300 * MIB
    assert facts.swap_nbytes == MIB
    assert facts.cache is not None
    assert facts.cache.file_system == "btrfs"
    assert facts.disk.skipped == "asked for"
    names = {problem.name for problem in find_problems(facts)}
    assert {"one_core", "huge_pages_never", "swap"} <= names
    assert not (tmp_path / "cache").exists()


def test_a_cache_folder_that_nobody_knows_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr("aegis.doctor.facts.cache_folder", homeless)
    facts = gather()
    assert facts.cache is None
    assert facts.disk.skipped == "could not determine home directory"
    assert "no_cache_folder" in {problem.name for problem in find_problems(facts)}


KEYS = {
    "versions": {"aegis", "python", "numpy", "tokenizers", "os", "kernel"},
    "processor": {
        *("name", "architecture", "cores", "usable_cores", "quota_cores"),
        *("isa", "isas", "instructions"),
    },
    "memory": {
        *("total_nbytes", "available_nbytes", "free_nbytes", "limit_nbytes", "limit_version"),
        *("limit_source", "swap_nbytes", "swap_free_nbytes", "address_space_nbytes"),
    },
    "huge_pages": {"setting", "arena_nbytes", "huge_nbytes"},
    "cache": {
        *("folder", "writable", "file_system", "free_nbytes", "direct", "stores", "error"),
        *("reads", "reads_reason"),
    },
    "disk": {"skipped", "failed", "folder", "direct", "file_nbytes", "reads"},
    "cap": {"sensible_nbytes", "rule", "margin_nbytes", "default_nbytes", "embedded_model"},
}
LISTS = {
    "backends": {"name", "available", "reason", "install"},
    "problems": {"name", "severity", "what", "advice"},
}


@pytest.mark.parametrize("name", ["little_memory", "no_cache_folder", "embedded_model"])
def test_the_keys_of_json_are_the_same_on_every_machine(name: str) -> None:
    found = to_json(MACHINES[name], find_problems(MACHINES[name]))
    assert set(found) == {*KEYS, *LISTS, "default_backend", "compiler"}
    for part, keys in KEYS.items():
        assert set(found[part]) == keys, part
    for part, keys in LISTS.items():
        assert all(set(item) == keys for item in found[part]), part
    read = {"record_nbytes", "huge_pages", "nbytes_per_s"}
    assert all(set(item) == read for item in found["disk"]["reads"])
    readme = README.read_text()
    for part, keys in (KEYS | LISTS).items():
        named = re.search(rf"`{part}[\[{{]+([^}}\]`]*)", readme)
        assert part == "versions" or (named and keys <= set(re.findall(r"\w+", named[1]))), part


@pytest.mark.parametrize("part", [HugePages(None, 0, None), HugePages("always", MIB, None)])
def test_what_is_not_known_is_said_to_be_unknown(part: HugePages) -> None:
    facts = replace(HEALTHY, huge_pages=part, memory=MemoryLimits(None, None, None))
    text = "\n".join(describe(facts, find_problems(facts)))
    assert "an unknown amount available of an unknown amount" in text
    assert "too little memory" in text or "an unknown part" in text
