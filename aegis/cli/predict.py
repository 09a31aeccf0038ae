"""``aegis predict``: how fast a model will be at each cap, before anything of it is here."""

from __future__ import annotations

from typing import Any

import click

from aegis.cli.options import (
    Whole,
    engine_options,
    json_option,
    model_option,
    noted_caps,
    quiet_option,
)
from aegis.cli.report import note_fallback
from aegis.cli.several import several_caps_option, take_several
from aegis.cli.source import only_model

DEFAULT_DEPTH = 512


@click.command("predict", short_help="Say how fast a model will be, before it is downloaded.")
@click.argument("positional", required=False, metavar="[MODEL]")
@model_option
@several_caps_option
@click.option(
    "-d",
    "--depth",
    type=Whole(min=1),
    metavar="N",
    help="Tokens in the context ahead of those that are predicted. [default: the smaller of "
    f"{DEFAULT_DEPTH} and half of the context]",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Routing of this model, as 'aegis trace' records it. [default: one that comes with aegis]",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["md", "csv", "json"]),
    default="md",
    show_default=True,
    help="How rows are printed.",
)
@engine_options
@json_option
@quiet_option
def command(positional: str | None, **options: Any) -> int:
    """Say how many tokens per second MODEL will decode at each cap.

    Nothing is downloaded but headers, and no weights are read. In about half a minute a small model
    of the same layers is written where the store would lie, run and removed: that tells what
    kernels and reads of the model's record size take here. A routing trace goes through the real
    slots, policy and guesses with these numbers. --cap and --experts take several values. Exit code
    3 says that no cap fits.
    """
    model = only_model(positional, options)
    note_fallback(options)
    choice = noted_caps(options)
    from aegis.cli.predicting import predict_all

    return predict_all(model, choice.caps, options)


for _option in command.params:
    if isinstance(_option, click.Option) and _option.name == "experts":
        take_several(command, _option)
