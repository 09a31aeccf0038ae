"""``aegis bench``: how fast a model runs at each cap, where its time goes, and what would do."""

from __future__ import annotations

from typing import Any

import click

from aegis.cli.options import (
    Whole,
    choose_caps,
    engine_options,
    json_option,
    model_option,
    quiet_option,
)
from aegis.cli.report import note, note_fallback
from aegis.cli.source import resolve_model
from aegis.errors import UsageError
from aegis.planner import parse_caps

VARIED = ("experts", "guess_width", "threads", "io_threads")
"""Options of which a bench takes several values."""


def _takes_several(option: click.Option) -> None:
    """Have an option take values of its type separated by commas, as a tuple."""
    inner = option.type

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        words = value.split(",")
        return tuple(dict.fromkeys(inner.convert(word, param, ctx) for word in words))

    option.metavar = f"{option.make_metavar(click.Context(command))},.."
    option.type, option.callback = click.STRING, convert


def _read_caps(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """``4GiB,5GiB`` or ``3GiB..6GiB:1GiB``, or several of these, as bytes."""
    if value is None:
        return None
    try:
        return tuple(dict.fromkeys(cap for word in value.split(",") for cap in parse_caps(word)))
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.command("bench", short_help="Measure prompts and tokens, and where their time goes.")
@click.argument("positional", required=False, metavar="[MODEL]")
@model_option
@click.option(
    "--cap",
    callback=_read_caps,
    metavar="SIZE,..",
    help="Caps, as 4GiB,6GiB or LOW..HIGH[:STEP]. [default: as of run]",
)
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
    "--no-limits", is_flag=True, help="Do not measure what the disk and the memory could give."
)
@engine_options
@json_option
@quiet_option
def command(positional: str | None, **options: Any) -> int:
    """Measure how fast MODEL computes a prompt (pp) and single tokens behind it (tg).

    Tokens come from a seeded stream, so that every run computes the same. --cap, --experts,
    --guess-width, --threads and --io-threads take several values, separated by commas: each
    combination is run in a process of its own. A token's time is what blocks compute, what the
    router takes, waiting for reads, and the rest: bookkeeping. Before and after each of them it is
    measured what the disk gives for reads of that size, and the memory for as many threads.
    """
    if positional is not None and options["model"] is not None:
        raise click.UsageError("MODEL is given twice: as an argument and with --model")
    model = resolve_model(options["model"] if positional is None else positional)
    if not options["n_prompt"] and not options["n_gen"]:
        raise UsageError("-p 0 and -n 0 leave nothing to measure; give tokens for one of them")
    note_fallback(options)
    choice = choose_caps(options)
    if choice.note and not options["quiet"]:
        note(choice.note)
    from aegis.cli.benching import bench

    return bench(model, choice.caps, options)


for _option in command.params:
    if isinstance(_option, click.Option) and _option.name in VARIED:
        _takes_several(_option)
    elif isinstance(_option, click.Option) and _option.name == "ctx_size":
        _option.help = "Context in tokens. [default: just what -p and -n need]"
