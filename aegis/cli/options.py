"""The options that verbs share, spelled as the field spells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from aegis.cli.report import note
from aegis.errors import UsageError
from aegis.planner import parse_caps, parse_size
from aegis.settings import (
    BACKENDS,
    DEFAULT_CONTEXT,
    DEFAULT_IO_THREADS,
    default_backend,
)

F = TypeVar("F", bound=Callable[..., Any])
Options = dict[str, Any]

DEFAULT_MAX_TOKENS = 256


def _read_caps(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """``4GiB`` or ``3GiB..6GiB[:STEP]`` as bytes."""
    if value is None:
        return None
    try:
        return parse_caps(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def read_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """``8GiB`` as bytes."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def usual_backend() -> str:
    """What computes without ``--backend``; UsageError where the environment names no backend."""
    try:
        return default_backend()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _read_backend(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    """The one that was asked for, whatever the environment says, or the usual one."""
    del ctx, param
    return usual_backend() if value is None else value


class Whole(click.IntRange):
    """Called what it is in messages."""

    name = "whole number"


if TYPE_CHECKING:
    _OfAnything = click.ParamType[Any]
else:
    _OfAnything = click.ParamType  # Older ones are not generic.


class WholeOrAuto(_OfAnything):
    """A whole number, or None where ``auto`` is said."""

    name = "whole number or auto"

    def __init__(self, least: int, most: int) -> None:
        self._number = Whole(least, most)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """See click.ParamType."""
        return None if value == "auto" else self._number.convert(value, param, ctx)


def all_of(options: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """Several options as one decorator, in their order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_option = click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="Folder of a model or store, ORG/NAME on the hub or synthetic:SHAPE; the embedded one if "
    "absent.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Also the ledger: planned and measured."
)

DEFAULT_CAP_HELP = "[default: the smaller of 4GiB and half of the free memory]"


def cap_option(help: str) -> Callable[[F], F]:
    """``--cap``, of which each verb takes something else."""
    return click.option("--cap", callback=_read_caps, metavar="SIZE", help=help)


bits_options = all_of(
    [
        click.option(
            "--bits",
            type=click.Choice(["2", "3", "4", "5", "6", "8", "none"]),
            help="What a plain checkpoint (BF16, F16 or F32) is quantised to while it is converted,"
            " exactly as mlx_lm.convert does; none keeps its numbers. [default: as it was converted"
            " last, or else 4]",
        ),
        click.option(
            "--group-size",
            type=click.Choice(["32", "64", "128"]),
            help="Numbers that share a scale and a bias, with --bits. [default: 64]",
        ),
    ]
)

engine_options = all_of(
    [
        click.option(
            "--device-cap",
            callback=read_size,
            metavar="SIZE",
            help="What may lie in the memory of an NVIDIA GPU; --cap is then for the host alone. "
            "[default: --cap is for both together]",
        ),
        click.option(
            "-c",
            "--ctx-size",
            type=Whole(min=1),
            metavar="N",
            help=f"Context in tokens. [default: the smaller of {DEFAULT_CONTEXT} and the model's]",
        ),
        click.option(
            "--backend",
            type=click.Choice(BACKENDS),
            callback=_read_backend,
            help="What computes. [default: $AEGIS_BACKEND, or auto]",
        ),
        click.option(
            "--activations",
            type=click.Choice(["auto", "f32", "bf16", "f16"]),
            default="auto",
            show_default=True,
            help="Numbers to compute in: f32 on a CPU, the model's own on a GPU.",
        ),
        click.option(
            "--experts",
            type=click.Choice(["4bit", "3bit"]),
            default="4bit",
            show_default=True,
            help="Which expert files to use.",
        ),
        bits_options,
        click.option(
            "--embedding",
            type=click.Choice(["auto", "ram", "disk"]),
            default="auto",
            show_default=True,
            help="Where the embedding table stays.",
        ),
        click.option(
            "--kv-format",
            type=click.Choice(["f32"]),
            default="f32",
            show_default=True,
            help="Number format of the KV cache.",
        ),
        click.option(
            "--policy",
            type=click.Choice(["lfu", "lru", "random"]),
            default="lfu",
            show_default=True,
            help="Which expert leaves the hot tier.",
        ),
        click.option(
            "--guess",
            type=click.Choice(["cross-layer", "previous", "none"]),
            default="cross-layer",
            show_default=True,
            help="How the next layer's experts are guessed; never changes a token.",
        ),
        click.option(
            "--guess-width",
            type=WholeOrAuto(0, 16),
            default="auto",
            show_default=True,
            metavar="N|auto",
            help="Reads issued ahead per layer; auto: as many as turn out to be worth it.",
        ),
        click.option(
            "--io-threads",
            type=Whole(1, 64),
            default=DEFAULT_IO_THREADS,
            show_default=True,
            metavar="N",
            help="Threads that read.",
        ),
        click.option(
            "--threads",
            type=Whole(min=1),
            metavar="N",
            help="Threads that compute. [default: one per core]",
        ),
        click.option(
            "--prefill-step-size",
            type=Whole(min=1),
            metavar="N",
            help="Prompt tokens computed at once. [default: what the plan allows]",
        ),
    ]
)

prompt_options = all_of(
    [
        click.option("-p", "--prompt", metavar="TEXT", help="The prompt; piped text is appended."),
        click.option(
            "-f",
            "--file",
            "prompt_file",
            type=click.Path(exists=True, dir_okay=False, allow_dash=False),
            help="Read the prompt from a file.",
        ),
        click.option(
            "-n",
            "--max-tokens",
            type=Whole(min=0),
            default=DEFAULT_MAX_TOKENS,
            show_default=True,
            metavar="N",
            help="Tokens to generate at most.",
        ),
        click.option("--temp", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="1: off."),
        click.option(
            "--top-k", type=int, default=0, show_default=True, metavar="N", help="0: off."
        ),
        click.option("--min-p", type=float, default=0.0, show_default=True, help="0: off."),
        click.option(
            "--seed", type=int, metavar="N", help="Repeats the same sample. [default: drawn]"
        ),
        click.option(
            "--repeat-penalty", type=float, default=1.0, show_default=True, help="1: off."
        ),
        click.option("--stop", multiple=True, metavar="TEXT", help="Stop before it; repeatable."),
        click.option("--system-prompt", metavar="TEXT", help="System message of the chat."),
        click.option(
            "--chat-template", metavar="TEMPLATE", help="A Jinja file, name or template to use."
        ),
        click.option("--raw", is_flag=True, help="Send the prompt without a chat template."),
        click.option("--ignore-eos", is_flag=True, help="Go on behind the end token."),
        click.option(
            "--forced",
            is_flag=True,
            help="In place of an answer, N tokens of a stream that --seed chooses (0 if absent): "
            "for benchmarks of random weights, whose own answers run in circles.",
        ),
        # For sweep: what it pipes to its runs is the prompt to the last line end.
        click.option("--exact", is_flag=True, hidden=True),
    ]
)


@dataclass(frozen=True)
class CapChoice:
    """The caps to run at, and whether they were chosen for the user."""

    caps: tuple[int, ...]
    note: str | None

    @property
    def single(self) -> int:
        """The only cap; UsageError for a range."""
        if len(self.caps) > 1:
            raise click.UsageError("--cap takes one size here; ranges are for run and sweep")
        return self.caps[0]


def choose_caps(options: Options) -> CapChoice:
    """The caps asked for, or the default with a line that says why."""
    if options["cap"]:
        return CapChoice(options["cap"], None)
    from aegis.cli.machine import default_cap, read_machine
    from aegis.planner import format_size

    machine = read_machine()
    cap = default_cap(machine)
    said = f"cap {format_size(cap)}, since no --cap was given ({machine.describe()})"
    return CapChoice((cap,), said)


def noted_caps(options: Options) -> CapChoice:
    """The same, the line noted at once."""
    choice = choose_caps(options)
    if choice.note and not options["quiet"]:
        note(choice.note)
    return choice


def bits_settings(options: Options) -> Options:
    """The fields of Settings that --bits and --group-size stand for."""
    bits, group_size = options["bits"], options["group_size"]
    if group_size is not None and bits in (None, "none"):
        raise click.UsageError("--group-size goes with --bits and a width, which is not given")
    if bits in (None, "none"):
        return {"bits": bits or "auto"}
    return {"bits": int(bits), "group_size": int(group_size or 64)}


def engine_settings(options: Options) -> Options:
    """The fields of Settings (without the cap) that the options stand for."""
    same = (
        "backend",
        "activations",
        "experts",
        "embedding",
        "policy",
        "guess",
        "guess_width",
        "io_threads",
    )
    renamed = {
        "context": "ctx_size",
        "prefill_step": "prefill_step_size",
        "threads": "threads",
        "device_cap_nbytes": "device_cap",
    }
    chosen = {name: options[name] for name in same}
    chosen |= {field: options[name] for field, name in renamed.items()}
    return chosen | bits_settings(options)


def refuse_contradictions(options: Options) -> None:
    """What an option would make another one do nothing is refused, not ignored."""
    for name, usual in (("temp", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if options["forced"] and options[name] != usual:
            flag = name.replace("_", "-")
            raise UsageError(f"--forced chooses the tokens, so --{flag} would be ignored; drop one")
    if options["forced"] and options["stop"]:
        raise UsageError("--forced goes on to the last token, so --stop would be ignored; drop one")
    for name in ("system_prompt", "chat_template"):
        if options["raw"] and options[name] is not None:
            flag = name.replace("_", "-")
            raise UsageError(
                f"--raw sends the prompt as it is, so --{flag} would be ignored; drop one of them"
            )
