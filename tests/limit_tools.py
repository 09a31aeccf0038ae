"""Containers' limits as the governor reads them."""

from __future__ import annotations

from pathlib import Path

from aegis.engine.limits import MemoryGroup, MemoryLimits


def no_limits() -> MemoryLimits:
    """No container."""
    return MemoryLimits(None, None, None)


def limits_of(folder: Path, limit: int, usage: int) -> MemoryLimits:
    """One version 2 group."""
    folder.mkdir(exist_ok=True)
    (folder / "memory.current").write_text(str(usage))
    group = MemoryGroup(2, folder / "memory.max", limit, usage, 0)
    return MemoryLimits(None, None, None, (group,))
