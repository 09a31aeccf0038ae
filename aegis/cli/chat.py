"""A conversation on a terminal."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Literal

from aegis.cli.answer import answer_json, generate, make_sampler, open_engine
from aegis.cli.conversation import Conversation
from aegis.cli.options import Options
from aegis.cli.report import check_cap, figures, note, note_ledger, note_plan
from aegis.cli.signals import Ended, Heard, end
from aegis.cli.source import Request, readable
from aegis.errors import ReadError, TokenizerError, UsageError

if TYPE_CHECKING:
    from aegis.engine.engine import Engine
    from aegis.engine.sampling import Sampler

HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer"
_COMMAND = re.compile(r"/[a-z]+")


def chat(request: Request, cap_nbytes: int, options: Options) -> int:
    """Talk until /exit or Ctrl-D; the history is kept and sent with every turn."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing in input()
    sampler = make_sampler(options)
    on_plan = None if options["quiet"] else note_plan
    with open_engine(request, cap_nbytes, options, on_plan) as engine:
        if not options["quiet"]:
            note(f"{engine.name}: {engine.describe()}")
            note(HELP)
        with Heard(), _CtrlC() as ctrl_c:
            _talk(engine, options, sampler, ctrl_c)
        if options["verbose"]:
            note_ledger(engine.ledger())
    return 0


class _CtrlC:
    """What Ctrl-C does: it empties the line being typed, and it ends an answer.

    While a prompt is computed it interrupts; while the answer comes it is noted, and acted on
    between two tokens, so that what is there already stays. Pressed once more then, it ends all.
    """

    def __init__(self) -> None:
        self.at: Literal["typing", "prompt", "answer", "neither"] = "neither"
        self.pressed = False

    def __enter__(self) -> _CtrlC:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *ending: object) -> None:
        # Not after a signal to end, from when on all are ignored.
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.at in ("typing", "prompt"):
            raise KeyboardInterrupt
        if self.at == "answer":
            if self.pressed:
                end(number, frame)
            self.pressed = True

    @contextlib.contextmanager
    def during(self, what: Literal["typing", "prompt"]) -> Iterator[None]:
        """KeyboardInterrupt comes only from inside of this."""
        self.pressed = False
        try:
            self.at = what
            yield
        finally:
            self.at = "neither"

    def answering(self) -> bool:
        """A token has come; whether Ctrl-C was pressed since the one before."""
        self.at = "answer"
        return self.pressed


def _talk(engine: Engine, options: Options, sampler: Sampler, ctrl_c: _CtrlC) -> None:
    conversation = Conversation(engine, options)
    while (line := _read_line(ctrl_c)) is not None:
        if line == "/exit":
            return
        if line == "/clear":
            conversation.clear()
            note("forgotten")
        elif line in ("/help", "/?"):
            note(HELP)
        elif _COMMAND.fullmatch(line):
            note(f"there is no {line}: {HELP}")
        elif line:
            _turn(engine, options, sampler, ctrl_c, conversation, line)


def _read_line(ctrl_c: _CtrlC) -> str | None:
    """One line; None at the end of input, "" after Ctrl-C."""
    try:
        with ctrl_c.during("typing"):
            return readable(input("> ")).strip()
    except EOFError:
        print()
        return None
    except Ended:
        raise
    except KeyboardInterrupt:
        print()
        note(HELP)
        return ""


def _turn(
    engine: Engine,
    options: Options,
    sampler: Sampler,
    ctrl_c: _CtrlC,
    conversation: Conversation,
    line: str,
) -> None:
    """Answer one line, which becomes part of the conversation where there is an answer."""
    engine.stats.reset()
    try:
        with ctrl_c.during("prompt"):
            ids, left_out = conversation.ask(line)
            if left_out:
                note(_left_out(left_out, engine.context))
            answer = generate(engine, ids, options, sampler, _show, ctrl_c.answering)
    except (UsageError, TokenizerError) as error:
        note(f"error: {error} (/clear forgets the conversation)")
        return
    except ReadError as error:
        note(f"\nerror: {error}")
        return
    except Ended:
        raise
    except KeyboardInterrupt:
        note("\n(ended by Ctrl-C before the answer began)")
        return
    print()
    if ctrl_c.pressed:
        note("(ended by Ctrl-C)")
    if len(ids) + len(answer.token_ids) >= engine.context:
        note(
            f"the context of {engine.context} tokens is full ({len(ids)} of the prompt,"
            f" {len(answer.token_ids)} of the answer), so the answer ends here; /clear forgets the"
            " conversation"
        )
    result = answer_json(engine, answer)
    if not options["quiet"]:
        note(figures(result, answer.cached_tokens) + "\n")
    check_cap(result)
    conversation.answered(line, answer.text)


def _left_out(turns: int, context: int) -> str:
    what = "the oldest turn does" if turns == 1 else f"the {turns} oldest turns do"
    return f"({what} not fit the context of {context} tokens beside a new answer: left out)"


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
