"""Programs built from the kernels' sources without Python, for this processor and for aarch64."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[1] / "kernels" / "native"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
CROSS_CLANG = {"CMAKE_CXX_COMPILER": "clang++", "CMAKE_CXX_COMPILER_TARGET": "aarch64-linux-gnu"}
"""What Macs compile with, which takes a quarter of g++'s time. It needs the other's libraries."""
CROSS_LIBRARIES = "/usr/aarch64-linux-gnu"


@dataclass(frozen=True)
class Build:
    """A build folder and what runs its programs."""

    folder: Path
    runner: tuple[str, ...] = ()

    def run(self, program: str, *args: object) -> str:
        """What a program prints; a failed one fails the test with its own words."""
        command = [*self.runner, str(self.folder / program), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def digests(self, isa: str, threads: int = 1, environment: str = "default") -> list[str]:
        """A line for each case of each kernel."""
        lines = self.run("aegis_digests", isa, threads, environment).splitlines()
        assert len(lines) > 200
        return lines


def build(folder: Path, *targets: str, **options: str) -> None:
    """Configure and build; what the compiler warns of fails the test."""
    cmake = _tool("cmake", options.get("CMAKE_CXX_COMPILER", "g++"))
    defines = {"AEGIS_MODULE": "OFF", "AEGIS_DRIVERS": "ON", "CMAKE_CXX_FLAGS": "-Werror"} | options
    setup = [cmake, "-S", str(SOURCES), "-B", str(folder)]
    for command in (
        setup + [f"-D{name}={value}" for name, value in defines.items()],
        [cmake, "--build", str(folder), "--parallel", str(os.cpu_count())]
        + (["--target", *targets] if targets else []),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def build_for_aarch64(folder: Path) -> Build:
    """The whole extension and the programs, cross-compiled."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        _missing("qemu-aarch64")
    if shutil.which(CROSS_COMPILER) is None:
        _missing(CROSS_COMPILER)
    clang = shutil.which("clang++") is not None
    build(
        folder,
        **(CROSS_CLANG if clang else {"CMAKE_CXX_COMPILER": CROSS_COMPILER}),
        AEGIS_MODULE="ON",
        CMAKE_CXX_FLAGS=f"-Werror -isystem {_python_for_aarch64(folder / 'include')}",
        CMAKE_SYSTEM_NAME="Linux",
        CMAKE_SYSTEM_PROCESSOR="aarch64",
        Python_EXECUTABLE=sys.executable,
        Python_INCLUDE_DIR=sysconfig.get_paths()["include"],
    )
    return Build(folder, (str(emulator), "-L", CROSS_LIBRARIES))


def _python_for_aarch64(folder: Path) -> Path:
    """Debian keeps pyconfig.h apart by processor, and has only this one's: the same is said there
    of another with types as wide."""
    include = Path(sysconfig.get_paths()["include"])
    theirs, ours = (
        Path(processor) / include.name / "pyconfig.h"
        for processor in ("aarch64-linux-gnu", sysconfig.get_config_var("MULTIARCH") or "any")
    )
    if (include.parent / ours).exists():
        (folder / theirs).parent.mkdir(parents=True)
        (folder / theirs).write_text(f'#include "{include.parent / ours}"\n')
    return folder


def _tool(name: str, compiler: str) -> str:
    if shutil.which(compiler) is None:
        _missing(compiler)
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        _missing(name)
    return str(found)


def _missing(name: str) -> None:
    """Skips with the reason; where every processor must be tested, fails."""
    reason = f"{name} is not installed: kernels are not built for other processors"
    if os.environ.get("AEGIS_ALL_PROCESSORS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
