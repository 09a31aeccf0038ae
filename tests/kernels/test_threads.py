"""Threads by default: the processors, or what a container's quota keeps busy."""

import sys
from pathlib import Path

import pytest

from aegis.engine.planning import compute_threads
from aegis.kernels import threads
from aegis.kernels.threads import cpu_quota, default_threads, usable_processors

GROUPS = "sys/fs/cgroup"


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(("text", "limit"), [("150000 100000", 2), ("max 100000", 9), ("?", 9)])
def test_threads_follow_a_containers_quota(
    text: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_processors", lambda: 9)
    root = machine(tmp_path, "0::/\n", {f"{GROUPS}/cpu.max": text})
    assert default_threads(root) == limit
    monkeypatch.setattr(threads, "cpu_quota", lambda _: 2.5)
    assert compute_threads(None) == 3


def test_the_tightest_quota_of_every_group_around_counts(tmp_path: Path) -> None:
    files = {
        f"{GROUPS}/outer/cpu.max": "50000 100000",
        f"{GROUPS}/outer/inner/cpu.max": "300000 100000",
    }
    root = machine(tmp_path, "3:memory:/x\n0::/outer/inner\n", files)
    assert cpu_quota(root) == 0.5
    assert default_threads(root) == 1


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "expected"), [("250000", 2.5), ("-1", None)])
def test_a_quota_of_version_1_counts(
    controllers: str, quota: str, expected: float | None, tmp_path: Path
) -> None:
    group = f"{GROUPS}/{controllers}/box"
    files = {
        f"{group}/cpu.cfs_quota_us": f"{quota}\n",
        f"{group}/cpu.cfs_period_us": "100000\n",
        f"{GROUPS}/unified/box/cgroup.procs": "",
    }
    assert cpu_quota(machine(tmp_path, f"4:{controllers}:/box\n0::/box\n", files)) == expected


def test_inside_a_container_the_mounted_group_counts(tmp_path: Path) -> None:
    files = {f"{GROUPS}/cpu.max": "100000 100000"}
    assert cpu_quota(machine(tmp_path, "0::/docker/on/the/host\n", files)) == 1.0
    assert cpu_quota(machine(tmp_path, "0::/../../other\n", files)) == 1.0


def test_without_any_group_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert default_threads(tmp_path) == usable_processors()


def test_a_request_goes_beyond_a_quota_but_not_beyond_the_processors() -> None:
    assert compute_threads(1) == 1
    assert compute_threads(1000) == usable_processors()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are UTF-8")
def test_a_group_may_have_any_name(tmp_path: Path) -> None:
    name = "a\x0c\u2028\udce9b"
    root = machine(tmp_path, "0::/", {f"{GROUPS}/{name}/cpu.max": "50000 100000"})
    (root / "proc/self/cgroup").write_bytes(f"0::/{name}\n".encode(errors="surrogateescape"))
    assert cpu_quota(root) == 0.5
