"""What the machine and a container allow reaches the plan, the command line and Engine.open."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cgroup
import pytest
from small_model import needs_native

import aegis
from aegis import Engine
from aegis.engine import planning
from aegis.engine.limits import MemoryGroup, MemoryLimits
from aegis.errors import PlanError

MIB = 1 << 20
PAGE = 4096


def group(limit: int, usage: int = 0) -> MemoryGroup:
    """A container."""
    return MemoryGroup(2, Path("/sys/fs/cgroup/box/memory.max"), limit, usage, 0)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[MemoryLimits]:
    """What plans are told; replace the one item."""
    told = [MemoryLimits(None, None, None)]
    monkeypatch.setattr(planning, "memory_limits", lambda: told[0])
    return told


def test_nothing_known_is_no_bound(limits: list[MemoryLimits]) -> None:
    plan = aegis.plan(cap="1GiB", context=64)
    assert (plan.feasible, plan.warnings, plan.around.ceiling_nbytes) == (True, (), None)


def test_a_plan_beyond_the_container_is_refused_before_anything_is_touched(
    limits: list[MemoryLimits],
) -> None:
    limits[0] = MemoryLimits(1 << 40, 1 << 40, 0, (group(150 * MIB),))
    with pytest.raises(PlanError, match=r"but this container's memory .*box/memory\.max") as told:
        Engine.open(cap="1GiB", context=512)
    assert told.value.exit_code == 3


def test_a_plan_beyond_the_machine_is_refused_too(limits: list[MemoryLimits]) -> None:
    limits[0] = MemoryLimits(150 * MIB, 150 * MIB, 0, (group(1 << 40),))
    plan = aegis.plan(cap="1GiB", context=512)
    assert "this machine's memory ends at 150 MiB" in plan.refusal()


def test_a_limit_rounded_down_to_a_page_is_not_below_a_cap_of_just_that(
    limits: list[MemoryLimits],
) -> None:
    cap = aegis.plan(cap=1, context=512).min_cap_nbytes
    for limit, fits in ((cap // PAGE * PAGE, True), (cap // PAGE * PAGE - PAGE, False)):
        limits[0] = MemoryLimits(None, None, None, (group(limit),))
        assert aegis.plan(cap=cap, context=512).feasible == fits


def test_memory_that_this_process_holds_already_counts_as_free(
    limits: list[MemoryLimits], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = aegis.plan(cap="1GiB", context=512).total_nbytes
    monkeypatch.setattr(planning, "resident_nbytes", lambda: 30 * MIB)
    for free, warns in ((total - 30 * MIB, False), (total - 60 * MIB, True)):
        limits[0] = MemoryLimits(1 << 40, free, 0)
        assert bool(aegis.plan(cap="1GiB", context=512).warnings) == warns


COMMAND = [sys.executable, "-P", "-m", "aegis"]


@needs_native
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_real_container_is_known_to_the_command_line(verb: str) -> None:
    cgroup.require()
    options = ["--cap", "1GiB", "-c", "512"]
    refused = cgroup.run([*COMMAND, verb, *options], 150 * MIB, cold=False)
    assert (refused.rc, refused.oom_kills) == (3, 0), refused.stderr
    last = refused.stderr.strip().splitlines()[-1]
    assert "but this container's memory" in last
    assert "use a cap of at most" in last


@needs_native
def test_a_real_container_that_is_large_enough_is_only_a_warning() -> None:
    cgroup.require()
    done = cgroup.run([*COMMAND, "plan", "--cap", "1GiB", "-c", "512"], 500 * MIB, cold=False)
    assert done.rc == 0, done.stderr
    assert "warning: the cap of 1 GiB is above this container's memory" in done.stdout
    found = cgroup.run([*COMMAND, "plan", "--cap", "1GiB", "--json"], 700 * MIB, cold=False)
    data = json.loads(found.stdout)
    assert data["ceiling_nbytes"] // PAGE == 700 * MIB // PAGE
    assert len(data["warnings"]) == 1


def test_a_cap_of_just_the_containers_limit_has_no_warning() -> None:
    cgroup.require()
    smallest = aegis.plan(cap=1, context=512).min_cap_nbytes
    arguments = ["plan", "--cap", f"{smallest}B", "-c", "512", "--json"]
    done = cgroup.run([*COMMAND, *arguments], smallest, cold=False)
    assert done.rc == 0, done.stderr
    assert json.loads(done.stdout)["warnings"] == []
