"""``aegis trace replay``: what slots, a policy, guesses and a disk would have made of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import Options, all_of, read_size
from aegis.planner import format_size, parse_size

if TYPE_CHECKING:
    from aegis.tiers.simulate import Tiering, Times
    from aegis.tiers.trace import RoutingTrace
    from aegis.tiers.virtual_disk import Disk

MIB = 1 << 20
_BEFORE_EXPERTS = 0.5
"""What attention and routers take of the time of ``--compute``; experts take the rest."""
_HEADER = ("slots", "hits", "unguessed", "Belady", "read/token", "wasted")
_TIMED = ("tok/s", "waiting", "disk busy", "bound", "Belady's")
_WIDTH = 11


def _read_rate(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """``2GiB/s`` as bytes."""
    if value is None:
        return None
    try:
        return parse_size(value.removesuffix("/s"))
    except ValueError as error:
        raise click.BadParameter(f"{error}, and /s", ctx, param) from None


replay_options = all_of(
    [
        click.option(
            "--disk",
            callback=_read_rate,
            metavar="RATE",
            help="replay: how fast the disk is, as 2GiB/s. [default: reads take no time]",
        ),
        click.option(
            "--latency",
            type=click.FloatRange(min=0),
            metavar="MS",
            help="replay: what every read takes besides, in milliseconds. [default: 0.1]",
        ),
        click.option(
            "--record",
            callback=read_size,
            metavar="SIZE",
            help="replay: the bytes of an expert, as 1.7MiB; with --disk.",
        ),
        click.option(
            "--compute",
            type=click.FloatRange(min=0),
            metavar="MS",
            help="replay: what a token takes with every expert in a slot, in milliseconds; with "
            "--disk. [default: 0]",
        ),
        click.option(
            "--again",
            is_flag=True,
            help="replay: the trace goes through twice, and the second time is counted; without it,"
            " the first quarter of the tokens is not.",
        ),
    ]
)
_OWN = ("disk", "latency", "record", "compute")
_USUAL_LATENCY_MS = 0.1


def refuse_timing(options: Options) -> None:
    """Options of ``replay`` are refused elsewhere."""
    for name in _OWN:
        if options[name] is not None:
            raise click.UsageError(f"--{name} goes with 'aegis trace replay FILE' alone")
    if options["again"]:
        raise click.UsageError("--again goes with 'aegis trace replay FILE' alone")


def refuse_incomplete(options: Options) -> None:
    """A disk needs to know what it reads; without one nothing takes time."""
    if options["disk"] is None and any(options[name] is not None for name in _OWN):
        raise click.UsageError("--latency, --record and --compute say nothing without --disk")
    if options["disk"] is not None and options["record"] is None:
        raise click.UsageError("--disk needs the bytes of an expert too: give --record")


def replayed(
    trace: RoutingTrace, slots: tuple[int, ...], skip: int, options: Options
) -> dict[str, Any]:
    """What ``aegis trace replay --json`` prints."""
    from aegis.tiers.simulate import Tiering

    if options["again"]:
        trace, skip = trace.twice(), trace.shape[0]
    policy, guess, width = (options[name] for name in ("policy", "guess", "guess_width"))
    rows = [_row(trace, Tiering(number, policy, guess, width), skip, options) for number in slots]
    tokens, layers, per_token = trace.shape
    return {
        "model": trace.model,
        "tokens": tokens,
        "counted_tokens": tokens - skip,
        "layers": layers,
        "experts": trace.num_experts,
        "experts_per_token": per_token,
        "policy": policy,
        "guess": guess,
        "guess_width": width,
        "disk_nbytes_per_s": options["disk"],
        "latency_ms": None if options["disk"] is None else _latency_ms(options),
        "io_threads": options["io_threads"],
        "record_nbytes": options["record"],
        "compute_ms": options["compute"],
        "rows": rows,
    }


def _latency_ms(options: Options) -> float:
    found = options["latency"]
    return _USUAL_LATENCY_MS if found is None else float(found)


def _disk(options: Options) -> Disk:
    from aegis.tiers.virtual_disk import Disk

    if options["disk"] is None:
        return Disk()
    return Disk(options["disk"], _latency_ms(options) / 1e3, options["io_threads"])


def _times(trace: RoutingTrace, compute_ms: float | None) -> Times:
    from aegis.tiers.simulate import Times

    _, layers, per_token = trace.shape
    layer_s = (compute_ms or 0.0) / 1e3 / layers
    return Times(
        layer_s=_BEFORE_EXPERTS * layer_s, expert_s=(1 - _BEFORE_EXPERTS) * layer_s / per_token
    )


def _row(trace: RoutingTrace, tiering: Tiering, skip: int, options: Options) -> dict[str, Any]:
    from aegis.tiers.belady import belady
    from aegis.tiers.replay import replay
    from aegis.tiers.simulate import least_seconds, simulate

    disk, times = _disk(options), _times(trace, options["compute"])
    record = options["record"] or 1
    found = simulate(trace, tiering, disk=disk, times=times, record_nbytes=record, skip=skip)
    unguessed = replay(trace, tiering.slots, policy=tiering.policy, skip=skip)
    best = belady(trace, tiering.slots, skip=skip)
    counters, tokens = found.counters, found.tokens
    row = {
        "slots": tiering.slots,
        "hit_share": counters.hit_rate,
        "late_share": counters.late / counters.choices,
        "unguessed_hit_share": unguessed.hit_rate,
        "belady_hit_share": best.hit_rate,
        "reads_per_token": found.read_nbytes / found.record_nbytes / tokens,
        "wasted_per_token": counters.wasted / tokens,
    }
    if options["disk"] is None:
        return row
    token_s = times.token_s(*trace.shape[1:])
    bounds = [
        least_seconds(count.misses, tokens, disk, found.record_nbytes, token_s)
        for count in (unguessed, best)
    ]
    bound, least = (tokens / seconds if seconds else None for seconds in bounds)
    return row | {
        "read_nbytes_per_token": found.read_nbytes / tokens,
        "tokens_per_s": found.tokens_per_s,
        "wait_share": found.wait_s / found.seconds if found.seconds else 0.0,
        "disk_share": found.disk_share,
        "bound_tokens_per_s": bound,
        "belady_bound_tokens_per_s": least,
    }


def replayed_lines(found: dict[str, Any]) -> list[str]:
    """The same as a table."""
    timed = found["disk_nbytes_per_s"] is not None
    what = f"{found['policy']}, guesses {found['guess']}"
    if found["guess"] != "none":
        width = found["guess_width"]
        what += ", as wide as pays" if width is None else f", {width} wide"
    head = f"{found['model']}: {found['counted_tokens']} of {found['tokens']} tokens, {what}"
    if timed:
        rate = format_size(found["disk_nbytes_per_s"])
        record = format_size(found["record_nbytes"])
        head += f", {record} an expert from a disk of {rate}/s"
    return [
        head,
        _line(_HEADER + (_TIMED if timed else ())),
        *(_line(_cells(row, timed)) for row in found["rows"]),
    ]


def _cells(row: dict[str, Any], timed: bool) -> tuple[str, ...]:
    shares = ("hit_share", "unguessed_hit_share", "belady_hit_share")
    cells = (f"{row['slots']}", *(f"{row[name]:.1%}" for name in shares))
    if not timed:
        return (*cells, f"{row['reads_per_token']:.1f}", f"{row['wasted_per_token']:.1f}")
    read = f"{row['read_nbytes_per_token'] / MIB:.1f} MiB"
    speeds = ("tokens_per_s", "bound_tokens_per_s", "belady_bound_tokens_per_s")
    here, bound, least = ("-" if row[name] is None else f"{row[name]:.2f}" for name in speeds)
    busy = tuple(f"{row[name]:.0%}" for name in ("wait_share", "disk_share"))
    return (*cells, read, f"{row['wasted_per_token']:.1f}", here, *busy, bound, least)


def _line(cells: tuple[str, ...]) -> str:
    return "".join(cell.rjust(_WIDTH) for cell in cells)
