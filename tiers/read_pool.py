"""Reader threads with two queues: demand before guess, first come first served within each.

The C++ pool of aegis.kernels.native is used where it is built; the Python pool does the same with
threads and os.preadv, and takes the read call as an argument so that tests can make it fail.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

ReadCall = Callable[[int, memoryview, int], int]
"""(file descriptor, destination, offset) -> bytes read; raises OSError; 0 at the end of the file."""


class ReadPool(Protocol):
    """What both pools offer. Tickets are positive ints; ``result`` and ``cancel`` forget them."""

    def submit(self, fd: int, offset: int, nbytes: int, address: int, demand: bool) -> int:
        """Queue a read of ``nbytes`` into memory at ``address``; returns its ticket."""

    def promote(self, ticket: int) -> bool:
        """Move a guess that has not begun behind the demands; False if it had begun or was one."""

    def cancel(self, ticket: int) -> bool:
        """Withdraw and forget a read that has not begun; False (and no effect) if it has."""

    def done(self, ticket: int) -> bool:
        """Whether the read has ended."""

    def wait(self, ticket: int) -> None:
        """Block until the read has ended. Ctrl-C interrupts."""

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        """Those of ``tickets`` that have ended; with ``block`` at least one unless there are none."""

    def result(self, ticket: int) -> int:
        """Bytes read, or -errno, of a read that has ended; forgets the ticket.

        Fewer bytes than asked for mean the end of the file."""

    @property
    def read_nbytes(self) -> int:
        """Bytes read since open."""

    @property
    def depth(self) -> int:
        """Reads queued or being read."""

    def close(self) -> None:
        """Withdraw what is queued (result -ECANCELED) and join the threads."""


def open_read_pool(threads: int, drop_cache: bool = False) -> ReadPool:
    """The C++ pool if it is built, else the Python one.

    drop_cache: drop a read's pages from the page cache after it, for files read buffered."""
    try:
        from aegis.kernels.native._native import ReadPool as NativeReadPool
    except ImportError:
        return PythonReadPool(threads, drop_cache)
    return NativeReadPool(threads, drop_cache)


class PythonReadPool:
    """The pool in Python. While one is open the interpreter switches threads faster: at its default of
    5 ms every completion would wait that long for a busy main thread."""
