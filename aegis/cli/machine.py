"""What memory this machine, or the container around the process, has free."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aegis.planner import format_size
from aegis.settings import DEFAULT_CAP

UNLIMITED = 1 << 60
"""Limits from here on mean "none": version 1 writes 2^63 rounded to a page."""


@dataclass(frozen=True)
class Machine:
    """Free memory in bytes, and the limit of the container if there is one."""

    free_nbytes: int
    limit_nbytes: int | None

    def describe(self) -> str:
        """One line for people."""
        limit = "" if self.limit_nbytes is None else f" of a {format_size(self.limit_nbytes)} limit"
        return f"{format_size(self.free_nbytes)} free{limit}"


def read_machine(root: Path = Path("/")) -> Machine:
    """Look at /proc and the memory cgroups under ``root``; elsewhere ask psutil."""
    free = _meminfo_nbytes(root / "proc/meminfo")
    if free is None:
        import psutil

        return Machine(int(psutil.virtual_memory().available), None)
    limit = None
    for cgroup_limit, cgroup_free in _cgroups(root):
        limit = cgroup_limit if limit is None else min(limit, cgroup_limit)
        free = min(free, cgroup_free)
    return Machine(max(free, 0), limit)


def default_cap(machine: Machine) -> int:
    """The smaller of 4 GiB and half of what is free."""
    return max(1, min(DEFAULT_CAP, machine.free_nbytes // 2))


def direct_io(folder: Path) -> bool | None:
    """Whether files in ``folder`` (or its nearest existing parent) can bypass the page cache.

    None where that cannot be told without leaving a file behind.
    """
    temporary, direct = getattr(os, "O_TMPFILE", None), getattr(os, "O_DIRECT", None)
    if temporary is None or direct is None:
        return None
    while not folder.is_dir():
        folder = folder.parent
    try:
        fd = os.open(folder, temporary | direct | os.O_RDWR, 0o600)
    except OSError as error:
        return False if error.errno == errno.EINVAL else None
    os.close(fd)
    return True


def _meminfo_nbytes(path: Path) -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, free) of every limited group around this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            base, names = root / "sys/fs/cgroup/memory", ("limit_in_bytes", "usage_in_bytes")
        elif not controllers:
            base, names = root / "sys/fs/cgroup", ("max", "current")
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                limit, usage = (int((folder / f"memory.{name}").read_text()) for name in names)
                if limit < UNLIMITED:
                    yield limit, limit - usage + _reclaimable_nbytes(folder)
            if folder == base:
                break


def _reclaimable_nbytes(folder: Path) -> int:
    """Page cache that the kernel gives back before it refuses memory."""
    table = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(table.get("total_inactive_file", table.get("inactive_file", 0)))
