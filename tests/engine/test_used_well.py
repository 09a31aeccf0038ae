"""More memory is used well: the hit rate grows with the cap, and what fits is read once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_model import needs_native

from aegis import Engine

NOISE = 0.02
CAPS = 6

pytestmark = needs_native


@pytest.fixture(scope="module")
def sweep(cache: Path) -> dict[str, Any]:
    """``aegis sweep`` on the embedded model at six caps from the smallest to all-resident."""
    from aegis import plan

    smallest = plan(cap="1GiB", context=512, backend="native").min_cap_nbytes
    largest = plan(cap="1GiB", context=512, backend="native").total_nbytes
    step = (largest - smallest) // (CAPS - 1)
    caps = f"{smallest}B..{smallest + (CAPS - 1) * step}B:{step}B"
    if largest > smallest + (CAPS - 1) * step:
        caps = f"{smallest}B..{largest}B:{-(-(largest - smallest) // (CAPS - 1))}B"
    command = [sys.executable, "-m", "aegis", "sweep", "--cap", caps, "-c", "512", "-n", "160"]
    command += ["--ignore-eos", "--json", "-q", "-p", "Explain how a bicycle stays upright."]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_every_row_has_the_same_tokens(sweep: dict[str, Any]) -> None:
    assert sweep["identical"] is True
    assert all(row["feasible"] for row in sweep["rows"])


def test_the_hit_rate_does_not_fall_as_the_cap_grows(sweep: dict[str, Any]) -> None:
    rates = [row["hit_rate"] for row in sweep["rows"]]
    assert len(rates) >= CAPS - 1
    best = 0.0
    for rate in rates:
        assert rate >= best - NOISE, rates
        best = max(best, rate)


def test_a_tier_that_holds_every_expert_is_filled_once(cache: Path) -> None:
    with Engine.open(cap="1GiB", context=512, backend="native") as engine:
        experts = engine.plan.total_slots
        for seed in range(12):
            prompt = [(seed * 131 + i * 17) % 40000 + 10 for i in range(120)]
            list(engine.generate(prompt, max_tokens=8, ignore_eos=True))
        filled = engine.stats.read_nbytes
        assert filled <= experts * engine.plan.slot_nbytes
        for seed in range(12):
            prompt = [(seed * 131 + i * 17) % 40000 + 10 for i in range(120)]
            list(engine.generate(prompt, max_tokens=8, ignore_eos=True))
        assert engine.stats.read_nbytes == filled
