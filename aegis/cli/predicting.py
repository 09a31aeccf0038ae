"""The predictions of one ``aegis predict``: plan, probe, replay and print."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import Options
from aegis.cli.plan import find_model, plan_for
from aegis.cli.predict import DEFAULT_DEPTH
from aegis.cli.predictor import Predictor
from aegis.cli.report import SCHEMA_VERSION, print_json
from aegis.engine.planning import backend_layout, choose_backend
from aegis.errors import PlanError, UsageError
from aegis.models import family
from aegis.planner import format_size
from aegis.settings import DEFAULT_CONTEXT, MIB

if TYPE_CHECKING:
    from aegis.engine.sources import Name, Source
    from aegis.planner import MemoryPlan

Row = dict[str, Any]
_PREDICTED = (
    *("tps", "s_per_token", "compute_s", "wait_s", "hit_rate", "late_rate", "wasted_rate"),
    *("read_nbytes_per_token", "disk_busy"),
)
_PLANNED = (
    *("cap_nbytes", "experts", "feasible", "min_cap_nbytes", "slots", "borrowed_slots"),
    "slot_nbytes",
)


def predict_all(model: Name, caps: Sequence[int], options: Options) -> int:
    """Predict and print every cap and kind of experts; returns the exit code.

    Raises:
        PlanError: no cap fits; the rows were printed.
        UsageError: the trace is of another model, or the depth is beyond the context.
        AegisError: the probe failed.
    """
    backend = choose_backend(options["backend"])
    source = find_model(model, {**options, "experts": options["experts"][0]})
    depth = _depth(source, backend, options)
    predictor = Predictor(backend, depth, options["quiet"], options["trace"])
    routing, rows, probes = predictor.routing(source), list[Row](), dict[str, Any]()
    for experts in options["experts"]:
        chosen = {**options, "experts": experts}
        first = experts == options["experts"][0]
        of_kind = source if first else find_model(model, {**chosen, "quiet": True})
        plans = [plan_for(of_kind, cap, chosen) for cap in caps]
        rows += [_row(plan, of_kind, predictor, chosen) for plan in plans]
        fitting = [plan for plan in plans if plan.feasible]
        if fitting:
            probes[experts] = predictor.probe(of_kind, fitting[0], chosen).to_json()
    head = {
        "schema_version": SCHEMA_VERSION,
        "model": source.name,
        "backend": backend,
        "depth": depth,
        "routing": routing.origin,
    }
    _print({**head, "probes": probes, "rows": rows}, options)
    if not probes:
        smallest = min(row["min_cap_nbytes"] for row in rows)
        raise PlanError(f"no cap fits: the smallest that opens is {smallest}B")
    return 0


def _depth(source: Source, backend: str, options: Options) -> int:
    """As asked for, inside of the context."""
    layout = source.layout(backend_layout(backend))
    most = family(layout.model_type).shape(layout.config).max_position_embeddings
    context, depth = options["ctx_size"] or min(DEFAULT_CONTEXT, most), options["depth"]
    if depth is None:
        return max(1, min(DEFAULT_DEPTH, context // 2))
    if depth >= context:
        raise UsageError(
            f"--depth {depth} leaves no room in the context of {context} tokens; give a smaller"
            " one, or a larger --ctx-size"
        )
    return int(depth)


def _row(plan: MemoryPlan, source: Source, predictor: Predictor, options: Options) -> Row:
    row: Row = {
        "cap_nbytes": plan.cap_nbytes,
        "experts": options["experts"],
        "feasible": plan.feasible,
        "min_cap_nbytes": plan.min_cap_nbytes,
    }
    if not plan.feasible:
        return row | dict.fromkeys((*_PLANNED[len(row) :], *_PREDICTED))
    row |= {"slots": plan.slots, "borrowed_slots": plan.borrowed_slots}
    return row | {"slot_nbytes": plan.slot_nbytes} | predictor.predicted(source, plan, options)


def _print(found: Row, options: Options) -> None:
    if options["as_json"] or options["output"] == "json":
        print_json(found)
    elif options["output"] == "csv":
        for line in _csv_lines(found):
            click.echo(line)
    else:
        for line in _md_lines(found):
            click.echo(line)


def _csv_lines(found: Row) -> list[str]:
    head = {name: found[name] for name in ("model", "backend", "depth", "routing")}
    names = [*head, *_PLANNED, *_PREDICTED]
    lines = []
    for cells in (names, *([{**head, **row}[name] for name in names] for row in found["rows"])):
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(cells)
        lines.append(line.getvalue())
    return lines


_COLUMNS = (
    *(("cap", 9), ("experts", 7), ("slots", 10), ("tok/s", 8), ("ms/token", 8)),
    *(("computing", 9), ("waiting", 8), ("hits", 7), ("late", 6), ("MiB/token", 9), ("busy", 5)),
)


def _md_lines(found: Row) -> list[str]:
    widths = [width for _, width in _COLUMNS]

    def line(cells: Sequence[str]) -> str:
        fitted = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join(fitted)} |"

    rule = "|".join(["", *(f"{'-' * (width + 1)}:" for width in widths), ""])
    return [
        line([name for name, _ in _COLUMNS]),
        rule,
        *(line(_cells(row)) for row in found["rows"]),
        "",
        f"- {found['model']}, {found['backend']}, {found['depth']} tokens in the context",
        f"- routing: {found['routing']}",
        *(_probe_line(experts, probe) for experts, probe in found["probes"].items()),
    ]


def _cells(row: Row) -> list[str]:
    start = [format_size(row["cap_nbytes"]), row["experts"]]
    if not row["feasible"]:
        short = ["-", "no plan"] + ["-"] * (len(_COLUMNS) - 4)
        return start + short
    return [
        *start,
        f"{row['slots']}+{row['borrowed_slots']}",
        f"{row['tps']:.2f}",
        f"{1e3 * row['s_per_token']:.1f}",
        f"{1e3 * row['compute_s']:.1f}",
        f"{1e3 * row['wait_s']:.1f}",
        f"{100 * row['hit_rate']:.1f} %",
        f"{100 * row['late_rate']:.1f} %",
        f"{row['read_nbytes_per_token'] / MIB:.2f}",
        f"{row['disk_busy']:.2f}",
    ]


def _probe_line(experts: str, probe: Row) -> str:
    disk, kernels = probe["disk"], probe["kernels"]
    files = "the store's own files" if disk["own_files"] else "files of the probe"
    return (
        f"- probe ({experts}): {disk['nbytes_per_s'] * 1e-9:.2f} GB/s and"
        f" {1e3 * disk['latency_s']:.2f} ms a read of {files},"
        f" {100 * kernels['disk_left']:.0f} % of it beside computing; {probe['layers']} layers of"
        f" {probe['experts']} experts ran"
    )
