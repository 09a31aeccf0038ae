"""What this process is charged for, and giving back what loading libraries left behind."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

from aegis import heap
from aegis.checkpoint.pagecache import drop_pages
from aegis.engine.footprint import footprint_nbytes, peak_footprint_nbytes

_STATUS = Path("/proc/self/status")


def _status_nbytes(field: str) -> int | None:
    """A kB field of /proc/self/status, or None where there is none.

    As bytes: the first line is the process's name, which may end in the middle of a character."""
    try:
        found = re.search(rb"(?m)^%b:\s+(\d+) kB$" % field.encode(), _STATUS.read_bytes())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def resident_nbytes() -> int:
    """Memory of the process now: anonymous pages and mapped file pages; on macOS its footprint."""
    now = _status_nbytes("VmRSS") or footprint_nbytes()
    if now is not None:
        return now
    import psutil  # type: ignore[import-untyped,unused-ignore]

    return int(psutil.Process().memory_info().rss)


def peak_nbytes() -> int:
    """The most memory this process has held since it started.

    VmHWM on Linux: getrusage's figure would include the peak of the process that started us.
    """
    peak = _status_nbytes("VmHWM") or peak_footprint_nbytes()
    if peak is not None:
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _loaded_files() -> set[str]:
    """Shared libraries and Python files that importing has pulled into the page cache."""
    files: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_bytes().split(b"\n"):
            _, slash, rest = line.partition(b"/")
            files.add(os.fsdecode(slash + rest))  # Whatever the caller's program has mapped.
    for module in list(sys.modules.values()):
        # What stands in sys.modules need be no module: some answer every name, with anything.
        with contextlib.suppress(Exception):
            names = [getattr(module, name, None) for name in ("__cached__", "__file__")]
            files.update(name for name in names if isinstance(name, str))
    return {file for file in files if file.startswith("/") and not file.startswith("/dev")}


def drop_loaded_pages() -> None:
    """Ask the kernel to drop the parts of loaded files that were read but are not mapped.

    Reading ahead while importing leaves tens of MiB of page cache that the process, or its
    container, is charged for. Mapped pages stay; dropped ones come back when they are needed.
    """
    for file in _loaded_files():
        with contextlib.suppress(OSError):
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                drop_pages(fd)
            finally:
                os.close(fd)


def trim() -> None:
    """Return freed heap memory to the system and drop what imports left in the page cache."""
    heap.give_back()
    drop_loaded_pages()
