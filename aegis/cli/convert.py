"""``aegis convert``: a checkpoint becomes a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.fetch import here
from aegis.cli.options import Options, all_of, json_option, quiet_option, usual_backend
from aegis.cli.progress import ProgressBar
from aegis.cli.report import SCHEMA_VERSION, note_older_stores, print_json
from aegis.cli.source import resolve_model

if TYPE_CHECKING:
    from aegis.checkpoint.config import QuantSpec
    from aegis.checkpoint.remote import RemoteCheckpoint
    from aegis.checkpoint.store import Store
    from aegis.hub.locate import Model
    from aegis.kernels.base import Layout

conversion_options = all_of(
    [
        click.option(
            "--experts",
            type=click.Choice(["4bit", "3bit"]),
            default="4bit",
            show_default=True,
            help="3bit adds 3-bit expert files, also to a store that is there already.",
        ),
        click.option(
            "--bits",
            type=click.Choice(["2", "3", "4", "5", "6", "8"]),
            help="Quantise a plain checkpoint (BF16, F16 or F32) to codes of this width, exactly as"
            " mlx_lm.convert does. That of a folder needs STORE. [default: its numbers are kept]",
        ),
        click.option(
            "--group-size",
            type=click.Choice(["32", "64", "128"]),
            help="Numbers that share a scale and a bias, with --bits. [default: 64]",
        ),
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
    converted already is not converted again. A model of the hub is downloaded first. Prints the
    store's folder.
    """
    if destination is not None and output is not None:
        raise click.UsageError("STORE is given twice: as an argument and with --output")
    model, target = resolve_model(source), destination or output
    wanted = wanted_quantization(options)
    if wanted is not None and target is None and not isinstance(model, str):
        # In the cache nobody would find it: a folder is looked up there by its content alone.
        raise click.UsageError("--bits makes another model of MODEL; name the folder STORE for it")
    found = _found(model, target, wanted, usual_layout(options))
    show(converted(found, target, wanted, options, isinstance(model, str)), options)
    return 0


def wanted_quantization(options: Options) -> QuantSpec | None:
    """What --bits and --group-size ask for."""
    from aegis.checkpoint.config import QuantSpec

    bits, group_size = options["bits"], options["group_size"]
    if bits is None and group_size is not None:
        raise click.UsageError("--group-size goes with --bits, which is not given")
    return None if bits is None else QuantSpec(int(bits), int(group_size or 64))


def usual_layout(options: Options) -> Layout:
    """The one that is asked for, or else the one that ``aegis run`` will look for."""
    from aegis.engine.planning import backend_layout
    from aegis.kernels import registry

    if options["layout"] is not None:
        layout: Layout = options["layout"]
        return layout
    backend = usual_backend()
    return backend_layout(registry.resolve() if backend == "auto" else backend)


def _found(
    model: Model, target: Path | None, wanted: QuantSpec | None, layout: Layout
) -> Path | RemoteCheckpoint:
    """What there is to convert; a store will do where none of its own is asked for."""
    from aegis.hub.locate import find_source, hub_name
    from aegis.hub.remote import describe

    name = hub_name(model)
    if name is None or (target is None and wanted is None):
        return find_source(model, layout)
    return name.snapshot() or describe(name)


def converted(
    source: Path | RemoteCheckpoint,
    target: Path | None,
    wanted: QuantSpec | None,
    options: Options,
    named: bool,
) -> Store:
    """The store that is made of a model, or was made before.

    target: where; None: in the cache. named: ``source`` was found by its name on the hub, so that
    a store is as good as what it was made of.
    """
    from aegis.checkpoint.source import Checkpoint
    from aegis.checkpoint.store import Store, is_store
    from aegis.convert.cache import cached_store_path
    from aegis.convert.convert import convert
    from aegis.convert.layout import layout_of_checkpoint
    from aegis.convert.three_bit import add_3bit
    from aegis.text.tokenizer import Tokenizer

    layout, three_bit = usual_layout(options), options["experts"] == "3bit"
    bar = ProgressBar("converting", options["quiet"])
    if is_store(source):
        if three_bit and target is None:
            return add_3bit(Path(source), bar)
        if named:
            return Store.open(source)
        raise click.UsageError(f"{source} is a store already; --experts 3bit adds to it")
    checkpoint = Checkpoint.open(source)
    places = layout_of_checkpoint(checkpoint, layout, wanted)
    kinds = {"4bit", options["experts"]}
    nbytes = places.resident_file_nbytes + sum(map(places.experts_nbytes, kinds))
    folder = target and target.absolute().parent
    checkpoint = Checkpoint.open(here(checkpoint, options["quiet"], nbytes, folder))
    # A store without a tokenizer that works could not be run: refused before anything is written.
    Tokenizer.open(checkpoint.path)
    store = convert(
        checkpoint,
        target or cached_store_path(checkpoint, layout, wanted),
        layout=layout,
        experts3bit=three_bit,
        quantize=wanted,
        progress=bar,
        replace_damaged=target is None,
    )
    if target is None and wanted is None and not options["quiet"]:
        note_older_stores(store.path)
    return store


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
