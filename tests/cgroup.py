"""Run a command inside a memory cgroup (version 1 or 2) whose limit is the cap, swap off.

``run(cmd, limit)`` starts it there and returns what the kernel counted. ``cold=True`` drops the
page cache first, so that every library page the command touches is charged to it; pages that a
running process maps cannot be dropped, so ``cold_python`` copies the interpreter and its packages
to files that nobody has mapped.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count()
_DROP = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Counters:
    """What the kernel has counted for the group so far."""

    usage_nbytes: int
    pgmajfault: int
    refault: int


@dataclass(frozen=True)
class Result:
    """How the command ended and what it was charged for."""

    rc: int
    stdout: str
    stderr: str
    peak_nbytes: int
    """The most the group was ever charged, page cache and kernel memory included."""
    oom_kills: int
    first_output: Counters | None
    """At the first byte on stdout; None where there was no output."""
    end: Counters
    """After the command ended: ``usage_nbytes`` is what it left behind."""

    @property
    def faults_after_first_output(self) -> int:
        """Major faults and refaults between the first byte of output and the end."""
        if self.first_output is None:
            raise AssertionError(f"no output: exit code {self.rc}\n{self.stderr}")
        before, after = self.first_output, self.end
        return after.pgmajfault - before.pgmajfault + after.refault - before.refault


class MemoryCgroup:
    """One group. Reads the files of either version."""

    def __init__(self, path: Path, version: int) -> None:
        self.path, self.version = path, version

    def limit(self, nbytes: int) -> None:
        """Set the hard limit, with no swap on top of it."""
        if self.version == 1:
            self._write("memory.limit_in_bytes", nbytes)
            self._write("memory.memsw.limit_in_bytes", nbytes, optional=True)
            self._write("memory.swappiness", 0, optional=True)
        else:
            self._write("memory.max", nbytes)
            self._write("memory.swap.max", 0, optional=True)

    def counters(self) -> Counters:
        """Usage, major faults and refaults up to now."""
        stat = self._table("memory.stat")
        usage = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        refault = sum(
            count for name, count in stat.items() if name.startswith("workingset_refault")
        )
        return Counters(self._number(usage), stat["pgmajfault"], refault)

    def peak_nbytes(self) -> int:
        """The most that was ever charged."""
        return self._number("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")

    def oom_kills(self) -> int:
        """Processes killed for memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return self._table(name)["oom_kill"]

    def run(
        self,
        cmd: Sequence[str],
        *,
        cold: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str = "",
    ) -> Result:
        """Start ``cmd`` inside the group and wait for it; see ``Result``."""
        if cold:
            drop_caches()
        enter = f'echo $$ > "{self.path}/cgroup.procs" && exec "$@"'
        with subprocess.Popen(
            ["/bin/sh", "-c", enter, "sh", *cmd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            cwd=cwd,
        ) as process:
            stdout, stderr, first = self._watch(process, stdin)
        return Result(
            rc=process.returncode,
            stdout=stdout,
            stderr=stderr,
            peak_nbytes=self.peak_nbytes(),
            oom_kills=self.oom_kills(),
            first_output=first,
            end=self.counters(),
        )

    def _watch(
        self, process: subprocess.Popen[bytes], stdin: str
    ) -> tuple[str, str, Counters | None]:
        source, output, log = process.stdin, process.stdout, process.stderr
        assert source is not None
        assert output is not None
        assert log is not None
        errors: list[bytes] = []
        reader = threading.Thread(target=lambda: errors.append(log.read()))
        reader.start()
        with contextlib.suppress(BrokenPipeError):
            source.write(stdin.encode())
            source.close()
        head = output.read(1)
        first = self.counters() if head else None
        stdout = head + output.read()
        process.wait()
        reader.join()
        return stdout.decode(errors="replace"), errors[0].decode(errors="replace"), first

    def _number(self, name: str) -> int:
        return int((self.path / name).read_text())

    def _table(self, name: str) -> dict[str, int]:
        lines = (self.path / name).read_text().split("\n")
        return {key: int(value) for key, value in (line.split() for line in lines if line)}

    def _write(self, name: str, value: int, *, optional: bool = False) -> None:
        try:
            (self.path / name).write_text(str(value))
        except OSError:
            if not optional:
                raise


def drop_caches() -> None:
    """Write dirty pages back and drop every page of cache that no process maps."""
    os.sync()
    _DROP.write_text("3")


def _create() -> MemoryCgroup:
    name = f"aegis-test-{os.getpid()}-{next(_NUMBERS)}"
    if (V1 / "memory.limit_in_bytes").exists() or (V1 / "memory.usage_in_bytes").exists():
        path, version = V1 / name, 1
    elif "memory" in (V2 / "cgroup.controllers").read_text().split():
        control = V2 / "cgroup.subtree_control"
        if "memory" not in control.read_text().split():
            control.write_text("+memory")
        path, version = V2 / name, 2
    else:
        raise OSError("no memory controller is mounted under /sys/fs/cgroup")
    path.mkdir()
    group = MemoryCgroup(path, version)
    try:
        group.peak_nbytes()
    except OSError:
        path.rmdir()
        raise
    return group


def _remove(path: Path) -> None:
    for _ in range(50):
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.1)
    raise RuntimeError(f"{path} still holds a process")


