"""macOS: the memory that Activity Monitor shows and that the system kills by.

The resident size counts neither compressed pages nor the GPU's share of unified memory; the
physical footprint counts both, and its peak is kept.
"""

from __future__ import annotations

import ctypes
import os
import sys

_RUSAGE_INFO_V4 = 4
_UUID_NBYTES = 16
_NOW, _PEAK, _FIELDS = 7, 28, 35
"""Places of ri_phys_footprint and ri_lifetime_max_phys_footprint among the 64-bit fields behind the
UUID of struct rusage_info_v4, and how many there are (sys/resource.h)."""


def footprint_nbytes() -> int | None:
    """The physical footprint of this process now; None on other systems."""
    return _field(_NOW)


def peak_footprint_nbytes() -> int | None:
    """The largest it has been; None on other systems."""
    return _field(_PEAK)


def _field(place: int) -> int | None:
    if sys.platform != "darwin":
        return None
    libc = ctypes.CDLL(None)
    buffer = (ctypes.c_char * (_UUID_NBYTES + 8 * _FIELDS))()
    if libc.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V4, ctypes.byref(buffer)):
        return None
    return parse(bytes(buffer), place)


def parse(info: bytes, place: int) -> int:
    """A 64-bit field of struct rusage_info_v4."""
    start = _UUID_NBYTES + 8 * place
    return int.from_bytes(info[start : start + 8], sys.byteorder)
