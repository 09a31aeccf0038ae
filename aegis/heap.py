"""Giving freed memory back to the system, where the C library can."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Return what is free on the heap: loading and encoding take a lot for a moment."""
    gc.collect()
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):  # another C library
            return
