"""Whose turn it is: one thread at a time, of the process that opened the model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from aegis.errors import AegisError

P = ParamSpec("P")
R = TypeVar("R")


class Turn:
    """A lock that its holder may take again. Held over several calls it makes them one.

    A child made by fork has the memory of its parent, but none of the threads that read and compute
    (nor the memory that reads go into), so it is refused there instead of waiting for ever.
    """

    def __init__(self, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """inside: makes what is entered with a turn, by the thread that has it."""
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._inside, self._depth = inside, 0
        self._entered: AbstractContextManager[Any] = nullcontext()

    @property
    def here(self) -> bool:
        """Whether this is the process that opened the model."""
        return os.getpid() == self._process

    def __enter__(self) -> None:
        if not self.here:
            raise AegisError(
                "this model was opened by another process, which forked this one; open it again"
                " here, or start processes by the spawn method"
            )
        self._lock.acquire()
        depth = self._depth
        try:
            if not depth:
                self._entered = self._inside()
                self._entered.__enter__()
            self._depth = depth + 1
        except BaseException:
            # Ctrl-C, too: what is held or counted wrongly now would be so for ever.
            self._depth = depth
            self._lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        depth = self._depth - 1
        try:
            if not depth:
                self._entered.__exit__(None, None, None)
        finally:
            self._depth = depth
            self._lock.release()


class TakesTurns(Protocol):
    """What has a turn."""

    @property
    def turn(self) -> Turn:
        """Hold it to make several calls one."""


S = TypeVar("S", bound=TakesTurns)


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a method wait until no other thread uses the object."""

    @wraps(method)
    def waiting(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turn:
            return method(self, *args, **kwargs)

    return waiting
