"""Which model and which prompt a command line means."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from aegis.cli.options import Options, refuse_contradictions
from aegis.errors import HubError, UsageError
from aegis.settings import DEFAULT_CONTEXT
from aegis.synthetic.names import PREFIX

if TYPE_CHECKING:
    from aegis.engine.sources import Name

SAMPLE_PROMPT = "What is a mixture of experts? Answer in two sentences."
LONGEST_TOKEN_NBYTES = 128
"""No text is made of longer tokens than this on average."""
_PATH_START = ("/", "./", "../", "~")


@dataclass(frozen=True)
class Request:
    """The model (None: embedded) and the prompt (None: nobody gave one)."""

    model: Name
    prompt: str | None
    ambiguous: bool = False
    """The model is a single argument like and/or, which may have been meant as a prompt."""


def names_model(text: str, alone: bool = True) -> bool:
    """Whether a positional is a MODEL: a path, a store, ORG/NAME, ``synthetic:`` or ``embedded``.

    alone: it is the only one, so that a plain word is a prompt.
    """
    if text.startswith((PREFIX, *_PATH_START)) or _exists(text):
        return True
    from aegis.engine.sources import EMBEDDED, meaning

    return not (alone and text == EMBEDDED) and meaning(text) != Path(text)


def only_model(positional: str | None, options: Options) -> Name:
    """The model of a command without a prompt: its argument or --model."""
    if positional is not None and options["model"] is not None:
        raise click.UsageError("MODEL is given twice: as an argument and with --model")
    return resolve_model(options["model"] if positional is None else positional)


def resolve_model(text: str | None) -> Name:
    """What MODEL means; UsageError says what is supported."""
    if text is None:
        return None
    if not text:
        raise UsageError("MODEL is empty; give the folder of a model or a store")
    from aegis.engine.sources import meaning

    found = meaning(text)
    if not isinstance(found, Path) or os.path.isdir(found):
        return found
    if os.path.exists(found) and found.suffix.lower() == ".gguf":
        raise UsageError(
            f"{text} is a GGUF file, which aegis does not read; give the folder of a model in MLX's"
            " safetensors format"
        )
    if os.path.exists(found):
        raise UsageError(f"{text} is a file; give the folder with config.json and its tensors")
    raise UsageError(
        f"there is no folder {text}; give the folder of a model or a store, or ORG/NAME of a model"
        " on the Hugging Face hub"
    )


def resolve_request(
    positionals: Sequence[str],
    model: str | None,
    prompt: str | None,
    prompt_file: str | None,
    context: int | None = None,
    exact: bool = False,
) -> Request:
    """Sort MODEL and PROMPT out of positionals, options, a file and piped text.

    Text that no context of ``context`` tokens could hold is refused before it takes memory.
    exact: piped text is the prompt as it is, ends of lines included.
    """
    left, ambiguous = list(positionals), False
    if len(left) > 2:
        raise click.UsageError("too many arguments: at most MODEL and PROMPT (quote the prompt)")
    if model is None and left and (len(left) == 2 or names_model(left[0])):
        ambiguous = len(left) == 1 and not _exists(left[0])
        model = left.pop(0)
        if left and model and not names_model(model, alone=False):
            raise UsageError(
                f"there is no folder {model}; give the folder of a model or a store, and quote a"
                " prompt of several words"
            )
    if len(left) == 2:
        raise click.UsageError("MODEL is given twice: as an argument and with --model")
    if left and prompt is not None:
        raise click.UsageError("PROMPT is given twice: as an argument and with --prompt (quote it)")
    limit_nbytes = (context or DEFAULT_CONTEXT) * LONGEST_TOKEN_NBYTES
    asked = [prompt, readable(left[0]) if left else None, _file_text(prompt_file, limit_nbytes)]
    given = [part for part in (*asked, _piped_text(limit_nbytes, exact)) if part]
    if not given and any(part is not None for part in asked):
        raise UsageError("the prompt is empty; give some text, or no prompt at all for a sample")
    found = resolve_model(model)
    return Request(found, "\n".join(given) if given else None, ambiguous and not given)


@contextlib.contextmanager
def told_from_prompt(request: Request) -> Iterator[None]:
    """Where the hub has no such model, a prompt may have been meant: say how to give one."""
    try:
        yield
    except HubError as error:
        if not request.ambiguous:
            raise
        raise HubError(f"{error}; if it is the prompt, give it with -p") from error


def requested(positionals: Sequence[str], options: Options) -> Request:
    """What a verb that takes a prompt was asked for."""
    refuse_contradictions(options)
    for name in ("prompt", "system_prompt"):
        if options[name] is not None:
            options[name] = readable(options[name])
    options["stop"] = tuple(map(readable, options["stop"]))
    return resolve_request(
        positionals,
        options["model"],
        options["prompt"],
        options["prompt_file"],
        options["ctx_size"],
        options["exact"],
    )


def readable(text: str) -> str:
    """Text from the command line or a terminal; what the locale could not decode is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return os.fsencode(text).decode(errors="replace")
    return text


def on_terminal() -> bool:
    """Whether a person is at both ends."""
    return _is_terminal(sys.stdin) and _is_terminal(sys.stdout)


def _is_terminal(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty())


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return False


def _limited(stream: BinaryIO, limit_nbytes: int) -> bytes:
    data = stream.read(limit_nbytes + 1)
    if len(data) > limit_nbytes:
        raise UsageError(
            f"the prompt has more than {limit_nbytes} bytes, which the context cannot hold; give"
            " a shorter one or a larger --ctx-size"
        )
    return data


def _file_text(path: str | None, limit_nbytes: int) -> str | None:
    if path is None:
        return None
    try:
        with Path(path).open("rb") as stream:
            return _text(_limited(stream, limit_nbytes), "strict")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the prompt file {path} cannot be read as UTF-8 text: {error}") from None


def _piped_text(limit_nbytes: int, exact: bool = False) -> str | None:
    """Text from a pipe or a redirected file; a terminal and /dev/null have none."""
    if sys.stdin is None or _is_terminal(sys.stdin):
        return None
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        mode = stat.S_IFIFO
    if stat.S_ISCHR(mode):
        return None
    data = _limited(sys.stdin.buffer, limit_nbytes)
    return data.decode() if exact else _text(data, "replace")


def _text(data: bytes, errors: str) -> str:
    """Without what editors put around a text: a byte order mark, the ends of the last lines."""
    return data.decode("utf-8-sig", errors).rstrip("\r\n")
