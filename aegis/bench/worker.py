"""A process of its own for each configuration, and for what the machine gives beside it.

``python -m aegis.bench.worker REQUEST``, a JSON object; prints lines of JSON: how far it is, as
``{"done": TOKENS}``, and last the result, or the sentence with which it failed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.child import die_with_parent
from aegis.errors import AegisError

if TYPE_CHECKING:
    from aegis.bench.measure import Repetition
    from aegis.engine.engine import Engine
    from aegis.engine.timing import Timing

_TOLD_S = 0.1


class _Ticker:
    """Tells how many tokens are done, ten times a second at most."""

    def __init__(self) -> None:
        self._done, self._told = 0, time.monotonic()

    def __call__(self, tokens: int) -> None:
        self._done += tokens
        now = time.monotonic()
        if now - self._told > _TOLD_S:
            self._told = now
            say({"done": self._done})


def say(value: Mapping[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def run(request: Mapping[str, Any], tick: Callable[[int], None]) -> dict[str, Any]:
    """Open the model as asked for and measure it."""
    from aegis.bench.measure import measure
    from aegis.engine.engine import Engine
    from aegis.engine.memory import peak_nbytes

    prompt, tokens = request["prompt_tokens"], request["tokens"]
    with (
        Engine.open(request["model"], cap=request["cap_nbytes"], **request["settings"]) as engine,
        engine.timing() as timing,
    ):
        found = measure(
            engine, timing, prompt, tokens, request["repetitions"], request["seed"], tick
        )
        return {
            "model": engine.name,
            "backend": engine.backend,
            "description": engine.describe(),
            "threads": timing.threads,
            "plan": engine.plan.to_json(),
            "record_nbytes": timing.record_nbytes,
            "repetitions": [_repetition(one, timing.has_blocks) for one in found],
            "touched_nbytes": _touched(engine, timing, found, prompt + tokens / 2),
            "given_back_nbytes": engine.stats.given_back.most_nbytes,
            "peak_nbytes": peak_nbytes(),
        }


def _repetition(one: Repetition, has_blocks: bool) -> dict[str, Any]:
    windows = {"prompt": one.prompt, "decoded": one.decoded}
    return {
        name: None if window is None else window.to_json(has_blocks)
        for name, window in windows.items()
    }


def _touched(
    engine: Engine, timing: Timing, found: list[Repetition], position: float
) -> float | None:
    """Bytes that computing a token reads of memory, in the mean over all that were decoded."""
    decoded = [one.decoded for one in found if one.decoded is not None]
    if not decoded:
        return None
    choices = sum(window.counted.choices for window in decoded)
    return timing.touched_nbytes(position, choices / sum(window.tokens for window in decoded))


def limits(request: Mapping[str, Any]) -> dict[str, Any]:
    """What disk and memory give; null where the backend's memory is not the machine's."""
    from aegis.bench.disk import Reads, disk_limits
    from aegis.bench.ram import ram_limit

    seconds, threads = request["seconds"], request["threads"]
    kinds = [Reads(run, request["io_threads"]) for run in request["runs"]]
    disk = disk_limits(Path(request["store"]), request["experts"], kinds, seconds)
    ram = ram_limit(threads, request["ram_nbytes"], seconds) if threads else None
    return {"disk": dict(zip(map(str, request["runs"]), disk, strict=True)), "ram": ram}


def answered(
    respond: Callable[[Mapping[str, Any]], dict[str, Any]], request: Mapping[str, Any]
) -> dict[str, Any]:
    """The result, or why there is none."""
    from aegis.tiers.errors import TiersError

    try:
        return respond(request)
    except AegisError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except (TiersError, OSError, ValueError, RuntimeError, MemoryError) as error:
        return {"error": str(error) or type(error).__name__, "exit_code": 1}


def serve(respond: Callable[[Mapping[str, Any]], dict[str, Any]]) -> int:
    """Answer the request of the command line; the exit code."""
    die_with_parent()
    try:
        say(answered(respond, json.loads(sys.argv[1])))
    except KeyboardInterrupt:
        return 130
    return 0


def _respond(request: Mapping[str, Any]) -> dict[str, Any]:
    return limits(request) if "runs" in request else run(request, _Ticker())


if __name__ == "__main__":
    sys.exit(serve(_respond))
