"""``aegis convert``: a checkpoint becomes a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import (
    Options,
    all_of,
    bits_options,
    bits_settings,
    json_option,
    quiet_option,
    usual_backend,
)
from aegis.cli.plan import announce
from aegis.cli.progress import DownloadBar, ProgressBar
from aegis.cli.report import SCHEMA_VERSION, note_older_stores, print_json
from aegis.cli.source import resolve_model
from aegis.cli.streams import tell

if TYPE_CHECKING:
    from aegis.checkpoint.store import Store
    from aegis.convert.targets import Choice
    from aegis.engine.sources import CheckpointSource, Source
    from aegis.kernels.base import Layout
    from aegis.synthetic.recipe import Recipe

conversion_options = all_of(
    [
        click.option(
            "--experts",
            type=click.Choice(["4bit", "3bit"]),
            default="4bit",
            show_default=True,
            help="3bit adds 3-bit expert files, also to a store that is there already.",
        ),
        bits_options,
        click.option(
            "--layout",
            type=click.Choice(["il16", "row"]),
            help="il16 for the CPU kernels, row for MLX. [default: for what computes without"
            " --backend]",
        ),
        json_option,
        quiet_option,
    ]
)


@click.command("convert", short_help="Convert a model into a store that experts stream from.")
@click.argument("source", required=False, metavar="[MODEL]")
@click.argument("destination", required=False, metavar="[STORE]", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="STORE",
    help="The same as the second argument; the embedded model needs no first one then.",
)
@conversion_options
def command(
    source: str | None, destination: Path | None, output: Path | None, **options: Any
) -> int:
    """Convert MODEL (the embedded one if absent) into the folder STORE.

    Without STORE it goes to the cache, where ``aegis run MODEL`` looks for it. What is
    converted already is not converted again. A model of the hub is downloaded first. The store of
    synthetic:SHAPE[@SEED], a model of random weights, is written in place. Prints the store's
    folder.
    """
    if destination is not None and output is not None:
        raise click.UsageError("STORE is given twice: as an argument and with --output")
    model, target = resolve_model(source), destination or output
    from aegis.engine.sources import find_source

    layout, choice = usual_layout(options), wanted_quantization(options)
    found = find_source(model, layout, options["experts"], choice, stored=target is None)
    show(converted(found, target, options, named=not isinstance(model, Path)), options)
    return 0


def wanted_quantization(options: Options) -> Choice:
    """What --bits and --group-size ask for."""
    from aegis.convert.targets import quantization

    chosen = bits_settings(options)
    return quantization(chosen["bits"], chosen.get("group_size", 64))


def usual_layout(options: Options) -> Layout:
    """The one that is asked for, or else the one that ``aegis run`` will look for."""
    from aegis.engine.planning import backend_layout
    from aegis.kernels import registry

    if options["layout"] is not None:
        layout: Layout = options["layout"]
        return layout
    backend = usual_backend()
    return backend_layout(registry.resolve() if backend == "auto" else backend)


def converted(source: Source, target: Path | None, options: Options, named: bool) -> Store:
    """The store that is made of a model, or was made before.

    target: where; None: in the cache. named: ``source`` was found by a name, so that a store is as
    good as what it was made of.
    """
    from aegis.checkpoint.store import Store
    from aegis.convert.three_bit import add_3bit
    from aegis.engine.sources import StoreSource, SyntheticSource

    quiet, bar = options["quiet"], ProgressBar(source.making, options["quiet"])
    if isinstance(source, StoreSource):
        if options["experts"] == "3bit" and target is None:
            made = Store.open(source.path)
            if (plain := _plain(made)) is None:
                return add_3bit(made.path, bar)
            return _converted(plain, None, made.layout.layout, options, bar)
        if named:
            return Store.open(source.path)
        raise click.UsageError(f"{source.path} is a store already; --experts 3bit adds to it")
    if isinstance(source, SyntheticSource):
        store = _written(source.recipe, target, options, bar)
    else:
        store = _converted(source, target, usual_layout(options), options, bar)
    if target is None and not quiet:
        note_older_stores(store.path)
    return store


def _plain(store: Store) -> CheckpointSource | None:
    """The plain checkpoint that a store was made of, if the hub's cache has it: 3-bit experts come
    from its numbers rather than from the store's codes."""
    from aegis.checkpoint.config import QuantSpec
    from aegis.checkpoint.hub_cache import HubName
    from aegis.checkpoint.source import Checkpoint
    from aegis.engine.sources import CheckpointSource

    source = store.manifest.source
    if not {"repo", "commit", "quantized"} <= source.keys():
        return None
    snapshot = HubName(source["repo"], source["commit"]).snapshot()
    if snapshot is None:
        return None
    found = CheckpointSource(Checkpoint.open(snapshot), QuantSpec(**source["quantized"]))
    return found if found.place(store.layout.layout) == store.path else None


def _converted(
    source: CheckpointSource,
    target: Path | None,
    layout: Layout,
    options: Options,
    bar: ProgressBar,
) -> Store:
    from aegis.convert.convert import convert
    from aegis.text.tokenizer import Tokenizer

    three = options["experts"] == "3bit"
    nbytes = source.layout(layout).nbytes(three)
    folder = target and target.absolute().parent
    place = target or source.place(layout)
    announce(source, place, options)
    source = source.brought(nbytes, DownloadBar(options["quiet"]), folder)
    # A store without a tokenizer that works could not be run: refused before anything is written.
    Tokenizer.open(source.folder)
    return convert(
        source.checkpoint,
        place,
        layout=layout,
        experts3bit=three,
        quantize=source.quantize,
        progress=bar,
        replace_damaged=target is None,
        announce=None if options["quiet"] else tell,
    )


def _written(recipe: Recipe, target: Path | None, options: Options, bar: ProgressBar) -> Store:
    """The store of random weights that ``synthetic:SHAPE`` names."""
    from aegis.synthetic.recipe import cached_path
    from aegis.synthetic.write import make

    layout = usual_layout(options)
    return make(
        recipe,
        target or cached_path(recipe, layout),
        layout,
        experts3bit=options["experts"] == "3bit",
        progress=bar,
        replace_damaged=target is None,
    )


def show(store: Store, options: Options) -> None:
    """Print where a store is."""
    if options["as_json"]:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "store": str(store.path),
                "layout": store.layout.layout,
                "experts": ["4bit", "3bit"] if store.has_3bit else ["4bit"],
            }
        )
    else:
        click.echo(os.fsencode(store.path))  # Whatever the locale: a shell goes on with it.
