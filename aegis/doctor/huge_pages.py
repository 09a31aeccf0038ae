"""Huge pages: what the system's setting says, and whether a real arena gets them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from aegis.tiers.arena import HUGE_NBYTES, Arena
from aegis.tiers.errors import ArenaError

MIB = 1 << 20
TEST_ARENA_NBYTES = 32 * MIB


@dataclass(frozen=True)
class HugePages:
    """The setting, and what a test arena got. None: unknown, or not tried."""

    setting: str | None
    """``always``, ``madvise`` or ``never``; None where the system has no such setting."""
    arena_nbytes: int
    """Size of the test arena; 0 where there was no memory for one."""
    huge_nbytes: int | None
    """How much of it came in huge pages."""


def read_setting(root: Path = Path("/")) -> str | None:
    """The word in brackets of transparent_hugepage/enabled."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return None
    return chosen[1] if chosen else None


def arena_nbytes_for(free_nbytes: int | None) -> int:
    """Size of a test arena: 32 MiB, or a quarter of the free memory in whole huge pages."""
    if free_nbytes is None:
        return TEST_ARENA_NBYTES
    return min(TEST_ARENA_NBYTES, free_nbytes // 4 // HUGE_NBYTES * HUGE_NBYTES)


def try_huge_pages(free_nbytes: int | None, root: Path = Path("/")) -> HugePages:
    """Take an arena as the engine does, and look what pages it lies in."""
    setting, nbytes = read_setting(root), arena_nbytes_for(free_nbytes)
    if not nbytes:
        return HugePages(setting, 0, None)
    try:
        arena = Arena(nbytes)
    except ArenaError:
        return HugePages(setting, 0, None)
    try:
        return HugePages(setting, nbytes, arena.huge_nbytes())
    finally:
        arena.close()
