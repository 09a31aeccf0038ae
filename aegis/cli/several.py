"""Options that take several values, separated by commas."""

from __future__ import annotations

from typing import Any

import click

from aegis.planner import parse_caps


def take_several(command: click.Command, option: click.Option) -> None:
    """Have an option of a command take values of its type separated by commas, as a tuple."""
    inner = option.type

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        words = value.split(",")
        return tuple(dict.fromkeys(inner.convert(word, param, ctx) for word in words))

    option.metavar = f"{option.make_metavar(click.Context(command))},.."
    option.type, option.callback = click.STRING, convert


def read_several_caps(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """``4GiB,5GiB`` or ``3GiB..6GiB:1GiB``, or several of these, as bytes."""
    if value is None:
        return None
    try:
        return tuple(dict.fromkeys(cap for word in value.split(",") for cap in parse_caps(word)))
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


several_caps_option = click.option(
    "--cap",
    callback=read_several_caps,
    metavar="SIZE,..",
    help="Caps, as 4GiB,6GiB or LOW..HIGH[:STEP]. [default: as of run]",
)
