"""Ctrl-C, SIGTERM and SIGHUP: what was begun is undone, then the exit code is 128 + the signal.

The first signal raises an exception, so that every ``with`` on the way out puts its things away.
Further ones change nothing. Where the way out takes longer than ``GRACE_S`` (a disk that does not
answer), or where the exception is lost (one raised inside of a weak reference's callback is), the
process ends without it: what a conversion leaves behind then, the next one removes. Some code turns
it into another exception; ``ending`` still knows.
"""

from __future__ import annotations

import os
import signal
import sys
import threading  # Not in the handler: a module that is half imported then cannot be used.

TYPE_CHECKING = False  # importing typing takes longer than all of this
if TYPE_CHECKING:
    from types import FrameType

GRACE_S = 5.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_code: int | None = None


class Ended(KeyboardInterrupt):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def install() -> None:
    """Handle the signals from here on, but for those that were to be ignored (nohup does that)."""
    for number in _ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)
    sys.unraisablehook = _unraisable


def end(number: int, frame: FrameType | None) -> None:
    """A handler: begin to end."""
    del frame
    global _code
    ignore()
    ended = Ended(number)
    _code = ended.exit_code
    _end_anyway(_code)
    raise ended


def ending() -> int | None:
    """The exit code, once a signal has come; None before."""
    return _code


def ignore() -> None:
    """The process is ending already."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


def _end_anyway(code: int) -> None:
    timer = threading.Timer(GRACE_S, os._exit, (code,))
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:
        # No more threads: then a second signal must do.
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    if isinstance(unraisable.exc_value, Ended):
        os._exit(unraisable.exc_value.exit_code)
    sys.__unraisablehook__(unraisable)
