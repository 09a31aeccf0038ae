"""``aegis list``: the stores in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import json_option, quiet_option
from aegis.cli.report import SCHEMA_VERSION, note, print_json
from aegis.planner import format_size

if TYPE_CHECKING:
    from aegis.convert.stores import Place
    from aegis.kernels.base import Format

_HEADER = ("model", "family", "experts", "layout", "size", "state", "store")


@click.command("list", short_help="List the stores in the cache.")
@json_option
@quiet_option
def command(**options: Any) -> int:
    """List the stores in the cache, and conversions that are not finished.

    What the hub's own cache holds besides, though no store needs it, is said too.
    """
    from aegis.checkpoint.hub_cache import hub_cache
    from aegis.convert.cache import cache_folder
    from aegis.convert.stores import places
    from aegis.hub.downloads import downloads

    found = places()
    fetched = downloads(place.model for place in found if place.store is not None)
    if options["as_json"]:
        head = {"schema_version": SCHEMA_VERSION, "cache": str(cache_folder())}
        stores = [place_json(place) for place in found]
        hub = {"hub_cache": str(hub_cache()), "downloads": [vars(item) for item in fetched]}
        print_json({**head, "stores": stores, **hub})
        return 0
    for line in _lines([_HEADER, *map(_row, found)] if found else []):
        click.echo(line)
    if not options["quiet"]:
        total = format_size(sum(place.nbytes for place in found))
        note(f"{len(found)} in {cache_folder()}, {total} in all")
        for item in fetched:
            if (sentence := item.describe()) is not None:
                note(sentence)
    return 0


def place_json(place: Place) -> dict[str, Any]:
    """What is at a place in the cache, for ``--json``."""
    layout = None if place.store is None else place.store.layout
    return {
        "model": place.model,
        "store": str(place.path),
        "state": place.state,
        "damage": place.damage,
        "family": layout and layout.model_type,
        "experts": [] if place.store is None else kinds_of(place),
        "layout": layout and layout.layout,
        "nbytes": place.nbytes,
        "unfinished_nbytes": place.unfinished_nbytes,
        "in_use": place.in_use,
        "repo": place.source.get("repo"),
        "revisions": place.source.get("revisions", []),
        "commit": place.source.get("commit"),
    }


def kinds_of(place: Place) -> list[str]:
    """The expert files that a store has, by the width of their codes."""
    store = place.store
    if store is None:
        return []
    kinds = [words_of(store.layout.experts.segments["gate_proj"].format)]
    return [*kinds, "3bit"] if store.has_3bit else kinds


def words_of(fmt: Format) -> str:
    """How numbers are stored, in a word."""
    if fmt.kind == "dense":
        return fmt.dtype
    return f"{fmt.bits}bit" if fmt.kind == "affine" else str(fmt.kind)


def _row(place: Place) -> tuple[str, ...]:
    layout = None if place.store is None else place.store.layout
    return (
        place.model,
        "-" if layout is None else layout.model_type,
        " ".join(kinds_of(place)) or "-",
        "-" if layout is None else layout.layout,
        format_size(place.nbytes),
        place.state,
        place.path.name,
    )


def _lines(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as what is in them; sizes to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    size = _HEADER.index("size")
    for row in rows:
        cells = [
            cell.rjust(width) if i == size else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
