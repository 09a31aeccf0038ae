"""The harness itself: a limit kills what exceeds it, and peaks and faults are really counted."""

import sys

import cgroup
import pytest

MIB = 1 << 20
HOLD = (
    "x = bytearray({mib} << 20); x[::4096] = b'1' * len(x[::4096]); print('held', flush=True);"
    "import time; time.sleep(1)"  # the group is looked at after the first output: hold it so long
)


@pytest.fixture(autouse=True)
def permitted() -> None:
    cgroup.require()


def test_the_peak_covers_what_the_command_held() -> None:
    result = cgroup.run([sys.executable, "-I", "-c", HOLD.format(mib=50)], 200 * MIB)
    assert (result.rc, result.stdout, result.oom_kills) == (0, "held\n", 0)
    assert 50 * MIB < result.peak_nbytes < 100 * MIB
    assert result.first_output is not None
    assert result.first_output.usage_nbytes > 50 * MIB


def test_a_command_over_the_limit_is_killed_and_counted() -> None:
    result = cgroup.run([sys.executable, "-I", "-c", HOLD.format(mib=90)], 60 * MIB, cold=False)
    assert result.rc == -9
    assert result.oom_kills == 1
    assert result.first_output is None


def test_library_pages_are_charged_when_cold(cold_python: cgroup.ColdPython) -> None:
    python = cold_python
    code = "import numpy; print(numpy.__file__)"
    result = cgroup.run([*python.command, "-c", code], None, env=python.env)
    assert result.rc == 0, result.stderr
    assert "cold" in result.stdout
    warm = cgroup.run([*python.command, "-c", code], None, env=python.env, cold=False)
    assert result.peak_nbytes > warm.peak_nbytes + 5 * MIB
