"""Making the files of a store, several at a time.

One after the other, their ends and the one that is written from start to end would leave the disk
with little to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Event, Lock
from typing import TypeVar

from aegis.convert.behind import Behind, Ended

Made = TypeVar("Made")

AT_ONCE = 2


class Reports:
    """Adds up what is said to be done of several files."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total, self._progress = total, progress
        self._done, self._lock = 0, Lock()

    def begin_at(self, nbytes: int) -> None:
        """So many bytes are there already."""
        self._done = nbytes

    def __call__(self, nbytes: int) -> None:
        """So many bytes more."""
        with self._lock:
            self._done += nbytes
            if self._progress:
                self._progress(self._done, self._total)


def side_by_side(at_once: int, files: Sequence[Callable[[Behind], Made]]) -> list[Made]:
    """What making each of the files gives. So many are made at a time, begun in order.

    Each is given what finishes it. Where one fails, or this is interrupted, no other is begun, and
    those that are being made end when they next ask whether to go on.
    """
    ended = Event()
    with ExitStack() as stack:
        free = SimpleQueue[Behind]()
        for _ in range(at_once):
            free.put(stack.enter_context(Behind(ended)))
        threads = stack.enter_context(ThreadPoolExecutor(at_once))

        def make(file: Callable[[Behind], Made]) -> Made:
            behind = free.get()
            try:
                behind.go_on()
                return file(behind)
            except BaseException:
                ended.set()
                raise
            finally:
                free.put(behind)

        try:
            made = [threads.submit(make, file) for file in files]
            wait(made, return_when=FIRST_EXCEPTION)
            return _results(made)
        except BaseException:
            ended.set()
            raise


def _results(made: Sequence[Future[Made]]) -> list[Made]:
    """All of them; or the first error that is not due to another."""
    errors = [error for future in made if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, Ended):
            raise error
    return [future.result() for future in made]
