"""Whose turn it is: one thread at a time, of the process that opened the model."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from aegis.engine.backends import backend_errors
from aegis.errors import AegisError

P = ParamSpec("P")
R = TypeVar("R")


class Turn:
    """A lock that its holder may take again. Held over several calls it makes them one.

    A child made by fork has the memory of its parent, but none of the threads that read and compute
    (nor the memory that reads go into), so it is refused there instead of waiting for ever.
    """

    def __init__(self, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """inside: makes what every call is inside of, in the thread that makes the call."""
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.inside = inside
        """What every call is inside of."""
        self._call: FrameType | None = None
        """Of the call that is under way. One that was interrupted is on no stack any more."""
        self._afterwards: Callable[[], None] | None = None

    @property
    def here(self) -> bool:
        """Whether this is the process that opened the model."""
        return os.getpid() == self._process

    @property
    def lock(self) -> threading.RLock:
        """For ``with``, between whose beginning and body no signal's handler can raise: there are
        no steps in Python in between, as there are in ours."""
        if not self.here:
            raise AegisError(
                "this model was opened by another process, which forked this one; open it again"
                " here, or start processes by the spawn method"
            )
        return self._lock

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @property
    def under_way(self) -> bool:
        """Whether we are inside of a call already, in this thread: a signal's handler is."""
        if self._call is not None:
            frame = sys._getframe(1)
            while frame is not None and frame is not self._call:
                frame = frame.f_back  # type: ignore[assignment]
            return frame is not None
        return False

    def afterwards(self, work: Callable[[], None]) -> None:
        """Do ``work`` when the call that is under way has ended, however it ends."""
        self._afterwards = work

    def begin(self) -> None:
        """The caller's frame is a call now; the turn is held.

        Raises:
            AegisError: another one is under way, which would go on with what this one leaves.
        """
        if self.under_way:
            raise AegisError(
                "this model is in the middle of a call, out of which it was called again (by a"
                " signal's handler or a sampler); let that call end first"
            )
        self._call = sys._getframe(1)

    def end(self) -> None:
        """The call has ended."""
        self._call = None
        work, self._afterwards = self._afterwards, None
        if work is not None:
            work()


class TakesTurns(Protocol):
    """What has a turn."""

    @property
    def turn(self) -> Turn:
        """Hold it to make several calls one."""


S = TypeVar("S", bound=TakesTurns)


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a method wait until no other thread uses the object; the same thread must not call it
    out of another such method."""

    @wraps(method)
    def waiting(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        turn = self.turn
        with turn.lock:
            turn.begin()
            try:
                with backend_errors(), turn.inside():
                    return method(self, *args, **kwargs)
            finally:
                turn.end()

    return waiting
