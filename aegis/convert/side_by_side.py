"""Making the files of a store, several at a time.

One after the other, their ends and the one that is written from start to end would leave the disk
with little to do.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Event
from typing import TypeVar

from aegis.convert.behind import Behind, Ended

Made = TypeVar("Made")

AT_ONCE = 2
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LOOK_S = 0.05


class Reports:
    """Adds up what is said to be done of files, and tells ``progress``, in the caller's thread."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None = None) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._said = SimpleQueue[tuple[int, Event] | None]()
        self._ended: Event | None = None

    def begin_at(self, nbytes: int) -> None:
        """So many bytes are there already."""
        self._done = nbytes

    def __call__(self, nbytes: int) -> None:
        """So many bytes more.

        Raises:
            Ended: there is nobody to be told any more.
        """
        if self._ended is None:
            self._add(nbytes)
            return
        added = Event()
        self._said.put((nbytes, added))
        while not added.wait(_LOOK_S):
            if self._ended.is_set():
                raise Ended

    def _add(self, nbytes: int) -> None:
        # What a full disk ended is made again.
        self._done = min(self._done + nbytes, self._total)
        if self._progress:
            self._progress(self._done, self._total)

    def from_threads(self, ended: Event) -> None:
        """From now on they come from other threads, until ``ended``."""
        self._said, self._ended = SimpleQueue(), ended

    def hear(self, made: Sequence[Future[Made]]) -> None:
        """Pass on what is said until all of these are made, or nothing more is to be made."""
        ended, left = self._ended, len(made)
        for future in made:
            future.add_done_callback(lambda _: self._said.put(None))
        while left and ended is not None and not ended.is_set():
            if (said := self._said.get()) is None:
                left -= 1
                continue
            nbytes, added = said
            self._add(nbytes)
            added.set()
        if not left:
            self._ended = None


def side_by_side(
    at_once: int, files: Sequence[Callable[[Behind], Made]], report: Reports
) -> list[Made]:
    """What making each of the files gives. So many are made at a time, begun in order; one after
    the other where the disk has no room for more.

    Each is given what finishes it. Where one fails, or this is interrupted, no other is begun, and
    those that are being made end when they next ask whether to go on, or report.
    """
    made = dict[int, Made]()
    if at_once > 1:
        ended = Event()
        behinds = [Behind(ended) for _ in range(at_once)]
        try:
            _several(behinds, ended, files, report, made)
        except OSError as error:
            if error.errno not in NO_ROOM or any(behind.failed for behind in behinds):
                raise
    with Behind() as behind:
        for number, file in enumerate(files):
            if number not in made:
                made[number] = file(behind)
    return [made[number] for number in range(len(files))]


def _several(
    behinds: Sequence[Behind],
    ended: Event,
    files: Sequence[Callable[[Behind], Made]],
    report: Reports,
    made: dict[int, Made],
) -> None:
    """``made``: what was made until the first error, if there is one."""
    crowded = Event()
    with ExitStack() as stack:
        free = SimpleQueue[Behind]()
        for behind in behinds:
            free.put(stack.enter_context(behind))
        threads = stack.enter_context(ThreadPoolExecutor(len(behinds)))

        def make(number: int) -> None:
            behind = free.get()
            try:
                behind.go_on()
                if crowded.is_set():
                    raise Ended
                made[number] = files[number](behind)
            except Ended:
                raise
            except OSError as error:
                # Room may be back, and the others be finished in it.
                (crowded if error.errno in NO_ROOM else ended).set()
                raise
            except BaseException:
                ended.set()
                raise
            finally:
                free.put(behind)

        report.from_threads(ended)
        try:
            asked = [threads.submit(make, number) for number in range(len(files))]
            report.hear(asked)
            errors = [error for each in asked if (error := each.exception()) is not None]
            # The first that is not due to another.
            for error in sorted(errors, key=lambda error: isinstance(error, Ended)):
                raise error
        except BaseException:
            ended.set()
            raise
