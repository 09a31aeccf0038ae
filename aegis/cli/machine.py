"""What memory this machine, or the container around the process, has free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from aegis.engine.limits import memory_limits
from aegis.planner import format_size
from aegis.settings import DEFAULT_CAP


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
    """What /proc and the memory cgroups under ``root`` say; elsewhere what psutil says."""
    limits = memory_limits(root)
    free = _physical_nbytes() if limits.free is None else limits.free
    return Machine(free, limits.container_limit)


def _physical_nbytes() -> int:
    """All memory of the machine, where nothing says how much of it is free."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_cap(machine: Machine) -> int:
    """The smaller of 4 GiB and half of what is free."""
    return max(1, min(DEFAULT_CAP, machine.free_nbytes // 2))
