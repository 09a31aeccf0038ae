"""A conversation on a terminal."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from aegis.cli.answer import (
    Messages,
    answer_json,
    first_messages,
    generate,
    make_sampler,
    open_engine,
)
from aegis.cli.options import Options
from aegis.cli.report import check_cap, figures, note, note_ledger, note_plan
from aegis.errors import UsageError

if TYPE_CHECKING:
    from aegis.engine.engine import Engine
    from aegis.engine.sampling import Sampler

HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer"
_COMMAND = re.compile(r"/[a-z]+")


def chat(model: Path | None, cap_nbytes: int, options: Options) -> int:
    """Talk until /exit or Ctrl-D; the history is kept and sent with every turn."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing in input()
    sampler = make_sampler(options)
    on_plan = None if options["quiet"] else note_plan
    with open_engine(model, cap_nbytes, options, on_plan) as engine:
        if not options["quiet"]:
            note(engine.describe())
            note(HELP)
        _talk(engine, options, sampler)
        if options["verbose"]:
            note_ledger(engine.ledger())
    return 0


def _talk(engine: Engine, options: Options, sampler: Sampler) -> None:
    messages = first_messages(options)
    while (line := _read_line()) is not None:
        if line == "/exit":
            return
        if line == "/clear":
            messages = first_messages(options)
            note("forgotten")
        elif line in ("/help", "/?"):
            note(HELP)
        elif _COMMAND.fullmatch(line):
            note(f"there is no {line}: {HELP}")
        elif line:
            messages = _turn(engine, options, sampler, messages, line)


def _read_line() -> str | None:
    """One line; None at the end of input, "" after Ctrl-C."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        note(HELP)
        return ""


def _turn(
    engine: Engine, options: Options, sampler: Sampler, messages: Messages, line: str
) -> Messages:
    """Answer one line; returns the conversation with it, or as it was where it does not fit."""
    asked = [*messages, {"role": "user", "content": line}]
    engine.stats.reset()
    try:
        ids = _turn_ids(engine, asked, options)
        with _interruptible() as interrupted:
            answer = generate(engine, ids, options, sampler, _show, lambda: bool(interrupted))
    except UsageError as error:
        note(f"error: {error} (/clear forgets the conversation)")
        return messages
    print()
    if interrupted:
        note("(ended by Ctrl-C)")
    if len(ids) + len(answer.token_ids) >= engine.context:
        note(f"the context of {engine.context} tokens is full: /clear forgets the conversation")
    result = answer_json(engine, answer)
    if not options["quiet"]:
        note(figures(result, answer.cached_tokens) + "\n")
    check_cap(result)
    return [*asked, {"role": "assistant", "content": answer.text}]


def _turn_ids(engine: Engine, messages: Messages, options: Options) -> list[int]:
    if options["raw"]:
        return engine.tokenizer.encode("\n".join(message["content"] for message in messages))
    return engine.tokenizer.encode_chat(messages)


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C is noted and acted on between two tokens; the second one interrupts."""
    pressed: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
