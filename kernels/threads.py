"""How many threads to compute with (standard library only: plans ask without a backend)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_processors() -> int:
    """Processors this process may run on, by affinity."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many processors a container's quota keeps busy, 1.5 say; None where there is no quota.

    Every group around this process counts, in version 1 (cpu.cfs_quota_us) and 2 (cpu.max).
    """
    return min((quota for folder in _groups(root) for quota in _quotas(folder)), default=None)


def default_threads(root: Path = Path("/")) -> int:
    """One per usable processor, or as many as a container's quota keeps busy."""
    processors, quota = usable_processors(), cpu_quota(root)
    return processors if quota is None else max(1, min(processors, math.ceil(quota)))


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the groups that this process is in, from the inside out."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "cpu" in controllers.split(","):
            names = (controllers, "cpu")
        elif number == "0" and not controllers:
            names = ("unified", "")
        else:
            continue
        base = next((mounts / name for name in names if (mounts / name).is_dir()), mounts)
        group = base.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
        # Inside a container the path may be the host's; what is mounted is then all there is.
        for folder in (group, *group.parents) if group.is_dir() else (base,):
            yield folder
            if folder == base:
                break


def _quotas(folder: Path) -> Iterator[float]:
    v1 = (_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    for words in (_text(folder / "cpu.max").split(), list(v1)):
        # No quota is "max" in version 2 and -1 in version 1.
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            yield int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        # As bytes: a group may be named in any, and with what Python takes for the end of a line.
        return path.read_bytes().decode(errors="surrogateescape")
    except OSError:
        return ""
