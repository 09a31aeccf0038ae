"""Limits are found in every arrangement of memory groups, and nonsense in their files is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cgroup
import pytest

from aegis.engine.limits import MemoryLimits, memory_limits

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NONE = "9223372036854771712"
MEMINFO = (
    "MemTotal:       33554432 kB\nMemFree: 1024 kB\nMemAvailable:   16777216 kB\nSwapFree: 8 kB\n"
)

Tree = Callable[[dict[str, str]], MemoryLimits]


@pytest.fixture
def limits(tmp_path: Path) -> Tree:
    """Limits as read from a tree of files."""

    def read(files: dict[str, str]) -> MemoryLimits:
        for name, text in ({"proc/meminfo": MEMINFO} | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return memory_limits(tmp_path)

    return read


def group1(folder: str, limit: str | int, usage: int = 0, stat: str = "") -> dict[str, str]:
    """The files of a version 1 group."""
    base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{usage}\n",
        f"{base}/memory.stat": stat,
    }


def group2(
    folder: str, limit: str | int, usage: int = 0, high: str | int = "max", inactive: int = 0
) -> dict[str, str]:
    """The files of a version 2 group."""
    base = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.high": f"{high}\n",
        f"{base}/memory.current": f"{usage}\n",
        f"{base}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file 7\n",
    }


V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/outer/inner\n1:name=systemd:/\n0::/\n"}
V2 = {"proc/self/cgroup": "0::/outer/inner\n"}


def test_a_machine_without_groups(limits: Tree) -> None:
    found = limits({})
    assert (found.total, found.available, found.swap) == (32 * GIB, 16 * GIB, 8 * KIB)
    assert (found.container_limit, found.container_usage) == (None, None)
    assert (found.source, found.version) == (None, None)
    assert (found.ceiling, found.free) == (32 * GIB, 16 * GIB)


def test_a_version_1_limit(limits: Tree, tmp_path: Path) -> None:
    found = limits(V1 | group1("outer/inner", 2 * GIB, GIB, f"total_inactive_file {GIB // 2}\n"))
    assert (found.container_limit, found.container_usage) == (2 * GIB, GIB)
    assert (found.version, found.ceiling, found.free) == (1, 2 * GIB, 3 * GIB // 2)
    folder = tmp_path / "sys/fs/cgroup/memory/outer/inner"
    assert found.source == folder / "memory.limit_in_bytes"
    assert found.tightest is not None
    assert found.tightest.usage_path == folder / "memory.usage_in_bytes"


def test_a_version_2_limit(limits: Tree, tmp_path: Path) -> None:
    found = limits(V2 | group2("outer/inner", GIB, GIB // 4, inactive=MIB))
    assert (found.container_limit, found.container_usage) == (GIB, GIB // 4)
    assert (found.version, found.free) == (2, 3 * GIB // 4 + MIB)
    assert found.source == tmp_path / "sys/fs/cgroup/outer/inner/memory.max"


def test_a_group_may_have_any_name(limits: Tree) -> None:
    name = "a\x0c\u2028 b\x1c"
    found = limits({"proc/self/cgroup": f"0::/{name}\n"} | group2(name, 7 * MIB))
    assert found.container_limit == 7 * MIB


def test_the_throttling_limit_of_version_2_counts_as_well(limits: Tree, tmp_path: Path) -> None:
    found = limits(V2 | group2("outer/inner", GIB, high=GIB // 2))
    assert found.container_limit == GIB // 2
    assert found.source == tmp_path / "sys/fs/cgroup/outer/inner/memory.high"


def test_the_tightest_parent_decides_and_the_fullest_one_says_what_is_free(limits: Tree) -> None:
    for version, own in ((V1, group1), (V2, group2)):
        files = {
            **own("", 16 * GIB, 12 * GIB),
            **own("outer", 8 * GIB, 7 * GIB),
            **own("outer/inner", 2 * GIB, GIB // 2),
        }
        found = limits(version | files)
        assert [group.limit for group in found.groups] == [2 * GIB, 8 * GIB, 16 * GIB]
        assert (found.container_limit, found.free) == (2 * GIB, GIB)


@pytest.mark.parametrize("text", [NONE, "18446744073709551615", "-1", "max", "", "lots", "1.5"])
def test_what_means_no_limit(limits: Tree, text: str) -> None:
    found = limits(V1 | group1("outer/inner", text, GIB) | group2("outer/inner", text, GIB))
    assert (found.container_limit, found.free) == (None, 16 * GIB)


def test_parents_that_the_container_does_not_see_count_in_version_1(limits: Tree) -> None:
    stat = f"cache 1\nhierarchical_memory_limit {GIB}\n"
    found = limits(V1 | group1("outer/inner", NONE, MIB, stat))
    assert found.container_limit == GIB
    assert limits(V1 | group1("outer/inner", GIB // 2, 0, stat)).container_limit == GIB // 2


def test_a_container_that_sees_its_own_group_at_the_top(limits: Tree) -> None:
    """The path names the host's folder, which is not mounted here."""
    mountinfo = (
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 31 0:35 /docker/abc /sys/fs/cgroup/memory ro master:17 - cgroup cgroup rw,memory\n"
    )
    named = {"proc/self/cgroup": "4:memory:/docker/abc\n", "proc/self/mountinfo": mountinfo}
    assert limits(named | group1("", GIB)).container_limit == GIB
    deeper = {"proc/self/cgroup": "4:memory:/docker/abc/job\n"}
    found = limits(named | deeper | group1("job", GIB // 4))
    assert [group.limit for group in found.groups] == [GIB // 4, GIB]
    elsewhere = {"proc/self/cgroup": "4:memory:/docker/xyz/job\n"}
    assert limits(named | elsewhere | group1("", GIB // 2)).container_limit == GIB // 2


def test_without_a_table_of_mounts_the_usual_places_are_searched(limits: Tree) -> None:
    files = {"proc/self/cgroup": "4:memory:/docker/abc\n"} | group1("", GIB)
    assert limits(files).container_limit == GIB


def test_a_group_outside_of_the_namespace_falls_back_to_what_is_mounted(limits: Tree) -> None:
    files = {"proc/self/cgroup": "0::/../other\n"} | group2("", GIB)
    assert limits(files).container_limit == GIB


def test_version_2_mounted_elsewhere_with_a_space_in_its_path(limits: Tree) -> None:
    mountinfo = (
        "40 23 0:30 / /mnt/my\\040groups rw shared:4 - cgroup2 none rw,nsdelegate\nnonsense\n"
    )
    files = {
        "proc/self/cgroup": "0::/box\n",
        "proc/self/mountinfo": mountinfo,
        "mnt/my groups/box/memory.max": str(GIB),
    }
    found = limits(files)
    assert (found.container_limit, found.container_usage, found.free) == (GIB, 0, GIB)


@pytest.mark.parametrize("mounted", [True, False])
def test_a_hybrid_system_takes_the_limit_from_version_1(limits: Tree, mounted: bool) -> None:
    mountinfo = (
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    files = V1 | group1("outer/inner", GIB) | {"sys/fs/cgroup/unified/cgroup.procs": ""}
    found = limits(files | ({"proc/self/mountinfo": mountinfo} if mounted else {}))
    assert (found.container_limit, found.version) == (GIB, 1)


def test_garbage_in_every_file_is_no_limit(limits: Tree) -> None:
    garbage = dict.fromkeys(V1 | group1("outer/inner", 1) | group2("", 1), "\0:\xff 7\n:::\n")
    found = limits(garbage | {"proc/self/mountinfo": "- - -\n\n a - cgroup2 b c\n"})
    assert (found.container_limit, found.available) == (None, 16 * GIB)


def test_a_kernel_that_does_not_say_what_is_available(limits: Tree) -> None:
    assert limits({"proc/meminfo": "MemTotal: 4 kB\nMemFree: 2 kB\n"}).available == 2 * KIB


def test_without_proc_nothing_is_known_or_the_system_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    nothing = memory_limits(tmp_path)
    assert nothing == MemoryLimits(None, None, None)
    assert (nothing.ceiling, nothing.free) == (None, None)


def test_other_systems_are_asked_through_psutil(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr("sys.platform", "darwin")
    assert memory_limits(tmp_path).total == psutil.virtual_memory().total


def test_the_limit_of_a_real_group_is_found() -> None:
    cgroup.require()
    import sys

    code = (
        "from aegis.engine.limits import memory_limits as m; f = m();"
        "print(f.container_limit, f.container_usage, f.free, f.source)"
    )
    result = cgroup.run([sys.executable, "-c", code], 200 * MIB, cold=False)
    limit, usage, free, source = result.stdout.split()
    assert (result.rc, int(limit)) == (0, 200 * MIB)
    assert 0 < int(usage) < 200 * MIB
    assert 0 < int(free) < 200 * MIB
    assert "aegis-test" in source
