"""The goldens on every backend and instruction set there is, each run in a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aegis.checkpoint.store import Store
from aegis.child import worker
from aegis.convert.cache import cache_folder, cached_store_path
from aegis.convert.identity import embedded_path
from aegis.doctor.compare import RunResult, check
from aegis.doctor.goldens import GOLDENS, Golden, load_goldens
from aegis.doctor.processor import native_isas
from aegis.doctor.shelter import temporary_folder
from aegis.engine.limits import memory_limits
from aegis.engine.numbers import device_of
from aegis.engine.planning import (
    backend_layout,
    choose_backend,
    request_plan,
    resolve,
    settings_for,
)
from aegis.engine.sources import find_source
from aegis.errors import AegisError, StoreError
from aegis.kernels import registry
from aegis.kernels.base import Layout
from aegis.planner import format_size

CONTEXT = 128
SHORT_STEPS = 4
"""What kernels without vector instructions compute of one prompt, at a second a token."""
PASS_STEPS = 8
"""What the reference backend computes of a prompt, in one pass."""
STORE_NBYTES = 128 << 20
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Run:
    """What one process computes."""

    backend: str
    isa: str | None
    cap_nbytes: int
    prompts: int
    steps: int
    decode: bool
    """Token by token, as in a run; else all steps of a prompt in one pass."""
    activations: str = "f32"


@dataclass(frozen=True)
class Skipped:
    """Something that could have been run, and why it was not."""

    backend: str
    reason: str


@dataclass
class Selftest:
    """Everything that was run."""

    results: list[RunResult] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    error: str | None = None
    """Why nothing could be run at all."""

    @property
    def ok(self) -> bool:
        """Whether something was run, and nothing was wrong."""
        return self.error is None and bool(self.results) and not self.failures

    @property
    def failures(self) -> list[str]:
        """Every sentence about something wrong."""
        return [failure for result in self.results for failure in result.failures]


Compute = Callable[[Run, Path], Mapping[str, Any]]
"""Run, store -> what aegis.doctor.worker prints."""


def selftest(
    backend: str = "auto",
    on_result: Callable[[RunResult], None] = lambda _: None,
    compute: Compute | None = None,
    goldens: Path = GOLDENS,
) -> Selftest:
    """Run everything; ``auto``: all backends that can run here.

    Raises:
        BackendError: the one that was asked for cannot run here.
        AegisError: there is no place for the embedded model's store.
    """
    names = [name for name, reason in registry.available() if reason is None]
    wanted = names if backend == "auto" else [choose_backend(backend)]
    cases = load_goldens(goldens)
    done = Selftest()
    for layout in dict.fromkeys(backend_layout(name) for name in wanted):
        with _store(layout) as store:
            for name in wanted:
                if backend_layout(name) == layout:
                    runs, skipped = plan_runs(name, store, len(cases), len(cases[0].greedy_ids))
                    done.skipped += skipped
                    ask = compute or _subprocess(goldens)
                    _run_all(done, runs, store, ask, cases, on_result)
    return done


def _run_all(
    done: Selftest,
    runs: Sequence[Run],
    store: Path,
    compute: Compute,
    goldens: Sequence[Golden],
    on_result: Callable[[RunResult], None],
) -> None:
    firsts: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        begin = time.perf_counter()
        answer = compute(run, store)
        seconds = time.perf_counter() - begin
        # numpy's sums differ between numbers of rows: only its distance to the goldens counts.
        exact = run.backend != "reference"
        result = check(
            answer,
            goldens[: run.prompts],
            run.steps,
            firsts.get(run.activations) if exact else None,
            rounded=run.activations != "f32",
        )
        result = replace(
            result,
            backend=run.backend,
            isa=run.activations if run.backend == "mlx" else run.isa,
            cap_nbytes=run.cap_nbytes,
            seconds=seconds,
        )
        if exact and result.peak_nbytes > run.cap_nbytes:
            over = f"the process took {result.peak_nbytes}B, above its cap of {run.cap_nbytes}B"
            result.failures.append(over)
        if "error" not in answer:
            firsts.setdefault(run.activations, answer)
        done.results.append(result)
        on_result(result)


def plan_runs(
    backend: str, store: Path, prompts: int, steps: int
) -> tuple[list[Run], list[Skipped]]:
    """What to run on a backend with the memory that is free now."""
    low, high, there = _caps(backend, store)
    free = memory_limits().free
    room = high if free is None else min(high, free + there)
    if low > room:
        needed, found = format_size(low - there), format_size(room - there)
        reason = f"it needs {needed} of memory, but {found} are free"
        return [], [Skipped(backend, reason)]
    if backend == "mlx":
        return _mlx_runs(low, room, prompts, steps), []
    if backend != "native":
        return [Run(backend, None, room, prompts, min(steps, PASS_STEPS), False)], []
    runs = [_native_run(isa, low, prompts, steps) for isa in native_isas()[1]]
    skipped = []
    if room > low:
        runs.insert(1, replace(runs[0], cap_nbytes=room))
    else:
        skipped.append(Skipped(backend, "there is no memory for a second cap"))
    return runs, skipped


def _native_run(isa: str, cap_nbytes: int, prompts: int, steps: int) -> Run:
    if isa == "scalar":
        return Run("native", isa, cap_nbytes, 1, min(steps, SHORT_STEPS), False)
    return Run("native", isa, cap_nbytes, prompts, steps, True)


def _mlx_runs(low: int, room: int, prompts: int, steps: int) -> list[Run]:
    """In float32 at two caps, and in the numbers that a GPU computes in unless told otherwise."""
    if device_of("mlx") == "cpu":
        prompts, steps = 1, min(steps, SHORT_STEPS)
    exact = Run("mlx", None, room, prompts, steps, True)
    runs = [exact, replace(exact, cap_nbytes=low)]
    return runs if device_of("mlx") == "cpu" else [*runs, replace(exact, activations="auto")]


def _caps(backend: str, store: Path) -> tuple[int, int, int]:
    """The smallest cap that opens a store, the one that holds all its experts, what is there.

    What is there already is a store that lies in memory, which is a part of its plan.
    """
    source = find_source(store, backend_layout(backend))
    plans = []
    for cap_nbytes in (1, 1 << 60):
        options = {"backend": backend, "context": CONTEXT, "activations": "f32"}
        settings = settings_for(cap_nbytes, options)
        plans.append(request_plan(resolve(source, settings, backend)))
    smallest = plans[0].min_cap_nbytes
    everything = max(smallest, plans[1].total_nbytes)
    return smallest, everything, dict(plans[1].items).get("store", 0)


@contextlib.contextmanager
def _store(layout: Layout) -> Iterator[Path]:
    """The embedded model's store: the one in the cache, else one made for the time being."""
    cached = cached_store_path(embedded_path(), layout)
    try:
        Store.open(cached)
    except StoreError:
        with temporary_folder(cache_folder(), STORE_NBYTES) as folder:
            made = folder / "store"
            answer = _ask({"convert": str(made), "layout": layout}, {})
            if "error" in answer:
                raise AegisError(
                    f"converting the embedded model failed: {answer['error']}"
                ) from None
            yield made
    else:
        yield cached


def _subprocess(goldens: Path) -> Compute:
    def compute(run: Run, store: Path) -> Mapping[str, Any]:
        request = {**vars(run), "store": str(store), "context": CONTEXT, "goldens": str(goldens)}
        return _ask(request, {} if run.isa is None else {"AEGIS_ISA": run.isa})

    return compute


def _ask(request: Mapping[str, Any], env: Mapping[str, str]) -> Mapping[str, Any]:
    """Have a worker process answer; whatever way it dies becomes a sentence."""
    with worker("aegis.doctor.worker", [json.dumps(request)], env) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return {"error": f"it did not end within {TIMEOUT_SECONDS:.0f} s"}
    if process.returncode:
        return {"error": _how_it_died(process.returncode, stderr.decode(errors="replace"))}
    answer: Mapping[str, Any] = json.loads(stdout)
    return answer


def _how_it_died(code: int, stderr: str) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
    last = stderr.strip().splitlines()[-1:] or [f"its process ended with {code}"]
    return last[0]
