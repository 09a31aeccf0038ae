"""``aegis verify``: read a whole store and compare every checksum."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import json_option, quiet_option
from aegis.cli.plan import model_folder
from aegis.cli.progress import ProgressBar
from aegis.cli.report import SCHEMA_VERSION, print_json
from aegis.cli.source import resolve_model
from aegis.errors import StoreError
from aegis.planner import format_size
from aegis.synthetic.names import is_synthetic

if TYPE_CHECKING:
    from aegis.checkpoint.store import Store
    from aegis.convert.verify import VerifyReport
    from aegis.kernels.base import Layout


@click.command("verify", short_help="Compare every checksum of a store.")
@click.argument("source", required=False, metavar="[STORE]")
@json_option
@quiet_option
def command(source: str | None, **options: Any) -> int:
    """Read all of STORE and compare every checksum; exit code 1 where something is damaged.

    STORE may also be a model that was converted before: its store in the cache is read.
    """
    from aegis.convert.verify import verify

    store = _open(model_folder(resolve_model(source)))
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


def _open(folder: Path) -> Store:
    from aegis.checkpoint.source import Checkpoint
    from aegis.checkpoint.store import Store, is_store
    from aegis.convert.cache import cached_store_path

    if is_synthetic(folder):
        from aegis.synthetic.recipe import cached_path, recipe

        kinds: tuple[Layout, ...] = ("il16", "row")
        written = [path for kind in kinds if is_store(path := cached_path(recipe(folder), kind))]
        if not written:
            raise StoreError(f"{folder} has not been written; run aegis convert {folder} first")
        return Store.open(written[0], check_sizes=False)
    if is_store(folder):
        return Store.open(folder, check_sizes=False)
    checkpoint = Checkpoint.open(folder)
    stores = (cached_store_path(checkpoint, "il16"), cached_store_path(checkpoint, "row"))
    for candidate in stores:
        if is_store(candidate):
            return Store.open(candidate, check_sizes=False)
    if any(map(_superseded, stores)):
        raise StoreError(
            f"{folder} has changed since it was converted; run aegis convert to convert it again"
        )
    raise StoreError(f"{folder} has not been converted; run aegis convert first")


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
