"""Configurations, and the processes that measure them."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from aegis.child import worker
from aegis.errors import AegisError
from aegis.planner import MemoryPlan, format_size
from aegis.settings import MIB, ExpertBits
from aegis.tiers.scatter import RUN_NBYTES

WORKER = "aegis.bench.worker"
LOOK_S = 0.25
"""How long one kind of reads is measured at a time."""
_RAM_NBYTES = 512 * MIB
_LEAST_RAM_NBYTES = 16 * MIB


@dataclass(frozen=True)
class Configuration:
    """What differs between the rows of a bench."""

    cap_nbytes: int
    experts: ExpertBits
    guess_width: int | None
    threads: int | None
    io_threads: int

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of Settings, the cap excepted, that it stands for."""
        names = ("experts", "guess_width", "threads", "io_threads")
        return {name: getattr(self, name) for name in names}


def configurations(
    caps: Sequence[int],
    experts: Sequence[ExpertBits],
    guess_widths: Sequence[int | None],
    threads: Sequence[int | None],
    io_threads: Sequence[int],
) -> list[Configuration]:
    """All there are, each once; the cap changes last of all, so that curves come one by one."""
    found = [
        Configuration(cap, bits, width, computing, reading)
        for bits, width, computing, reading, cap in product(
            experts, guess_widths, threads, io_threads, caps
        )
    ]
    return list(dict.fromkeys(found))


def ask(
    request: Mapping[str, Any],
    what: str,
    tick: Callable[[int], None] = lambda tokens: None,
    module: str | None = None,
) -> dict[str, Any]:
    """What a worker answers; ``tick`` is called with the number of tokens that it has done.

    module: of the worker; None: a bench's.

    Raises:
        AegisError: what went wrong there, with the exit code that it has.
    """
    with tempfile.TemporaryFile() as said:
        with worker(module or WORKER, [json.dumps(request)], stderr=said.fileno()) as process:
            found = _followed(process, tick)
            code = process.wait()
        said.seek(0)
        trouble = said.read().decode(errors="replace").strip()
    if "error" in found:
        error = AegisError(found["error"])
        error.exit_code = found["exit_code"]
        raise error
    if code or not found:
        ending = f"ended with {code}"
        if code < 0:
            ending = f"was ended by signal {-code} (out of memory, if it is 9)"
        raise AegisError(f"{what} {ending}" + (f": {trouble.splitlines()[-1]}" if trouble else ""))
    return found


def _followed(process: subprocess.Popen[bytes], tick: Callable[[int], None]) -> dict[str, Any]:
    """The last line that is no news of the way there."""
    found: dict[str, Any] = {}
    for line in process.stdout or ():
        if not line.startswith(b"{"):
            continue  # Some library has something to say.
        value = json.loads(line)
        if value.keys() == {"done"}:
            tick(value["done"])
        else:
            found = value
    return found


def run_records(plan: MemoryPlan) -> int:
    """How many records prefill reads at once at most, as ``aegis.tiers.staging`` has it."""
    return max(1, min(RUN_NBYTES // plan.slot_nbytes, max(1, plan.staging_slots) // 2))


@dataclass(frozen=True)
class Limits:
    """What the machine gives: bytes per second by records per read, and of memory."""

    disk: Mapping[int, float]
    ram: float | None

    def better(self, other: Limits) -> Limits:
        """The larger of each: what was there at one time was not impossible at another."""
        disk = {run: max(speed, other.disk[run]) for run, speed in self.disk.items()}
        both = [ram for ram in (self.ram, other.ram) if ram is not None]
        return Limits(disk, max(both, default=None))


def limits_request(
    store: Path, config: Configuration, plan: MemoryPlan, threads: int, free_nbytes: int
) -> dict[str, Any]:
    """threads: 0 where the memory that computes is not the machine's."""
    room = min(_RAM_NBYTES, config.cap_nbytes // 2, free_nbytes // 4)
    return {
        "store": str(store),
        "experts": config.experts,
        "io_threads": config.io_threads,
        "runs": sorted({1, run_records(plan)}),
        "threads": threads,
        "seconds": LOOK_S,
        "ram_nbytes": max(room, _LEAST_RAM_NBYTES),
    }


def limits_of(answered: Mapping[str, Any]) -> Limits:
    """From what a worker answered."""
    return Limits({int(run): speed for run, speed in answered["disk"].items()}, answered["ram"])


def described(config: Configuration) -> str:
    """For people."""
    return f"the run at {format_size(config.cap_nbytes)}"


def measured(
    request: Mapping[str, Any],
    config: Configuration,
    probe: Mapping[str, Any] | None,
    tick: Callable[[int], None],
) -> tuple[dict[str, Any], Limits | None]:
    """One configuration, between two looks at what the machine gives (none without ``probe``)."""
    looks: list[Limits] = []

    def look() -> None:
        if probe is not None:
            looks.append(limits_of(ask(probe, "measuring disk and memory")))

    look()
    found = ask(request, described(config), tick)
    look()
    return found, looks[0].better(looks[1]) if looks else None
