"""``aegis convert``: a checkpoint becomes a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import json_option, quiet_option, usual_backend
from aegis.cli.plan import model_folder
from aegis.cli.progress import ProgressBar
from aegis.cli.report import SCHEMA_VERSION, note_older_stores, print_json
from aegis.cli.source import resolve_model
from aegis.synthetic.names import is_synthetic

if TYPE_CHECKING:
    from aegis.checkpoint.config import QuantSpec
    from aegis.checkpoint.store import Store
    from aegis.kernels.base import Layout


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
@click.option(
    "--experts",
    type=click.Choice(["4bit", "3bit"]),
    default="4bit",
    show_default=True,
    help="3bit adds 3-bit expert files, also to a store that is there already.",
)
@click.option(
    "--bits",
    type=click.Choice(["2", "3", "4", "5", "6", "8"]),
    help="Quantise a plain checkpoint (BF16, F16 or F32) to codes of this width, exactly as"
    " mlx_lm.convert does. Needs STORE. [default: its numbers are kept]",
)
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128"]),
    help="Numbers that share a scale and a bias, with --bits. [default: 64]",
)
@click.option(
    "--layout",
    type=click.Choice(["il16", "row"]),
    help="il16 for the CPU kernels, row for MLX. [default: for what computes without --backend]",
)
@json_option
@quiet_option
def command(
    source: str | None,
    destination: Path | None,
    output: Path | None,
    experts: str,
    bits: str | None,
    group_size: str | None,
    layout: Layout | None,
    **options: Any,
) -> int:
    """Convert MODEL (the embedded one if absent) into the folder STORE.

    Without STORE it goes to the cache, where ``aegis run MODEL`` looks for it. What is
    converted already is not converted again. The store of synthetic:SHAPE[@SEED], a model of
    random weights, is written in place. Prints the store's folder.
    """
    if destination is not None and output is not None:
        raise click.UsageError("STORE is given twice: as an argument and with --output")
    wanted = _wanted(bits, group_size, destination or output)
    folder = model_folder(resolve_model(source))
    from aegis.checkpoint.store import is_store

    layout = layout or _usual_layout()
    bar = ProgressBar("writing" if is_synthetic(folder) else "converting", options["quiet"])
    store = _converted(folder, destination or output, layout, experts == "3bit", wanted, bar)
    if not (destination or output or is_store(folder) or options["quiet"]):
        note_older_stores(folder, layout)
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
    return 0


def _wanted(bits: str | None, group_size: str | None, store: Path | None) -> QuantSpec | None:
    from aegis.checkpoint.config import QuantSpec

    if bits is None:
        if group_size is not None:
            raise click.UsageError("--group-size goes with --bits, which is not given")
        return None
    if store is None:
        # In the cache nobody would find it: a model is looked up there by its checkpoint alone.
        raise click.UsageError("--bits makes another model of MODEL; name the folder STORE for it")
    return QuantSpec(int(bits), int(group_size or 64))


def _usual_layout() -> Layout:
    """The one that ``aegis run`` will look for."""
    from aegis.engine.planning import backend_layout
    from aegis.kernels import registry

    backend = usual_backend()
    return backend_layout(registry.resolve() if backend == "auto" else backend)


def _converted(
    folder: Path,
    destination: Path | None,
    layout: Layout,
    three_bit: bool,
    wanted: QuantSpec | None,
    bar: ProgressBar,
) -> Store:
    from aegis.checkpoint.source import Checkpoint
    from aegis.checkpoint.store import is_store
    from aegis.convert.cache import cached_store_path
    from aegis.convert.convert import convert
    from aegis.convert.layout import layout_of_checkpoint
    from aegis.convert.three_bit import add_3bit
    from aegis.text.tokenizer import Tokenizer

    if is_synthetic(folder):
        return _written(folder, destination, layout, three_bit, wanted, bar)
    if is_store(folder):
        if destination is not None or not three_bit:
            raise click.UsageError(f"{folder} is a store already; --experts 3bit adds to it")
        return add_3bit(folder, bar)
    in_cache = destination is None
    checkpoint = Checkpoint.open(folder)
    layout_of_checkpoint(checkpoint, layout, wanted)
    # A store without a tokenizer that works could not be run: refused before anything is written.
    Tokenizer.open(folder)
    target = destination or cached_store_path(checkpoint, layout)
    return convert(
        checkpoint,
        target,
        layout=layout,
        experts3bit=three_bit,
        quantize=wanted,
        progress=bar,
        replace_damaged=in_cache,
    )


def _written(
    name: Path,
    destination: Path | None,
    layout: Layout,
    three_bit: bool,
    wanted: QuantSpec | None,
    bar: ProgressBar,
) -> Store:
    """The store of random weights that ``synthetic:SHAPE`` names."""
    from aegis.synthetic.recipe import cached_path, recipe
    from aegis.synthetic.write import make

    if wanted is not None:
        raise click.UsageError(f"{name} has no numbers to quantise; leave --bits out")
    shape = recipe(name)
    return make(
        shape,
        destination or cached_path(shape, layout),
        layout,
        experts3bit=three_bit,
        progress=bar,
        replace_damaged=destination is None,
    )
