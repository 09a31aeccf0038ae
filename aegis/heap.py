"""Giving freed memory back to the system, where the C library can."""

from __future__ import annotations

import ctypes
import gc
import sys


def trim() -> None:
    """Return what is free on the heap; quick, but garbage in cycles is not free yet."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):  # another C library
            return


def give_back() -> None:
    """The same with garbage collected: loading and encoding take a lot for a moment."""
    gc.collect()
    trim()
