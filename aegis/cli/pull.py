"""``aegis pull``: a model of the Hugging Face hub is downloaded and converted, ready to run."""

from __future__ import annotations

from typing import Any

import click

from aegis.cli.convert import conversion_options, converted, show, usual_layout, wanted_quantization
from aegis.errors import UsageError


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
    from aegis.convert.cache import hub_store
    from aegis.engine.sources import StoreSource, of_checkpoint
    from aegis.hub.remote import describe, note_revision

    name = HubName.parse(model if revision is None else f"{model}@{revision}")
    if name is None:
        raise UsageError(
            f"{model} is not the name of a model on the hub; give ORG/NAME, and a branch, a tag or"
            " a commit with --revision"
        )
    found, layout, choice = describe(name), usual_layout(options), wanted_quantization(options)
    store = hub_store(HubName(name.repo, found.commit), layout, choice)
    source = of_checkpoint(found, choice) if store is None else StoreSource(store)
    made = converted(source, None, options, named=True)
    if store is not None:
        note_revision(found)
    show(made, options)
    return 0
