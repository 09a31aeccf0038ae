"""The processor: its name, how many cores this process may use, and what its kernels run on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from aegis.kernels.threads import cpu_quota, usable_processors

_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon": {"asimd"},
}
"""What /proc/cpuinfo must name for each instruction set that kernels are written for."""


@dataclass(frozen=True)
class Processor:
    """A processor as this process sees it."""

    name: str
    architecture: str
    cores: int
    """Logical processors of the machine."""
    usable_cores: int
    """Those that this process may run on (its affinity)."""
    quota_cores: float | None
    """As many as a container's quota keeps busy; None: there is no quota."""
    instructions: tuple[str, ...]
    """Instruction sets it has of those that kernels are written for, best first."""
    isa: str | None
    """The one the native kernels use; None where they are not built."""
    isas: tuple[str, ...]
    """All that the native kernels could use here, best first."""
    wanted_isa: str | None
    """What AEGIS_ISA asks for, if it is set."""


def read_processor(root: Path = Path("/")) -> Processor:
    """Look at /proc under ``root``; on systems without it ask the system's own tools."""
    table = _cpuinfo(root / "proc/cpuinfo")
    isa, isas = native_isas()
    return Processor(
        name=_name(table, root),
        architecture=platform.machine(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_processors(),
        quota_cores=cpu_quota(root),
        instructions=_instructions(table),
        isa=isa,
        isas=isas,
        wanted_isa=os.environ.get("AEGIS_ISA") or None,
    )


def native_isas() -> tuple[str | None, tuple[str, ...]]:
    """(the instruction set in use, all that could be) of the native kernels, if they are built."""
    try:
        from aegis.kernels.native import _native
    except ImportError:
        return None, ()
    return _native.isa(), tuple(_native.isas())


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first processor's fields, and those about the whole board."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    table: dict[str, str] = {}
    for name, value in re.findall(r"(?m)^([^:\n]+?)\s*:[ \t]*(.*?)\s*$", text):
        table.setdefault(name, value)
    return table


def _name(table: dict[str, str], root: Path) -> str:
    if table.get("model name"):
        return table["model name"]
    if "CPU part" in table:
        board = table.get("Model") or _board(root)
        part = f"implementer {table.get('CPU implementer', '?')} part {table['CPU part']}"
        return f"{board} ({part})" if board else f"{platform.machine()} ({part})"
    return _name_on_macos() or platform.processor() or platform.machine() or "unknown"


def _board(root: Path) -> str:
    try:
        return (root / "proc/device-tree/model").read_text(errors="replace").strip("\0\n ")
    except OSError:
        return ""


def _name_on_macos() -> str:
    if sys.platform != "darwin":
        return ""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _instructions(table: dict[str, str]) -> tuple[str, ...]:
    flags = set(table.get("flags", table.get("Features", "")).split())
    if not flags and platform.machine() in ("arm64", "aarch64"):
        return ("neon",)
    return tuple(name for name, needed in _FLAGS.items() if needed <= flags)
