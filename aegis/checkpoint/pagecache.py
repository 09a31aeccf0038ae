"""Leaving nothing in the page cache. All of it is advice: a file system may not take it."""

from __future__ import annotations

import contextlib
import os


def drop_pages(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Ask the kernel to forget cached pages of a file (all of it by default)."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def expect_random_reads(fd: int) -> None:
    """Ask the kernel not to read ahead."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
