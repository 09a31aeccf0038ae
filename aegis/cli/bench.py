"""``aegis bench``: how fast a model runs at each cap, where its time goes, and what would do."""

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
from aegis.errors import UsageError

VARIED = ("experts", "guess_width", "threads", "io_threads")
"""Options of which a bench takes several values."""


@click.command("bench", short_help="Measure prompts and tokens, and where their time goes.")
@click.argument("positional", required=False, metavar="[MODEL]")
@model_option
@several_caps_option
@click.option(
    "-p",
    "--n-prompt",
    type=Whole(min=0),
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens of the prompt; 0: none.",
)
@click.option(
    "-n",
    "--n-gen",
    type=Whole(min=0),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens computed one by one behind it; 0: none.",
)
@click.option(
    "-r",
    "--repetitions",
    type=Whole(1, 1000),
    default=3,
    show_default=True,
    metavar="N",
    help="How often, each time with other tokens.",
)
@click.option(
    "--seed",
    type=Whole(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Chooses the stream that tokens are taken from.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["md", "csv", "json", "jsonl"]),
    default="md",
    show_default=True,
    help="How rows are printed.",
)
@click.option(
    "--no-limits",
    is_flag=True,
    help="Do not measure what the disk and the memory could give, nor predict.",
)
@click.option("--no-predict", is_flag=True, help="Do not probe and predict.")
@engine_options
@json_option
@quiet_option
def command(positional: str | None, **options: Any) -> int:
    """Measure how fast MODEL computes a prompt (pp) and single tokens behind it (tg).

    Tokens come from a seeded stream, so that every run computes the same. --cap, --experts,
    --guess-width, --threads and --io-threads take several values, separated by commas: each
    combination is run in a process of its own. A token's time is what blocks compute, what the
    router takes, waiting for reads, and the rest: bookkeeping. With the mlx backend it is handing
    calls to the device, waiting for the device, waiting for reads, and the rest: Python. Before and
    after each of them it is measured what the disk gives for reads of that size, and the memory for
    as many threads; with that, and a probe of the kernels, the tokens' speed is predicted as 'aegis
    predict' does it.
    """
    model = only_model(positional, options)
    if not options["n_prompt"] and not options["n_gen"]:
        raise UsageError("-p 0 and -n 0 leave nothing to measure; give tokens for one of them")
    note_fallback(options)
    choice = noted_caps(options)
    from aegis.cli.benching import bench

    return bench(model, choice.caps, options)


for _option in command.params:
    if isinstance(_option, click.Option) and _option.name in VARIED:
        take_several(command, _option)
    elif isinstance(_option, click.Option) and _option.name == "ctx_size":
        _option.help = "Context in tokens. [default: just what -p and -n need]"
