"""Rows of a bench as people and programs read them: md, csv, json and jsonl."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aegis.bench.rows import COMPUTE, PARTS, Row
from aegis.planner import format_size
from aegis.settings import MIB

Write = Callable[[str], None]
"""Takes one or several lines, without the last line's end."""
NAMES = ("md", "csv", "json", "jsonl")
_UNKNOWN = "-"


class Format(Protocol):
    """Takes rows as they come."""

    def row(self, row: Row) -> None:
        """One more."""

    def end(self, complete: bool) -> None:
        """No more; complete: that were all that there should be."""


def open_format(name: str, head: Mapping[str, Any], varied: Sequence[str], write: Write) -> Format:
    """head: what is the same in all rows, as in the json object. varied: names of what md shows
    only where rows differ in it."""
    if name == "md":
        return Markdown(head, varied, write)
    if name == "csv":
        return Csv(head, write)
    return Json(head, write) if name == "json" else JsonLines(head, write)


def _cell(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
    return _UNKNOWN if value is None else f"{value * scale:.{digits}f}"


def _compute_s(row: Row) -> float | None:
    parts = [row["split_s"][name] for name in COMPUTE]
    return None if None in parts else sum(parts)


def _of(reached: float | None, limit: float | None) -> str:
    """GB/s, and the limit where it is known."""
    if limit is None:
        return _cell(reached, 2, 1e-9)
    return f"{_cell(reached, 2, 1e-9)} of {limit * 1e-9:.2f}"


def _ram(row: Row) -> str:
    ram = row["ram"]
    if ram is None or ram["computing_nbytes_per_s"] is None:
        return _UNKNOWN
    return _of(ram["computing_nbytes_per_s"], ram["limit_nbytes_per_s"])


def _percent(name: str) -> Callable[[Row], str]:
    return lambda row: f"{100 * row[name]:.1f} %"


def _ms(name: str) -> Callable[[Row], str]:
    return lambda row: _cell(row["split_s"][name], 2, 1e3)


_Column = tuple[str, int, Callable[[Row], str]]
_CONFIGURED: list[_Column] = [
    ("cap", 9, lambda row: format_size(row["cap_nbytes"])),
    ("experts", 7, lambda row: str(row["experts"])),
    ("width", 5, lambda row: "auto" if row["guess_width"] is None else str(row["guess_width"])),
    ("threads", 7, lambda row: str(row["threads"])),
    ("io", 2, lambda row: str(row["io_threads"])),
]
_OPTIONAL = {"threads": "threads", "io": "io_threads"}
"""Columns that are left out unless rows differ in them."""
_MEASURED: list[_Column] = [
    ("slots", 9, lambda row: f"{row['slots']}+{row['borrowed_slots']}"),
    ("test", 6, lambda row: str(row["test"])),
    ("t/s", 14, lambda row: f"{row['tps']:.2f} ± {row['tps_sd']:.2f}"),
    ("compute ms", 10, lambda row: _cell(_compute_s(row), 2, 1e3)),
    ("router ms", 9, _ms("router")),
    ("queue ms", 8, _ms("queue")),
    ("device ms", 9, _ms("device")),
    ("wait ms", 8, _ms("wait")),
    ("other ms", 8, _ms("other")),
    ("hits", 7, _percent("hit_rate")),
    ("late", 6, _percent("late_rate")),
    ("wasted", 6, _percent("wasted_rate")),
    ("MiB/token", 9, lambda row: f"{row['read_nbytes_per_token'] / MIB:.2f}"),
    (
        "disk GB/s",
        12,
        lambda row: _of(row["disk"]["nbytes_per_s"], row["disk"]["limit_nbytes_per_s"]),
    ),
    ("busy", 4, lambda row: _cell(row["disk"]["busy"], 2)),
    ("RAM GB/s", 14, _ram),
    ("peak", 9, lambda row: format_size(row["peak_nbytes"])),
]
_CLOCKED = {True: ("queue ms", "device ms"), False: ("compute ms", "router ms")}
"""Columns of what only clocks of a backend that queues its calls can tell, or only those around
blocks that do not queue."""
_QUEUE = ("mlx",)
"""Backends that do."""


class Markdown:
    """A table as llama-bench's, a line at a time, and below it what repetitions differ in."""

    def __init__(self, head: Mapping[str, Any], varied: Sequence[str], write: Write) -> None:
        self._model, self._write = str(head["model"]), write
        hidden = {name for name, key in _OPTIONAL.items() if key not in varied}
        self._configured = [column for column in _CONFIGURED if column[0] not in hidden]
        unknown = _CLOCKED[head["backend"] not in _QUEUE]
        self._measured = [column for column in _MEASURED if column[0] not in unknown]
        self._begun = False
        self._below: list[str] = []

    def row(self, row: Row) -> None:
        """One line."""
        if not self._begun:
            self._begin()
        cells = [self._model, *(show(row) for _, _, show in self._configured)]
        if row["feasible"]:
            cells += [show(row) for _, _, show in self._measured]
            self._note(row)
        else:
            words = dict.fromkeys((name for name, _, _ in self._measured), _UNKNOWN)
            cells += (words | {"t/s": "does not fit"}).values()
        self._line(cells)

    def _begin(self) -> None:
        self._begun = True
        columns = [*self._configured, *self._measured]
        self._line(["model", *(name for name, _, _ in columns)])
        # Numbers are to the right, as in the lines themselves.
        rules = [f"{'-' * (width + 1)}:" for _, width, _ in columns]
        self._write("|".join(["", "-" * (len(self._model) + 2), *rules, ""]))

    def _line(self, cells: Sequence[str]) -> None:
        widths = [width for _, width, _ in (*self._configured, *self._measured)]
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths, strict=True)]
        self._write(f"| {cells[0]:<{max(len(self._model), 5)}} | {' | '.join(rest)} |")

    def _note(self, row: Row) -> None:
        """What changes from one repetition to the next: slots keep what others have read."""
        hits = ", ".join(f"{100 * one['hit_rate']:.1f} %" for one in row["repetitions"])
        told = f"hits {hits}"
        if row["ttft_s"] is not None:
            took = ", ".join(f"{seconds:.2f} s" for seconds in row["ttft_s"])
            told = f"first token after {took}; {told}"
        if row["predicted"] is not None:
            tps, error = row["predicted"]["tps"], row["predicted"]["error"]
            told = f"{told}; predicted {tps:.2f} t/s, {100 * error:+.1f} %"
        where = ", ".join(f"{name} {show(row)}" for name, _, show in self._configured)
        self._below.append(f"{where}, {row['test']}: {told}")

    def end(self, complete: bool) -> None:
        """What belongs to single repetitions."""
        if self._below:
            self._write("\n".join(["", *(f"- {line}" for line in self._below)]))