@contextlib.contextmanager
def memory_cgroup(limit: int | None) -> Iterator[MemoryCgroup]:
    """A fresh group limited to ``limit`` bytes (None: only counted), removed at the end."""
    group = _create()
    try:
        if limit is not None:
            group.limit(limit)
        yield group
    finally:
        _remove(group.path)


def run(
    cmd: Sequence[str],
    limit: int | None,
    *,
    cold: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
) -> Result:
    """Run ``cmd`` in a group of its own, limited to ``limit`` bytes (None: only counted)."""
    with memory_cgroup(limit) as group:
        return group.run(cmd, cold=cold, env=env, cwd=cwd, stdin=stdin)


def unavailable() -> str | None:
    """Why groups cannot be made here, or None."""
    try:
        with memory_cgroup(None):
            pass
        if not os.access(_DROP, os.W_OK):
            return f"{_DROP} is not writable: cold runs need root"
    except OSError as error:
        return f"no memory cgroup can be made: {error}"
    return None


def require() -> None:
    """Skip the test where groups cannot be made; in CI that is a failure."""
    reason = unavailable()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must run the cgroup tests: {reason}")
        pytest.skip(reason)


_NOT_NEEDED = shutil.ignore_patterns(
    *("__pycache__", "test", "tests", "idlelib", "tkinter", "ensurepip", "pip", "mypy", "mypyc"),
    *("ruff*", "hypothesis", "pytest", "_pytest", "setuptools", "cmake", "ninja", "config-3*"),
    *("safetensors", "nanobind", "scikit_build_core", "lib2to3", "turtledemo", "*.a"),
)


@dataclass(frozen=True)
class ColdPython:
    """A copied interpreter with the packages that aegis needs."""

    command: tuple[str, ...]
    """Starts the copied interpreter."""
    env: dict[str, str]


def cold_python(folder: Path) -> ColdPython:
    """Copy this interpreter and its packages into ``folder``: files that no process maps."""
    base, version = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    home, stdlib = folder / "python", Path(sysconfig.get_path("stdlib"))
    (home / "bin").mkdir(parents=True)
    real = Path(sys.executable).resolve()
    shutil.copy2(real, home / "bin" / version)
    ignore = shutil.ignore_patterns("site-packages", "dist-packages")
    shutil.copytree(
        stdlib,
        home / "lib" / version,
        ignore=lambda at, names: _NOT_NEEDED(at, names) | ignore(at, names),
        symlinks=False,
    )
    for library in (base / "lib").glob("libpython*.so*"):
        shutil.copy2(library, home / "lib")
    packages = home / "lib" / version / "site-packages"
    shutil.copytree(
        sysconfig.get_path("purelib"),
        packages,
        ignore=lambda at, names: _NOT_NEEDED(at, names) | set(_dev_files(names)),
    )
    for name in ("aegis", "aegis.planner", "aegis.kernels", "aegis.tiers"):
        _copy_package(name, packages / name.replace(".", "/"))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env |= {"PYTHONHOME": str(home), "LD_LIBRARY_PATH": str(home / "lib"), "PYTHONSAFEPATH": "1"}
    env["PYTHONPATH"] = str(packages)  # Debian's interpreter looks for them in other folders.
    command = (str(home / "bin" / version),)
    # Byte code is part of an installed package: compile it now, not inside the measured run.
    compile_all = [*command, "-m", "compileall", "-q", "-j", "2", str(home / "lib" / version)]
    subprocess.run(compile_all, env=env, check=False, capture_output=True)
    return ColdPython(command, env)


def _copy_package(name: str, target: Path) -> None:
    """From wherever it is imported: an editable install keeps the folders apart."""
    origin = Path(str(importlib.import_module(name).__file__)).parent
    shutil.copytree(
        origin,
        target,
        ignore=lambda at, names: _NOT_NEEDED(at, names) | set(_dangling(Path(at), names)),
        dirs_exist_ok=True,
    )


def _dangling(folder: Path, names: list[str]) -> list[str]:
    return [name for name in names if not (folder / name).exists()]


def _dev_files(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".pth") or name.startswith("_aegis_moe")]
