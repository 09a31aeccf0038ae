"""``aegis rm``: delete stores in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import json_option, quiet_option
from aegis.cli.report import SCHEMA_VERSION, note, print_json
from aegis.cli.source import on_terminal
from aegis.cli.streams import tell
from aegis.errors import AegisError, UsageError
from aegis.planner import format_size

if TYPE_CHECKING:
    from aegis.convert.stores import Place


@click.command("rm", short_help="Delete stores in the cache.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@quiet_option
def command(models: tuple[str, ...], **options: Any) -> int:
    """Delete every store of MODEL in the cache, and what is half-finished of it.

    MODEL is a name or a store that ``aegis list`` shows, ORG/NAME[@REVISION],
    synthetic:SHAPE[@SEED] or the folder of a model that was converted; or the place of a store
    elsewhere that was not finished. A store that a running
    process uses stays. The model itself, and what the hub's cache holds, are never touched.
    """
    from aegis.convert.stores import remove
    from aegis.engine.places import find_places

    doomed = {place.path: place for model in models for place in find_places(model)}
    if not _agreed(list(doomed.values()), options):
        raise AegisError("nothing was deleted")
    freed, failed = 0, None
    for place in doomed.values():
        try:
            remove(place)
        except AegisError as error:
            failed = failed or error
            continue
        freed += place.nbytes
        if not (options["quiet"] or options["as_json"]):
            click.echo(f"deleted {place.path}, {format_size(place.nbytes)}")
    if options["as_json"]:
        deleted = [str(path) for path in doomed if not path.exists()]
        print_json({"schema_version": SCHEMA_VERSION, "deleted": deleted, "freed_nbytes": freed})
    if not options["quiet"]:
        _note_downloads(list(doomed.values()))
    if failed is not None:
        raise failed
    return 0


def _agreed(doomed: list[Place], options: dict[str, Any]) -> bool:
    """Whether the user wants that: asked on a terminal, said by --yes elsewhere."""
    if options["yes"]:
        return True
    if not on_terminal():
        raise UsageError("aegis rm asks on a terminal only; add --yes to delete without asking")
    for place in doomed:
        note(f"{place.path}, {format_size(place.nbytes)}, {place.state}")
    total = format_size(sum(place.nbytes for place in doomed))
    tell(f"delete this, {total} in all? [y/N] ", "")
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _note_downloads(deleted: list[Place]) -> None:
    """What the hub's cache still holds of them; its own command deletes it."""
    from aegis.hub.downloads import downloads

    repos = {place.model for place in deleted if "repo" in place.source}
    for item in downloads(repos):
        if item.converted:
            note(
                f"the hub's cache still holds {format_size(item.nbytes)} of {item.repo}"
                f" (hf cache rm model/{item.repo})"
            )