class Csv:
    """One line per row, with the names of the json object, in which a dot is one object deeper."""

    def __init__(self, head: Mapping[str, Any], write: Write) -> None:
        self._head, self._write = head, write
        self._names: list[str] = []

    def row(self, row: Row) -> None:
        """One line; before the first one, the names."""
        flat = _flat({**self._head, **row})
        if not self._names:
            self._names = list(_flat({**self._head, **_FULL}))
            self._write(_csv_line(self._names))
        self._write(_csv_line([flat.get(name) for name in self._names]))

    def end(self, complete: bool) -> None:
        """Nothing follows."""


_FULL: Row = {
    **dict.fromkeys(("cap_nbytes", "experts", "guess_width", "threads", "io_threads")),
    **dict.fromkeys(
        ("feasible", "min_cap_nbytes", "reason", "description", "slots", "borrowed_slots")
    ),
    **dict.fromkeys(("record_nbytes", "peak_nbytes", "given_back_nbytes", "test", "tokens")),
    **dict.fromkeys(("tps", "tps_sd", "s_per_token")),
    "split_s": dict.fromkeys(PARTS),
    **dict.fromkeys(("hit_rate", "late_rate", "wasted_rate", "read_nbytes_per_token")),
    "token_s": dict.fromkeys(("median", "p90", "most")),
    "disk": dict.fromkeys(
        ("nbytes_per_s", "busy", "busy_nbytes_per_s", "limit_nbytes_per_s", "records_per_read")
    ),
    "ram": dict.fromkeys(
        ("nbytes_per_token", "nbytes_per_s", "computing_nbytes_per_s", "limit_nbytes_per_s")
    ),
    "predicted": dict.fromkeys(
        (
            *("tps", "s_per_token", "compute_s", "wait_s", "hit_rate", "late_rate", "wasted_rate"),
            *("read_nbytes_per_token", "disk_busy", "error"),
        )
    ),
}
"""Everything that a line of csv has, whatever the first row lacks. Lists are in json alone."""


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            flat |= _flat(inner, f"{prefix}{name}.")
        elif not isinstance(inner, list):
            flat[prefix + name] = inner
    return flat


def _csv_line(cells: Sequence[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(cells)
    return line.getvalue()


class Json:
    """One object at the end, with the rows that there are."""

    def __init__(self, head: Mapping[str, Any], write: Write) -> None:
        self._head, self._write = head, write
        self._rows: list[Row] = []

    def row(self, row: Row) -> None:
        """Kept for later."""
        self._rows.append(row)

    def end(self, complete: bool) -> None:
        """The object, if there is anything in it."""
        if self._rows:
            self._write(json.dumps({**self._head, "complete": complete, "rows": self._rows}))


class JsonLines:
    """One object per row, each with what is the same in all."""

    def __init__(self, head: Mapping[str, Any], write: Write) -> None:
        self._head, self._write = head, write

    def row(self, row: Row) -> None:
        """One line."""
        self._write(json.dumps({**self._head, **row}))

    def end(self, complete: bool) -> None:
        """Nothing follows."""
