"""What people read on stderr: the plan, the figures of an answer, the ledger."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from aegis.cli.streams import tell
from aegis.errors import CapExceededError
from aegis.planner import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from aegis.planner import LedgerRow, MemoryPlan

SCHEMA_VERSION = 1


def note(text: str) -> None:
    """One line on stderr."""
    tell(text)


def notes(lines: Iterable[str]) -> None:
    """Several lines on stderr."""
    for line in lines:
        note(line)


def note_fallback(options: Mapping[str, Any]) -> None:
    """Say why it will be slow, where ``auto`` finds no compiled kernels."""
    if options["quiet"] or options["backend"] != "auto":
        return
    from aegis.kernels import registry

    if registry.resolve() == "reference":
        note(f"{registry.reason('native')}; numpy computes instead, slowly")


def note_plan(plan: MemoryPlan) -> None:
    """The plan as a table."""
    from aegis.planner.explain import explain_plan

    notes([*explain_plan(plan), ""])


def note_older_stores(store: Path) -> None:
    """Stores in the cache that a new one of the same name has probably replaced."""
    from aegis.convert.cache import older_stores
    from aegis.convert.stores import disk_nbytes

    for path in older_stores(store):
        size = format_size(disk_nbytes(path))
        note(f"{path} ({size}) is an older store of that name; aegis rm removes it")


def note_ledger(rows: Sequence[LedgerRow]) -> None:
    """Planned against measured."""
    from aegis.planner.explain import explain_ledger

    notes(["", *explain_ledger(rows)])


def print_json(value: Mapping[str, Any]) -> None:
    """The one object of ``--json`` on stdout. JSON is UTF-8: where stdout has another encoding, or
    a path is no text, it is written in ASCII, so that nothing is lost."""
    import json

    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8" if _is_utf8(sys.stdout) else "ascii")
    except UnicodeEncodeError:
        text = json.dumps(value)
    click.echo(text)


def _is_utf8(stream: TextIO | None) -> bool:
    encoding = getattr(stream, "encoding", None)
    return encoding is not None and codecs.lookup(encoding).name == "utf-8"


def figures(result: Mapping[str, Any], cached_tokens: int = 0) -> str:
    """The line behind an answer, from the object of ``--json``."""
    cached = f" ({cached_tokens} cached)" if cached_tokens else ""
    cap = result["plan"]["cap_nbytes"]
    parts = [
        f"{result['prompt_tokens']} prompt tokens{cached}, {result['prompt_tps']:.1f} tok/s",
        f"{result['generation_tokens']} generated, {result['generation_tps']:.1f} tok/s",
        f"first token after {result['ttft_s']:.2f} s",
        f"hit rate {100 * result['hit_rate']:.1f} %",
        f"{format_size(round(result['read_nbytes_per_token']))} read per token",
        f"waited {result['wait_s']:.2f} s",
        f"peak {format_size(result['peak_nbytes'])} of {format_size(cap)}",
    ]
    if given := result["given_back"]["most_nbytes"]:
        parts.append(f"{format_size(given)} of slots given back to stay inside")
    return " · ".join(parts)


def check_cap(result: Mapping[str, Any]) -> None:
    """Raise CapExceededError where the process took more than its cap."""
    peak, cap = result["peak_nbytes"], result["plan"]["cap_nbytes"]
    if peak > cap:
        raise CapExceededError(
            f"the process took {peak}B, above the cap of {cap}B; this is a bug, please report it"
        )
