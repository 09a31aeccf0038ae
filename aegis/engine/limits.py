"""What memory the machine has, and how much of it the container around this process allows.

Everything is read from files under ``root``: /proc for the machine, and for containers the memory
groups (cgroups, version 1, 2 or both) that this process is in, with all their parents.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aegis.checkpoint.storage import lines_of

UNLIMITED = 1 << 60
"""Limits from here on mean "none": version 1 writes 2^63 rounded down to a page."""

_MEMORY = {1: "memory.usage_in_bytes", 2: "memory.current"}
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup with a limit: this process's own or one around it."""

    version: int
    source: Path
    """The file that states the limit."""
    limit: int
    usage: int
    """Charged now, page cache included."""
    reclaimable: int
    """Unmapped page cache, which the kernel gives back before it refuses memory."""

    @property
    def folder(self) -> Path:
        """Where the group's files lie."""
        return self.source.parent

    @property
    def usage_path(self) -> Path:
        """The file that states what is charged now."""
        return self.folder / _MEMORY[self.version]

    @property
    def free(self) -> int:
        """What can still be charged."""
        return max(0, self.limit - self.usage + self.reclaimable)


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes of the machine and of the tightest container. None: there is none, or it is unknown."""

    total: int | None
    """Physical memory."""
    available: int | None
    """What programs can have without swapping (MemAvailable)."""
    swap: int | None
    """Free swap space."""
    groups: tuple[MemoryGroup, ...] = ()
    """Every limited group around this process, from the inside out."""

    @property
    def tightest(self) -> MemoryGroup | None:
        """The group with the smallest limit."""
        return min(self.groups, key=lambda group: group.limit, default=None)

    @property
    def container_limit(self) -> int | None:
        """The smallest limit of any group around this process."""
        return None if self.tightest is None else self.tightest.limit

    @property
    def container_usage(self) -> int | None:
        """What the tightest group is charged for now, page cache included."""
        return None if self.tightest is None else self.tightest.usage

    @property
    def source(self) -> Path | None:
        """The file that states the tightest limit."""
        return None if self.tightest is None else self.tightest.source

    @property
    def version(self) -> int | None:
        """The cgroup version of the tightest group: 1 or 2."""
        return None if self.tightest is None else self.tightest.version

    @property
    def ceiling(self) -> int | None:
        """More than this no process here can ever hold: the container's limit or the machine's."""
        return min((n for n in (self.total, self.container_limit) if n is not None), default=None)

    @property
    def free(self) -> int | None:
        """What is free now: the least that the machine and every group around allow."""
        figures = [group.free for group in self.groups]
        return min((*figures, *([] if self.available is None else [self.available])), default=None)


def memory_limits(root: Path = Path("/")) -> MemoryLimits:
    """Look at the files under ``root``; on systems without /proc ask psutil about the machine."""
    table = _meminfo(root / "proc/meminfo")
    if table is None:
        return _other_system() if sys.platform != "linux" else MemoryLimits(None, None, None)
    return MemoryLimits(
        table.get("MemTotal"),
        # Kernels before 3.14 do not estimate what is available.
        table.get("MemAvailable", table.get("MemFree")),
        table.get("SwapFree"),
        tuple(_limited_groups(root)),
    )


def _other_system() -> MemoryLimits:
    import psutil  # type: ignore[import-untyped,unused-ignore]

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return MemoryLimits(int(memory.total), int(memory.available), int(swap.free))


def _meminfo(path: Path) -> dict[str, int] | None:
    try:
        text = path.read_text()
    except (OSError, ValueError):
        return None
    return {name: int(kib) * 1024 for name, kib in re.findall(r"(?m)^(\w+):\s+(\d+) kB$", text)}


def _limited_groups(root: Path) -> Iterator[MemoryGroup]:
    for version, base, group in _own_groups(root):
        for folder in (group, *group.parents):
            if (limited := _read_group(version, folder)) is not None:
                yield limited
            if folder == base:
                break


def _own_groups(root: Path) -> Iterator[tuple[int, Path, Path]]:
    """(version, where the hierarchy is mounted, this process's group in it)."""
    mounts = _mounts(root)
    for line in lines_of(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            version, usual = 1, [("/", root / "sys/fs/cgroup/memory")]
        elif number == "0" and not controllers:
            folders = (root / "sys/fs/cgroup/unified", root / "sys/fs/cgroup")
            version, usual = 2, [("/", folder) for folder in folders if folder.is_dir()][:1]
        else:
            continue
        for top, base in mounts.get(version, usual):
            yield version, base, _inside(top, base, path)


def _inside(top: str, base: Path, path: str) -> Path:
    """The folder of group ``path`` where the subtree ``top`` of the hierarchy is mounted at base.

    A container may see its own group mounted as the top while the path names the host's: what is
    mounted is then all there is to see.
    """
    parts, head = path.strip("/").split("/"), [part for part in top.split("/") if part]
    if parts[: len(head)] != head or ".." in parts:
        return base
    return base.joinpath(*parts[len(head) :])


def _mounts(root: Path) -> dict[int, list[tuple[str, Path]]]:
    """cgroup version to (which subtree is mounted, where); only version 1's memory controller."""
    found: dict[int, list[tuple[str, Path]]] = {}
    for line in lines_of(root / "proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        fields, kinds = place.split(" "), kind.split(" ")
        if len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2":
            version = 2
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            version = 1
        else:
            continue
        top, where = (_ESCAPE.sub(lambda m: chr(int(m[1], 8)), text) for text in fields[3:5])
        found.setdefault(version, []).append((top, root / where.lstrip("/")))
    return found


def _read_group(version: int, folder: Path) -> MemoryGroup | None:
    stat = _stat(folder / "memory.stat")
    limits = [
        (limit, folder / name) for name in _LIMITS[version] if (limit := _limit(folder, name))
    ]
    # Version 1 states here what parents outside of the container's view allow.
    outer = stat.get("hierarchical_memory_limit", UNLIMITED)
    if version == 1 and outer < min((limit for limit, _ in limits), default=UNLIMITED):
        limits.append((outer, folder / "memory.stat"))
    if not limits:
        return None
    limit, source = min(limits)
    usage = _number(folder / _MEMORY[version]) or 0
    reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return MemoryGroup(version, source, limit, usage, reclaimable)


def _limit(folder: Path, name: str) -> int | None:
    number = _number(folder / name)
    return None if number is None or not 0 < number < UNLIMITED else number


def _number(path: Path) -> int | None:
    """The number in a file; None for ``max``, for anything else and where there is no file."""
    text = "".join(lines_of(path)[:1]).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _stat(path: Path) -> Mapping[str, int]:
    return {name: int(n) for name, n in _pairs(path) if n.isascii() and n.isdigit()}


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    for line in lines_of(path):
        name, _, value = line.partition(" ")
        yield name, value.strip()
