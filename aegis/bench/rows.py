"""From what a process measured to the rows of a bench: one for the prompts, one for the tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from aegis.bench.runs import Configuration, Limits, run_records
from aegis.planner import MemoryPlan

Row = dict[str, Any]
PARTS = ("attention", "experts", "head", "router", "wait", "queue", "device", "other")
COMPUTE = ("attention", "experts", "head")
_COUNTS = ("hits", "late", "misses", "guesses", "useful", "wasted", "cancelled", "read_nbytes")


def head_of(config: Configuration, plan: MemoryPlan, threads: int) -> Row:
    """What a row says of its configuration, whether it fits or not."""
    return {
        "cap_nbytes": config.cap_nbytes,
        "experts": config.experts,
        "guess_width": config.guess_width,
        "threads": threads,
        "io_threads": config.io_threads,
        "feasible": plan.feasible,
        "min_cap_nbytes": plan.min_cap_nbytes,
    }


def refused(config: Configuration, plan: MemoryPlan, threads: int) -> Row:
    """The row of a configuration that does not fit."""
    smallest = f"the smallest is {plan.min_cap_nbytes}B"
    reason = smallest if plan.shortage_nbytes else plan.shortfall
    return head_of(config, plan, threads) | {"reason": reason}


def rows_of(
    config: Configuration, plan: MemoryPlan, found: Mapping[str, Any], limits: Limits | None
) -> list[Row]:
    """The rows of a configuration that was measured."""
    head = head_of(config, plan, found["threads"]) | {
        "description": found["description"],
        "slots": plan.slots,
        "borrowed_slots": plan.borrowed_slots,
        "record_nbytes": found["record_nbytes"],
        "peak_nbytes": found["peak_nbytes"],
        "given_back_nbytes": found["given_back_nbytes"],
    }
    rows = []
    for kind, test in (("prompt", "pp"), ("decoded", "tg")):
        windows = [one[kind] for one in found["repetitions"] if one[kind] is not None]
        if not windows:
            continue
        is_decoded = kind == "decoded"
        run = 1 if is_decoded else run_records(plan)
        row = {**head, "test": f"{test}{windows[0]['tokens']}", **_figures(windows)}
        row["ttft_s"] = None if is_decoded else [window["seconds"] for window in windows]
        row["token_s"] = _spread(windows) if is_decoded else None
        row["disk"] = _disk(windows, run, limits)
        touched = found["touched_nbytes"] if is_decoded else None
        row["ram"] = _ram(row["split_s"], touched, windows, limits)
        row["predicted"] = None
        row["repetitions"] = [_repetition(window) for window in windows]
        rows.append(row)
    return rows


def _sum(windows: Sequence[Mapping[str, Any]], name: str) -> Any:
    return sum(window[name] for window in windows)


def _figures(windows: Sequence[Mapping[str, Any]]) -> Row:
    """Speed, where the time went, and what the slots and guesses were worth."""
    speeds = [window["tokens"] / window["seconds"] for window in windows]
    tokens, choices = _sum(windows, "tokens"), _sum(windows, "choices")
    guesses = _sum(windows, "guesses")
    return {
        "tokens": windows[0]["tokens"],
        "tps": statistics.fmean(speeds),
        "tps_sd": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "s_per_token": _sum(windows, "seconds") / tokens,
        "split_s": {name: _part(windows, name, tokens) for name in PARTS},
        "hit_rate": _sum(windows, "hits") / choices if choices else 0.0,
        "late_rate": _sum(windows, "late") / choices if choices else 0.0,
        "wasted_rate": _sum(windows, "wasted") / guesses if guesses else 0.0,
        "read_nbytes_per_token": _sum(windows, "read_nbytes") / tokens,
    }


def _part(windows: Sequence[Mapping[str, Any]], name: str, tokens: int) -> float | None:
    """Seconds per token; None where no clock can tell."""
    seconds = [window["split_s"][name] for window in windows]
    return None if None in seconds else sum(seconds) / tokens


def _spread(windows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How long single tokens took."""
    seconds = sorted(token for window in windows for token in window["token_s"])
    return {
        "median": statistics.median(seconds),
        "p90": seconds[(len(seconds) - 1) * 9 // 10],
        "most": seconds[-1],
    }


def _disk(windows: Sequence[Mapping[str, Any]], run: int, limits: Limits | None) -> Row:
    """What was read in a second of wall time, and while at least one read was under way."""
    nbytes, seconds, busy = (_sum(windows, name) for name in ("read_nbytes", "seconds", "busy_s"))
    return {
        "nbytes_per_s": nbytes / seconds,
        "busy": busy / seconds,
        "busy_nbytes_per_s": nbytes / busy if busy else None,
        "limit_nbytes_per_s": None if limits is None else limits.disk[run],
        "records_per_read": run,
    }


def _ram(
    split: Mapping[str, float | None],
    touched: float | None,
    windows: Sequence[Mapping[str, Any]],
    limits: Limits | None,
) -> Row | None:
    """What was read of memory in a second of computing, and of wall time; None for prompts, whose
    weights serve many tokens."""
    if touched is None:
        return None
    parts = [split[name] for name in (*COMPUTE, "router")]
    computing = sum(part for part in parts if part is not None)
    return {
        "nbytes_per_token": touched,
        "nbytes_per_s": touched * _sum(windows, "tokens") / _sum(windows, "seconds"),
        "computing_nbytes_per_s": touched / computing if computing else None,
        "limit_nbytes_per_s": None if limits is None else limits.ram,
    }


def _repetition(window: Mapping[str, Any]) -> Row:
    counts = {name: window[name] for name in _COUNTS}
    return {
        "seconds": window["seconds"],
        "tps": window["tokens"] / window["seconds"],
        "split_s": window["split_s"],
        "busy_s": window["busy_s"],
        "hit_rate": window["hit_rate"],
        **counts,
    }
