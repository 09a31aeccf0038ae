"""Which model and which prompt a command line means."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from aegis.cli.options import Options, refuse_contradictions
from aegis.errors import UsageError
from aegis.settings import DEFAULT_CONTEXT
from aegis.synthetic.names import PREFIX, is_synthetic

SAMPLE_PROMPT = "What is a mixture of experts? Answer in two sentences."
LONGEST_TOKEN_NBYTES = 128
"""No text is made of longer tokens than this on average."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PATH_START = ("/", "./", "../", "~")


@dataclass(frozen=True)
class Request:
    """The model's folder or ``synthetic:SHAPE`` (None: embedded) and the prompt (None: nobody gave
    one)."""

    model: Path | None
    prompt: str | None


def names_model(text: str) -> bool:
    """Whether a single positional is a MODEL: a path, ORG/NAME or ``synthetic:``."""
    return (
        text.startswith((PREFIX, *_PATH_START))
        or _HUB_NAME.fullmatch(text) is not None
        or _exists(text)
    )


def resolve_model(text: str | None) -> Path | None:
    """The folder that MODEL names, or its name if it is one of random weights; UsageError says what
    is supported."""
    if text is None:
        return None
    if not text:
        raise UsageError("MODEL is empty; give the folder of a model or a store")
    if is_synthetic(text):
        from aegis.synthetic.recipe import recipe

        recipe(text)  # Refused now if there is no such shape.
        return Path(text)
    # Not Path's: it expands ./~ too, and raises where there is no such user or a name is too long.
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):
        return path
    if os.path.exists(path) and path.suffix.lower() == ".gguf":
        raise UsageError(
            f"{text} is a GGUF file, which aegis does not read; give the folder of a model in MLX's"
            " safetensors format"
        )
    if os.path.exists(path):
        raise UsageError(f"{text} is a file; give the folder with config.json and its tensors")
    if _HUB_NAME.fullmatch(text):
        raise UsageError(
            f"{text} is not a folder here, and downloading a model by its name is not supported; "
            "give a local folder"
        )
    raise UsageError(f"there is no folder {text}; give the folder of a model or a store")


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
    left = list(positionals)
    if len(left) > 2:
        raise click.UsageError("too many arguments: at most MODEL and PROMPT (quote the prompt)")
    if model is None and left and (len(left) == 2 or names_model(left[0])):
        model = left.pop(0)
        if left and model and not names_model(model):
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
    return Request(resolve_model(model), "\n".join(given) if given else None)


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
