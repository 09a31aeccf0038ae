"""Memory taken behind the engine's back, with the kernel counting: what a container is charged for
falls, nothing is killed, and the tokens are those of an undisturbed run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import cgroup
import pytest
from small_model import needs_native

from aegis import plan

MIB = 1 << 20
CONTEXT = 512
ABOVE = 48 * MIB
"""Above the smallest cap: what slots can give back, and what the plan does not use."""
TOKENS = 120
KEPT_MIB = max(0, (os.cpu_count() or 1) - 2) // 4
"""Each processor keeps up to 64 pages of a group's charge for itself: with more of them than two,
so much less is left for those who eat."""

pytestmark = needs_native

TOUCH = """
import mmap, os, sys, threading, time
def touch(nbytes):
    taken = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, nbytes, 4096):
        taken[offset] = 1
    return taken
"""

# Eats a MiB per token, in a thread or in another process, up to its fill.
GENERATE = (
    TOUCH
    + """
import json, subprocess
from aegis import Engine
from aegis.engine.limits import memory_limits
who, fill, cap, context, tokens, prelude = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]

def thread():
    for _ in range(fill):
        go.acquire()
        held.append(touch(1 << 20))
        done.release()

def process():
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", prelude + '''
held = []
for line in sys.stdin:
    held.append(touch(1 << 20))
    print(flush=True)
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    children.append(child)
    for _ in range(fill):
        go.acquire()
        child.stdin.write("\\n")
        child.stdin.flush()
        child.stdout.readline()
        done.release()

held, children, out = [], [], []
go, done = threading.Semaphore(0), threading.Semaphore(0)
threading.Thread(target={"thread": thread, "process": process}[who], daemon=True).start()
usage = lambda: (memory_limits().container_usage or 0) >> 10
with Engine.open(cap=cap, context=context) as engine:
    print(end=" ", flush=True)
    before, charge = None, []
    try:
        for token in engine.generate(range(100, 164), max_tokens=tokens, ignore_eos=True):
            out.append(token)
            before = before or usage()
            if len(out) > 10 and len(charge) < fill:
                go.release()
                done.acquire()
                charge.append(usage())
        error, code = "", 0
    except Exception as e:
        error, code = str(e), getattr(e, "exit_code", -1)
    given = engine.stats.as_dict()["given_back"]
    print(json.dumps({"tokens": out, "before": before, "charge": charge, "end": usage(),
                      "given": given, "error": error, "code": code}), flush=True)
    for child in children:
        child.kill()
        child.wait()
    os._exit(code)
"""
)


@dataclass(frozen=True)
class Eaten:
    """A generation during which somebody ate memory."""

    result: cgroup.Result
    report: dict[str, Any]


@pytest.fixture(scope="module")
def cap() -> int:
    """Room for most experts."""
    return plan(cap=1, context=CONTEXT).min_cap_nbytes + ABOVE


@pytest.fixture(scope="module")
def python(
    cold_python: cgroup.ColdPython, tmp_path_factory: pytest.TempPathFactory
) -> cgroup.ColdPython:
    """A cold interpreter that has the model converted."""
    env = {**cold_python.env, "AEGIS_CACHE": str(tmp_path_factory.mktemp("cache"))}
    ready = cgroup.ColdPython(cold_python.command, env)
    first = [*ready.command, "-P", "-m", "aegis", "run", "-n", "1", "--cap", "1GiB", "-q", "Hi"]
    result = cgroup.run(first, None, env=env, cold=False)
    assert result.rc == 0, result.stderr
    return ready


@pytest.fixture(scope="module")
def eat(python: cgroup.ColdPython, cap: int) -> Callable[[str, int], Eaten]:
    """Generate in a group limited to the cap while ``who`` eats so many MiB."""

    def run(who: str, fill: int) -> Eaten:
        arguments = [who, *map(str, (fill, cap, CONTEXT, TOKENS)), TOUCH]
        command = [*python.command, "-P", "-c", GENERATE, *arguments]
        result = cgroup.run(command, cap, env=python.env)
        assert result.oom_kills == 0, result.stderr
        return Eaten(result, json.loads(result.stdout))

    return run


@pytest.fixture(scope="module")
def undisturbed(eat: Callable[[str, int], Eaten]) -> list[int]:
    """The tokens when nobody eats."""
    calm = eat("thread", 0)
    assert calm.report["code"] == calm.report["given"]["times"] == 0
    tokens: list[int] = calm.report["tokens"]
    assert len(tokens) == TOKENS
    return tokens


@pytest.mark.parametrize(("who", "fill"), [("thread", 50), ("process", 46)])
def test_the_charge_falls_and_the_tokens_stay(
    eat: Callable[[str, int], Eaten], undisturbed: list[int], cap: int, who: str, fill: int
) -> None:
    fill -= KEPT_MIB
    eaten = eat(who, fill)
    report = eaten.report
    assert report["code"] == 0, report["error"]
    assert report["tokens"] == undisturbed
    # At most what there was no room for, and 7 MiB: 1 below the limit is never used, 4 are kept as
    # room, and 2 are a range of the arena.
    missing = report["before"] * 1024 + fill * MIB - cap
    assert 4 * MIB < report["given"]["nbytes"] < missing + 7 * MIB
    # What was eaten is there, but what was given back is gone from the charge.
    grown = report["end"] - report["before"]
    assert grown < fill * 1024 - report["given"]["nbytes"] // 1024 + 3 * 1024
    assert any(later < earlier for earlier, later in pairwise(report["charge"]))
    assert eaten.result.faults_after_first_output <= 50


@pytest.mark.parametrize(
    ("who", "sentence"),
    [("thread", "above the cap of"), ("process", "this container's memory is used up")],
)
def test_past_the_cap_it_stops_with_a_sentence_before_it_is_killed(
    eat: Callable[[str, int], Eaten], undisturbed: list[int], who: str, sentence: str
) -> None:
    eaten = eat(who, 400)
    report = eaten.report
    assert (eaten.result.rc, report["code"]) == (4, 4)
    assert sentence in report["error"]
    assert "nothing left to give back" in report["error"]
    assert report["tokens"] == undisturbed[: len(report["tokens"])]


# The command itself, with a thread beside it that eats from the first token on.
COMMAND = (
    TOUCH
    + """
def eat():
    while "aegis.engine.generate" not in sys.modules:
        time.sleep(0.01)
    while True:
        held.append(touch(1 << 20))
        time.sleep(0.02)
held = []
threading.Thread(target=eat, daemon=True).start()
from aegis.cli import main
sys.exit(main())
"""
)


@pytest.mark.parametrize("limited", [True, False])
def test_the_command_ends_with_exit_code_4_and_one_sentence(
    python: cgroup.ColdPython, cap: int, tmp_path: Path, limited: bool
) -> None:
    options = ["-c", str(CONTEXT), "--cap", f"{cap}B", "-n", "500", "-q", "--ignore-eos"]
    script = tmp_path / "aegis"
    script.write_text(COMMAND)
    command = [*python.command, "-P", str(script), "run", *options, "Once upon a time"]
    result = cgroup.run(command, cap if limited else None, env=python.env)
    assert (result.rc, result.oom_kills) == (4, 0), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "nothing left to give back" in result.stderr
    assert "Traceback" not in result.stderr
