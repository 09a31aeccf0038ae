"""A minute of what tools/soak.py does for an hour; and the tool itself notices what is wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cgroup
import pytest
from small_model import needs_native

MIB = 1 << 20
TOOL = Path(__file__).parents[2] / "tools" / "soak.py"
SECONDS = 60


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/soak.py, which is not installed."""
    spec = importlib.util.spec_from_file_location("soak", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


@needs_native
@pytest.mark.soak
def test_changing_models_and_prompts_at_the_smallest_cap_stay_inside_and_flat(
    tool: ModuleType, cold_python: cgroup.ColdPython, tmp_path: Path
) -> None:
    python = cgroup.ColdPython(
        cold_python.command, {**cold_python.env, "AEGIS_CACHE": str(tmp_path)}
    )
    state = tool.soak(python, SECONDS, seed=7, contexts=(64, 128, 256, 512), segment_s=5)
    print(state.summary())
    assert state.problems() == []
    assert len(state.idle) >= 4
    assert state.rounds >= len(state.idle)


def line(**changes: Any) -> dict[str, Any]:
    """What the worker says after a prompt."""
    given = {"most_nbytes": 0, "times": 0}
    base = {"kind": "round", "cap": 160 * MIB, "anon": 100 * MIB, "charge": 0, "faults": 0}
    return base | {"tokens": [1], "given": given} | changes


def state_of(tool: ModuleType, idle_mib: list[int]) -> Any:
    """A soak that went well, but for what the process held between models."""
    state = tool.Soak(cgroup.ColdPython((sys.executable,), {}))
    for mib in idle_mib:
        state.note(line())
        state.note(line(kind="closed", anon=mib * MIB, charge=mib * MIB))
    state.checked, state.rc = 1, 0
    return state


def test_the_tool_accepts_what_is_flat_and_notices_growth(tool: ModuleType) -> None:
    assert state_of(tool, [20, 24, 24, 25, 24, 24, 25]).problems() == []
    (grown,) = state_of(tool, [20, 24, 26, 28, 30, 32, 34]).problems()
    assert "grew by" in grown


def test_the_tool_notices_endings_and_tokens_that_are_wrong(tool: ModuleType) -> None:
    for changes, said in (
        ({"rc": 4, "stderr": "above the cap"}, "above the cap"),
        ({"rc": -9, "oom_kills": 1}, "1 killed for memory"),
        ({"different": [line()]}, "1 answers differ"),
        ({"checked": 0}, "no answer was compared"),
    ):
        state = state_of(tool, [20, 24, 24, 24])
        for name, value in changes.items():
            setattr(state, name, value)
        (problem,) = state.problems()
        assert said in problem


def test_the_tool_repeats_an_answer_in_a_fresh_process(tool: ModuleType) -> None:
    state = state_of(tool, [])
    state.python = cgroup.ColdPython((sys.executable,), None)
    same = {"context": 64, "ids": [5, 6, 7], "sampling": {"max_tokens": 2, "ignore_eos": True}}
    state.check(line(**same, tokens=[-1, -1]))
    assert (state.checked, len(state.different)) == (2, 1)
    told = state.different[0]["fresh"]
    state.check(line(**same, tokens=[int(word) for word in told.strip("[] \n").split(",")]))
    assert (state.checked, len(state.different)) == (3, 1)
