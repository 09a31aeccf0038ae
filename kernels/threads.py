"""How many threads to compute with (standard library only: plans ask without a backend)."""

from __future__ import annotations

import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_processors() -> int:
    """Processors this process may run on, by affinity."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def default_threads() -> int:
    """One per usable processor, or as many as a container's quota keeps busy."""
    processors = usable_processors()
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, min(processors, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return processors
