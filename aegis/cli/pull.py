"""``aegis pull``: a model of the Hugging Face hub is downloaded and converted, ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.convert import conversion_options, converted, show, usual_layout, wanted_quantization
from aegis.errors import StoreError, UsageError

if TYPE_CHECKING:
    from aegis.checkpoint.config import QuantSpec
    from aegis.checkpoint.remote import RemoteCheckpoint
    from aegis.kernels.base import Layout


@click.command("pull", short_help="Download a model of the Hugging Face hub and convert it.")
@click.argument("model", metavar="ORG/NAME")
@click.option("--revision", metavar="REVISION", help="A branch, a tag or a commit. [default: main]")
@conversion_options
def command(model: str, revision: str | None, **options: Any) -> int:
    """Download ORG/NAME and convert it into the cache, where ``aegis run ORG/NAME`` finds it.

    The hub is asked for what is newest; what is here already is neither downloaded nor converted
    again, and a download that was ended goes on. Token, mirror, cache and offline mode are those of
    huggingface_hub (HF_TOKEN or hf auth login, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE). Prints the
    store's folder.
    """
    from aegis.checkpoint.hub_cache import HubName
    from aegis.engine.sources import CheckpointSource, StoreSource
    from aegis.hub.remote import describe, note_revision

    name = HubName.parse(model if revision is None else f"{model}@{revision}")
    if name is None:
        raise UsageError(
            f"{model} is not the name of a model on the hub; give ORG/NAME, and a branch, a tag or"
            " a commit with --revision"
        )
    wanted = wanted_quantization(options)
    found = describe(name)
    store = _there(found, wanted, usual_layout(options))
    source = CheckpointSource(found) if store is None else StoreSource(store)
    made = converted(source, None, wanted, options, named=True)
    if store is not None:
        note_revision(found)
    show(made, options)
    return 0


def _there(found: RemoteCheckpoint, wanted: QuantSpec | None, layout: Layout) -> Path | None:
    """A store of the same commit, which may have been made otherwise where nothing is asked for."""
    from aegis.checkpoint.hub_cache import HubName
    from aegis.checkpoint.store import Store
    from aegis.convert.cache import cached_store_path, hub_store

    if wanted is None:
        return hub_store(HubName(found.name.repo, found.commit), layout)
    try:
        return Store.open(cached_store_path(found, layout, wanted)).path
    except StoreError:
        return None
