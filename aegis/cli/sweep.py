"""``aegis sweep``: the same prompt at several caps, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.machine import read_machine
from aegis.cli.options import (
    Options,
    cap_option,
    engine_options,
    json_option,
    model_option,
    prompt_options,
    quiet_option,
    verbose_option,
)
from aegis.cli.plan import find_model, plan_for
from aegis.cli.progress import DownloadBar
from aegis.cli.report import SCHEMA_VERSION, note, note_fallback, print_json
from aegis.cli.source import SAMPLE_PROMPT, Request, requested, told_from_prompt
from aegis.errors import AegisError, PlanError
from aegis.planner import format_size

if TYPE_CHECKING:
    from aegis.engine.sources import Source

MIB = 1 << 20
DEFAULT_ROWS = 6
_HUGE_CAP = 1 << 60
_HEADER = ("cap", "slots", "tok/s", "prompt tok/s", "hit rate", "MiB/token", "peak", "identical")
_WIDTHS = (10, 11, 8, 13, 9, 10, 10, 10)
_COPIED = (
    "generation_tokens",
    "prompt_tps",
    "generation_tps",
    "ttft_s",
    "hit_rate",
    "read_nbytes",
    "read_nbytes_per_token",
    "wait_s",
    "peak_nbytes",
)
_FORCED = ("nll", "logits_digest")
"""What a run has with --forced alone."""


@click.command("sweep", short_help="Run one prompt at several caps and compare.")
@click.argument("positionals", nargs=-1, metavar="[MODEL] [PROMPT]")
@model_option
@prompt_options
@cap_option("Caps, as LOW..HIGH[:STEP], or one. [default: six, chosen as said above; STEP 1GiB]")
@engine_options
@json_option
@quiet_option
@verbose_option
def command(positionals: tuple[str, ...], **options: Any) -> int:
    """Run PROMPT at several caps, one row per cap.

    Without --cap: six caps from the smallest that opens to the one that holds every expert. Each
    row runs in a process of its own, so its peak is its own. ``identical`` says that the tokens
    are those of the first row, and with --forced that every bit of the logits is.
    """
    request = requested(positionals, options)
    note_fallback(options)
    return sweep(request, options["cap"], options)


def sweep(request: Request, caps: tuple[int, ...] | None, options: Options) -> int:
    """Run every cap, or six that are chosen; prints the rows and returns the exit code."""
    as_json = options["as_json"]
    with told_from_prompt(request):
        source = find_model(request.model, options)
    caps = caps or _spread(source, options)
    if any(plan_for(source, cap, options).feasible for cap in caps):
        source = source.brought(0, DownloadBar(options["quiet"]))
    if not as_json:
        click.echo(_line(_HEADER))
    rows: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for row, result in _rows(request.prompt or SAMPLE_PROMPT, source, caps, options):
        rows.append(row)
        if result is not None:
            results.append(result)
        if not as_json:
            click.echo(_row_text(row))
    if not results:
        raise PlanError(f"no cap fits: the smallest that opens is {rows[0]['min_cap_nbytes']}B")
    identical = all(row.get("identical", True) for row in rows)
    if as_json:
        named = {name: results[0][name] for name in ("model", "backend", "prompt_tokens")}
        head = {"schema_version": SCHEMA_VERSION, **named}
        print_json({**head, "rows": rows, "identical": identical})
    if not identical:
        what = "logits" if options["forced"] else "tokens"
        raise AegisError(f"the {what} differ between caps; this is a bug, please report it")
    return 0


def _rows(
    prompt: str,
    source: Source,
    caps: tuple[int, ...],
    options: Options,
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """(row, the run's own object) per cap; None where the plan does not fit."""
    compared = "logits_digest" if options["forced"] else "token_ids"
    first: object = None
    for cap in caps:
        plan = plan_for(source, cap, options)
        row: dict[str, Any] = {
            "cap_nbytes": cap,
            "feasible": plan.feasible,
            "min_cap_nbytes": plan.min_cap_nbytes,
        }
        if not plan.feasible:
            smallest = f"the smallest is {plan.min_cap_nbytes}B"
            yield row | {"reason": smallest if plan.shortage_nbytes else plan.shortfall}, None
            continue
        if options["verbose"]:
            note(f"running at {format_size(cap)}")
        result = _run(source, prompt, cap, options)
        first = result[compared] if first is None else first
        row |= {"slots": plan.slots, "borrowed_slots": plan.borrowed_slots}
        row |= {name: result[name] for name in (*_COPIED, *_FORCED) if name in result}
        yield row | {"identical": result[compared] == first}, result


def _run(source: Source, prompt: str, cap: int, options: Options) -> dict[str, Any]:
    """One ``aegis run --json`` in a fresh process; its failure is ours."""
    arguments = ["run", "--json", "--quiet", "--exact", "--cap", f"{cap}B", *_passed_on(options)]
    arguments += ["--model", source.argument]
    # As bytes: text that was read as UTF-8 is no text of every locale.
    given = [text.encode("utf-8", "surrogateescape") for text in arguments]
    done = _ended([sys.executable, "-m", "aegis", *given], prompt.encode())
    if done.returncode:
        raise _failure(done, cap)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _ended(command: list[str | bytes], piped: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run a process to its end; it ends with us."""
    from aegis.child import deferred_signals

    with ExitStack() as stack:
        # A signal between the birth of the process and knowing it would leave it alone.
        with deferred_signals():
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, "PYTHONSAFEPATH": "1"},
                )
            except OSError as error:
                what = "no process can be started for a run"
                raise AegisError(f"{what}: {error.strerror}") from error
            stack.enter_context(process)
            stack.callback(process.kill)
        stdout, stderr = process.communicate(piped)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _failure(done: subprocess.CompletedProcess[bytes], cap: int) -> AegisError:
    said = done.stderr.decode(errors="replace").strip().removeprefix("error: ")
    ending = f"ended with {done.returncode}"
    if done.returncode < 0:
        ending = f"was ended by signal {-done.returncode} (out of memory, if it is 9)"
    error = AegisError(said or f"the run at {format_size(cap)} {ending}")
    error.exit_code = done.returncode if done.returncode > 0 else 1
    return error


_NOT_PASSED = {"model", "prompt", "prompt_file", "exact", "cap", "as_json", "quiet", "verbose"}


def _passed_on(options: Options) -> list[str]:
    """The options as arguments again, for the processes that run the rows."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name in _NOT_PASSED or value is None or value is False:
            continue
        if value is True:
            arguments.append(flag)
        else:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [f"{flag}={item}" for item in values]
    return arguments


def _spread(source: Source, options: Options) -> tuple[int, ...]:
    """Six caps from the smallest that opens to all experts resident, or to half of what is free."""
    largest = plan_for(source, _HUGE_CAP, options)
    low = largest.min_cap_nbytes
    high = max(low, min(largest.total_nbytes, read_machine().free_nbytes // 2))
    caps = [low + (high - low) * i // (DEFAULT_ROWS - 1) for i in range(DEFAULT_ROWS)]
    return tuple(sorted({-(-cap // MIB) * MIB for cap in caps}))


def _row_text(row: dict[str, Any]) -> str:
    cap = format_size(row["cap_nbytes"])
    if not row["feasible"]:
        return f"{cap:>{_WIDTHS[0]}}  does not fit: {row['reason']}"
    return _line(
        (
            cap,
            f"{row['slots']}+{row['borrowed_slots']}",
            f"{row['generation_tps']:.1f}",
            f"{row['prompt_tps']:.1f}",
            f"{100 * row['hit_rate']:.1f} %",
            f"{row['read_nbytes_per_token'] / MIB:.2f}",
            format_size(row["peak_nbytes"]),
            "yes" if row["identical"] else "NO",
        )
    )


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
