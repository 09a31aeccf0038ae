"""Finishing a file while the next one is made.

A file is finished once the disk says that it has it, and a journal says so too: a fifth of the time
that a layer takes, in which nothing else would be read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType

Step = Callable[[], object]


class Behind:
    """Takes the last steps of each file on a thread of its own, one file at a time, in order.

    A step that fails is the last one; its error is raised by the next call, or at the end. Where a
    file's last step found no room, because the file made meanwhile took it, an error that ends all
    has that step taken again once the room is free.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._steps: list[Step] = []
        self._under_way: Future[None] | None = None
        self._without_room: Step | None = None

    def __enter__(self) -> Behind:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._thread.shutdown()
            # Those of a file that never came to its last one; its room is what the other lacked.
            lacking = [self._without_room] if self._without_room else []
            for step in self._steps + lacking:
                with suppress(OSError):
                    step()

    def first(self, step: Step) -> None:
        """A step to be taken before the one that is submitted next."""
        self._steps.append(step)

    def submit(self, step: Step) -> None:
        """Take the steps of a file, of which this is the last, once those of the one before are
        taken."""
        self._wait()
        steps, self._steps = self._steps, []
        self._under_way = self._thread.submit(self._take, steps, step)

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _take(self, steps: list[Step], last: Step) -> None:
        for step in steps:
            step()
        try:
            last()
        except OSError:
            self._without_room = last
            raise
