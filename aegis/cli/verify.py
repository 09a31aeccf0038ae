"""``aegis verify``: read a whole store and compare every checksum."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import json_option, quiet_option
from aegis.cli.progress import ProgressBar
from aegis.cli.report import SCHEMA_VERSION, print_json
from aegis.cli.source import resolve_model
from aegis.errors import StoreError
from aegis.planner import format_size

if TYPE_CHECKING:
    from aegis.checkpoint.store import Store
    from aegis.convert.verify import VerifyReport
    from aegis.engine.sources import Name


@click.command("verify", short_help="Compare every checksum of a store.")
@click.argument("source", required=False, metavar="[STORE]")
@json_option
@quiet_option
def command(source: str | None, **options: Any) -> int:
    """Read all of STORE and compare every checksum; exit code 1 where something is damaged.

    STORE may also be a model that was converted before: its store in the cache is read.
    """
    from aegis.checkpoint.hold import Hold
    from aegis.convert.verify import verify

    store = _open(resolve_model(source))
    with Hold(store.path):
        report = verify(store, ProgressBar("verifying", options["quiet"]))
    if options["as_json"]:
        print_json(_json(store, report))
    else:
        for damage in report.damaged:
            click.echo(f"damaged: {damage.what} in {damage.file}")
    if not report.ok:
        first = report.damaged[0]
        count = f"{len(report.damaged)} of {report.checked} parts"
        raise StoreError(
            f"{count} of {store.path} are damaged, first {first.what} in {first.file.name}; "
            "convert the model again"
        )
    if not options["as_json"]:
        size = format_size(report.checked_nbytes)
        click.echo(f"{store.path}: {report.checked} parts, {size}, all as written")
    return 0


def _open(model: Name) -> Store:
    """The store in a folder, or the one of a model in the cache; nothing is made."""
    from aegis.checkpoint.store import Store, is_store
    from aegis.engine.places import stores_of
    from aegis.engine.sources import meaning
    from aegis.synthetic.recipe import Recipe

    named = meaning(model)
    stores = stores_of(named)
    for candidate in stores:
        if is_store(candidate):
            return Store.open(candidate, check_sizes=False)
    if isinstance(named, Recipe):
        raise StoreError(f"{named.name} has not been written; run aegis convert {named.name} first")
    if any(map(_superseded, stores)):
        raise StoreError(
            f"{named} has changed since it was converted; run aegis convert to convert it again"
        )
    raise StoreError(f"{named} has not been converted; run aegis convert first")


def _superseded(store: Path) -> bool:
    """Whether the cache has a store of the same name and layout from another state of the model."""
    name, _, _ = store.name.rpartition("-")
    return any(store.parent.glob(f"{glob.escape(name)}-*/store.json"))


def _json(store: Store, report: VerifyReport) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "store": str(store.path),
        "ok": report.ok,
        "checked": report.checked,
        "checked_nbytes": report.checked_nbytes,
        "damaged": [{"file": str(d.file), "what": d.what} for d in report.damaged],
    }
