"""Leaving nothing in the page cache."""

from __future__ import annotations

import os


def drop_pages(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Ask the kernel to forget cached pages of a file (all of it by default)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def expect_random_reads(fd: int) -> None:
    """Ask the kernel not to read ahead."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
