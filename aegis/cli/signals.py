"""Ctrl-C, SIGTERM and SIGHUP: what was begun is undone but for the finished files of a conversion,
then the exit code is 128 + the signal.

The first signal raises an exception, so that every ``with`` on the way out puts its things away.
Further ones change nothing. Where the way out takes longer than ``GRACE_S`` (a disk that does not
answer), or where the exception is lost (one raised inside of a weak reference's callback is), the
process ends without it: what a conversion leaves behind then, the next one sees to. Some code turns
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


class Heard:
    """While it lasts, a signal is acted on although the main thread waits for a key.

    A signal that falls between a prompt and the wait for a key is noted by the interpreter, but
    nothing ends that wait: readline looks at what was noted only after it. So a thread, which is
    told of every signal, interrupts the wait by one that means nothing."""

    _NOTHING = signal.SIGURG
    _PAUSES_S = (0.01, 0.1, 0.5)

    def __enter__(self) -> Heard:
        self._left = threading.Event()
        self._usual = signal.signal(self._NOTHING, _nothing)
        self._told, self._telling = os.pipe()
        os.set_blocking(self._telling, False)
        self._before = signal.set_wakeup_fd(self._telling, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._nudge, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # No more threads: then the next key must do.
            self._left.set()
        return self

    def _nudge(self) -> None:
        main = threading.main_thread().ident
        while numbers := os.read(self._told, 64):
            for pause in self._PAUSES_S if set(numbers) & set(_ENDING) else ():
                if main is None or self._left.wait(pause):
                    break
                signal.pthread_kill(main, self._NOTHING)

    def __exit__(self, *ending: object) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._telling)
        if not self._left.is_set():
            self._left.set()
            self._thread.join()
        os.close(self._told)
        signal.signal(self._NOTHING, self._usual)


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler, for a wait to be interrupted."""


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
