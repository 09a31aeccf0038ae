"""The cap holds where the kernel enforces it: the real command in a cgroup limited to the cap."""

import json
import subprocess
from pathlib import Path

import cgroup
import pytest

MIB = 1 << 20
PROMPT = "one two three four five six seven " * 100
ARGUMENTS = ("run", "--raw", "-n", "200", "--ignore-eos", "-c", "1024", "-p", PROMPT)
NEXT_TO_NONE = 64
"""Faults that 200 tokens may cause: a page of code that only a later branch reaches."""


@pytest.fixture(scope="module")
def cold_env(
    cold_python: cgroup.ColdPython, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return {**cold_python.env, "AEGIS_CACHE": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def smallest_cap(cold_python: cgroup.ColdPython, cold_env: dict[str, str]) -> int:
    command = [*cold_python.command, "-m", "aegis", "plan", "--json", "-c", "1024", "--cap", "1MiB"]
    done = subprocess.run(command, env=cold_env, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    return int(json.loads(done.stdout)["min_cap_nbytes"])


@pytest.mark.parametrize("more_mib", [0, 10, 60])
def test_a_run_limited_to_its_cap_finishes_without_faulting(
    more_mib: int, smallest_cap: int, cold_python: cgroup.ColdPython, cold_env: dict[str, str]
) -> None:
    cap = smallest_cap + more_mib * MIB
    command = [*cold_python.command, "-m", "aegis", *ARGUMENTS, "--cap", f"{cap}B"]
    result = cgroup.run(command, cap, env=cold_env)
    assert (result.rc, result.oom_kills) == (0, 0), result.stderr
    assert result.faults_after_first_output <= NEXT_TO_NONE


@pytest.mark.parametrize("more_mib", [0, 60])
def test_without_a_limit_the_peak_stays_below_the_cap_too(
    more_mib: int, smallest_cap: int, cold_python: cgroup.ColdPython, cold_env: dict[str, str]
) -> None:
    cap = smallest_cap + more_mib * MIB
    command = [*cold_python.command, "-m", "aegis", *ARGUMENTS, "--json", "--cap", f"{cap}B"]
    result = cgroup.run(command, None, env=cold_env)
    assert result.rc == 0, result.stderr
    assert result.peak_nbytes <= cap, f"{(result.peak_nbytes - cap) / MIB:.1f} MiB over the cap"
    assert json.loads(result.stdout)["prompt_tokens"] >= 700


def test_the_first_run_converts_inside_its_cap(
    smallest_cap: int, cold_python: cgroup.ColdPython, cold_env: dict[str, str], tmp_path: Path
) -> None:
    env = {**cold_env, "AEGIS_CACHE": str(tmp_path / "fresh")}
    command = [*cold_python.command, "-m", "aegis", "run", "-c", "1024", "-n", "2", "Hello"]
    result = cgroup.run([*command, "--cap", f"{smallest_cap}B"], smallest_cap, env=env)
    assert (result.rc, result.oom_kills) == (0, 0), result.stderr
    assert any((tmp_path / "fresh").iterdir())
