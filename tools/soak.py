"""Run one process for a long time in a memory cgroup of exactly its cap, and compare.

    python tools/soak.py --minutes 60

Models are opened one after the other with changing contexts, policies and threads, each at the
smallest cap that opens or a little above; the group's limit follows. Prompts change in length and
kind (and with them the experts), turns continue, likelihoods are computed, and now and then memory
is taken behind the engine's back. A sample of the answers is repeated by fresh processes without a
limit. It fails where something is killed or refused, a token differs, or what the process holds
between two models grows. Needs root, for the group.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

import cgroup  # noqa: E402 - it lies among the tests

MIB = 1 << 20
GROWTH_NBYTES = 3 * MIB
"""What the process may hold more at the end than at the beginning, between two models."""
TOKENIZER_NBYTES = 32 << 10
"""And for each model: what the tokenizers' library keeps of every one that is opened."""
CONTEXTS = (96, 256, 512, 1024, 2048)
SEGMENT_S = 12.0
"""One model stays open so long."""
CHECK_S = 10.0
"""One answer in so many seconds is repeated by a fresh process."""
TELL_S = 60.0
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
_FRESH = """
import json, sys
from aegis import Engine
case = json.load(sys.stdin)
with Engine.open(cap="2GiB", context=case["context"]) as engine:
    print(json.dumps(list(engine.generate(case["ids"], **case["sampling"]))))
"""


@dataclass
class Soak:
    """What has been seen so far."""

    python: cgroup.ColdPython
    rounds: int = 0
    tokens: int = 0
    checked: int = 0
    """Answers that a fresh process gave as well."""
    different: list[dict[str, Any]] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    """Cap less what cannot be dropped, after every round."""
    idle: list[int] = field(default_factory=list)
    """What the group cannot drop while no model is open."""
    charge: list[int] = field(default_factory=list)
    """What the group is charged for then, with whatever page cache there is."""
    most_given: int = 0
    given_times: int = 0
    faults: int = 0
    rc: int | None = None
    oom_kills: int = 0
    stderr: str = ""

    def note(self, line: dict[str, Any]) -> None:
        """Take in one line of the worker."""
        self.faults = line["faults"]
        if line["kind"] == "closed":
            self.idle.append(line["anon"])
            self.charge.append(line["charge"])
            return
        self.rounds += 1
        self.tokens += len(line["tokens"])
        self.room.append(line["cap"] - line["anon"])
        self.most_given = max(self.most_given, line["given"]["most_nbytes"])
        self.given_times += line["given"]["times"] > 0

    def check(self, line: dict[str, Any]) -> None:
        """Repeat a round in a fresh process."""
        done = subprocess.run(
            [*self.python.command, "-P", "-c", _FRESH],
            input=json.dumps(line),
            env=self.python.env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or json.loads(done.stdout) != line["tokens"]:
            self.different.append(line | {"fresh": done.stdout, "stderr": done.stderr})
        self.checked += 1

    @property
    def growth_nbytes(self) -> int:
        """Idle memory of the last third against the first, whose start warms things up."""
        idle = self.idle[1:]
        third = max(1, len(idle) // 3)
        return int(fmean(idle[-third:]) - fmean(idle[:third])) if idle else 0

    def problems(self) -> list[str]:
        """What went wrong, a sentence each."""
        found = []
        if self.rc or self.oom_kills:
            ended = f"exit code {self.rc}, {self.oom_kills} killed for memory"
            found.append(f"the process ended early: {ended}: {self.stderr[-2000:]}")
        if self.different:
            found.append(f"{len(self.different)} answers differ, the first: {self.different[0]}")
        if self.growth_nbytes > GROWTH_NBYTES + len(self.idle) * TOKENIZER_NBYTES:
            found.append(f"the process grew by {self.growth_nbytes / MIB:.1f} MiB: {self.idle}")
        if not self.checked:
            found.append("no answer was compared")
        return found

    def summary(self) -> str:
        """One line of figures."""
        idle = f"{self.idle[-1] / MIB:.1f}" if self.idle else "-"
        ends = (self.charge[0], self.charge[-1]) if self.charge else ()
        charge = " .. ".join(f"{nbytes / MIB:.1f}" for nbytes in ends)
        return (
            f"{len(self.idle)} models, {self.rounds} prompts, {self.tokens} tokens; "
            f"{self.checked} answers repeated, {len(self.different)} different; "
            f"between models {idle} MiB, grown by {self.growth_nbytes / MIB:+.2f}, "
            f"charged {charge} MiB; "
            f"least room under the cap {min(self.room, default=0) / MIB:.1f} MiB; "
            f"gave back in {self.given_times} prompts, at most {self.most_given / MIB:.1f} MiB; "
            f"{self.faults} major faults; {self.oom_kills} killed"
        )


def soak(
    python: cgroup.ColdPython,
    seconds: float,
    seed: int,
    contexts: Sequence[int] = CONTEXTS,
    segment_s: float = SEGMENT_S,
) -> Soak:
    """Run the worker so long; prints a line of figures every minute."""
    state = Soak(python)
    cases: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    checker = threading.Thread(target=lambda: [state.check(c) for c in iter(cases.get, None)])
    checker.start()
    with cgroup.memory_cgroup(None) as group, tempfile.TemporaryFile("w+") as errors:
        worker = [*python.command, "-P", str(ROOT / "tools/soak_worker.py"), str(group.path)]
        given = [seed, seconds, segment_s, *contexts]
        command = ["/bin/sh", "-c", _ENTER, str(group.path), *worker, *map(str, given)]
        with subprocess.Popen(
            command, env=python.env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            try:
                _follow(process.stdout, state, cases)
            finally:
                process.kill()
        state.oom_kills = group.oom_kills()
        errors.seek(0)
        state.rc, state.stderr = process.returncode, errors.read()
    cases.put(None)
    checker.join()
    return state


def _follow(
    lines: Iterable[str],
    state: Soak,
    cases: queue.SimpleQueue[dict[str, Any] | None],
) -> None:
    begun = time.monotonic()
    told = checked = begun - CHECK_S
    for text in lines:
        line = json.loads(text)
        state.note(line)
        now = time.monotonic()
        if line["kind"] == "round" and now >= checked + CHECK_S and cases.empty():
            cases.put(line)
            checked = now
        if now >= told + TELL_S:
            print(f"{(now - begun) / 60:6.1f} min: {state.summary()}", flush=True)
            told = now


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aegis-soak-") as folder:
        python = cgroup.cold_python(Path(folder))
        cache = os.environ.get("AEGIS_CACHE", str(Path(folder) / "cache"))
        python = cgroup.ColdPython(python.command, {**python.env, "AEGIS_CACHE": cache})
        state = soak(python, options.minutes * 60, options.seed)
    problems = state.problems()
    print(state.summary(), *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
