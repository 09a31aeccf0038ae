"""Free memory is the least that machine and containers allow."""

import sys
from pathlib import Path

import pytest

from aegis.cli.machine import Machine, default_cap, read_machine

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 32000000 kB\nMemAvailable:   16777216 kB\n"}


def test_without_a_container_the_machine_decides(tmp_path: Path) -> None:
    assert read_machine(write(tmp_path, MEMINFO)) == Machine(16 * GIB, None)


def test_a_version_1_limit_of_any_parent_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu:/\n4:memory:/outer/inner\n",
        f"{base}/memory.limit_in_bytes": "9223372036854771712",
        f"{base}/memory.usage_in_bytes": "1",
        f"{base}/memory.stat": "cache 1\n",
        f"{base}/outer/memory.limit_in_bytes": str(2 * GIB),
        f"{base}/outer/memory.usage_in_bytes": str(GIB),
        f"{base}/outer/memory.stat": f"cache 5\ntotal_inactive_file {GIB // 2}\n",
        f"{base}/outer/inner/memory.limit_in_bytes": str(8 * GIB),
        f"{base}/outer/inner/memory.usage_in_bytes": "0",
        f"{base}/outer/inner/memory.stat": "total_inactive_file 0\n",
    }
    assert read_machine(write(tmp_path, MEMINFO | files)) == Machine(3 * GIB // 2, 2 * GIB)


def test_a_version_2_limit_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/box\n",
        f"{base}/box/memory.max": str(GIB),
        f"{base}/box/memory.current": str(GIB // 4),
        f"{base}/box/memory.stat": "inactive_file 0\n",
    }
    assert read_machine(write(tmp_path, MEMINFO | files)) == Machine(3 * GIB // 4, GIB)


def test_no_limit_in_version_2_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": "max",
        "sys/fs/cgroup/box/memory.current": "5",
    }
    assert read_machine(write(tmp_path, MEMINFO | files)).limit_nbytes is None


@pytest.mark.parametrize(
    ("free", "cap"), [(32 * GIB, 4 * GIB), (6 * GIB, 3 * GIB), (8 * GIB, 4 * GIB), (0, 1)]
)
def test_the_default_cap_is_4_gib_or_half_of_what_is_free(free: int, cap: int) -> None:
    assert default_cap(Machine(free, None)) == cap


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system is asked")
def test_where_nothing_says_what_is_free_all_memory_is_taken_to_be(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.free_nbytes > 64 << 20
    assert machine.limit_nbytes is None
