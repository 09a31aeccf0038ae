"""Disks that fail on purpose, for both read pools, and child processes that tell what became of
them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from aegis.convert.build import JOURNAL, owner_of
from aegis.errors import notes_of
from aegis.tiers import PythonReadPool, ReadPool

POOLS = ("python", "native")

Fault = Callable[[int], int]
"""The number of a read, from 0, to what becomes of it: WELL, SHORT, END, GARBLED or an errno."""

WELL, SHORT, END, GARBLED = 0, -1, -2, -3


class _Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


_CALL = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t,
    ctypes.c_int,
    ctypes.POINTER(_Piece),
    ctypes.c_int,
    ctypes.c_int64,
    use_errno=True,
)


class FaultyDisk:
    """Takes the place of preadv: reads well, short, garbled, to an early end, or not at all."""

    def __init__(self, fault: Fault, seed: int = 0) -> None:
        self.fault = fault
        self.reads = 0
        self._rng = random.Random(seed)
        self._plain: dict[int, int] = {}
        self._call = _CALL(self._native)

    def close(self) -> None:
        """Close what was opened to read from."""
        while self._plain:
            os.close(self._plain.popitem()[1])

    def pool(self, kind: str, threads: int, drop_cache: bool = False) -> ReadPool:
        """A read pool of one kind on this disk."""
        if kind == "python":
            return PythonReadPool(threads, drop_cache, self.read)
        module = pytest.importorskip("aegis.kernels.native._native")
        address = ctypes.cast(self._call, ctypes.c_void_p).value
        pool: ReadPool = module.ReadPool(threads, drop_cache, address)
        return pool

    def install(self, patch: pytest.MonkeyPatch, kind: str) -> None:
        """Let every engine that is opened from now on read from this disk."""
        if kind == "native":
            pytest.importorskip("aegis.kernels.native._native")
        patch.setattr(
            "aegis.tiers.facade.open_read_pool",
            lambda threads, drop_cache=False: self.pool(kind, threads, drop_cache),
        )

    def read(self, fd: int, views: list[memoryview], offset: int) -> int:
        """As os.preadv."""
        number, self.reads = self.reads, self.reads + 1
        fault = self.fault(number)
        if fault > 0:
            raise OSError(fault, os.strerror(fault))
        if fault == END:
            return 0
        wanted = sum(view.nbytes for view in views)
        # Any number of bytes may come at once, whatever direct reads are multiples of.
        count = self._rng.randint(1, max(1, wanted - 1)) if fault == SHORT else wanted
        data = bytearray(os.pread(self._through_cache(fd), count, offset))
        if fault == GARBLED and data:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        rest = memoryview(data)
        for view in views:
            taken = min(view.nbytes, len(rest))
            view[:taken], rest = rest[:taken], rest[taken:]
        return len(data)

    def _through_cache(self, fd: int) -> int:
        status = os.fstat(fd)
        key = status.st_ino
        if key not in self._plain:
            self._plain[key] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        return self._plain[key]

    def _native(self, fd: int, pieces: Sequence[_Piece], count: int, offset: int) -> int:
        views = [
            memoryview((ctypes.c_char * pieces[i].nbytes).from_address(pieces[i].base)).cast("B")
            for i in range(count)
        ]
        try:
            return self.read(fd, views, offset)
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1


@contextlib.contextmanager
def faulty_disk(fault: Fault, seed: int = 0) -> Iterator[FaultyDisk]:
    """A disk, closed at the end."""
    disk = FaultyDisk(fault, seed)
    try:
        yield disk
    finally:
        disk.close()


def always(fault: int) -> Fault:
    """Every read fares the same."""
    return lambda number: fault


def only(fault: int, *numbers: int) -> Fault:
    """These reads only."""
    return lambda number: fault if number in numbers else WELL


def mixed(seed: int, rate: float, *faults: int) -> Fault:
    """Any of these, now and then."""
    rng = random.Random(seed)
    return lambda number: rng.choice(faults) if rng.random() < rate else WELL


def python_script(
    code: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", **(env or {})},
        cwd=cwd,
        check=False,
        timeout=timeout,
    )


class Forked:
    """A forked child at work."""

    def __init__(self, work: Callable[[], object], limit_s: int = 60) -> None:
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons' about forks
            self.pid = os.fork()
        if not self.pid:
            os.close(read)
            _answer(work, write, limit_s)
        os.close(write)
        self._read = read

    def end(self) -> tuple[int, str]:
        """The status with which it ended, as ``os.waitpid`` gives it, and what it said."""
        with os.fdopen(self._read) as stream:
            said = stream.read()
        _, status = os.waitpid(self.pid, 0)
        return status, said


def in_child(work: Callable[[], object], limit_s: int = 60) -> str:
    """What ``work`` returns as text in a forked child, or how it failed there.

    The child takes the interpreter's whole way out, so that what ends there is tried too."""
    status, said = Forked(work, limit_s).end()
    assert not status, f"the child ended with status {status} after {said!r}"
    return said


def _answer(work: Callable[[], object], write: int, limit_s: int) -> None:
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limit_s)
    with os.fdopen(write, "w") as stream:
        try:
            stream.write(str(work()))
        except BaseException:
            stream.write(traceback.format_exc())
    os._exit(0)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def journals(folder: Path) -> list[set[str]]:
    """What each of the journals below a folder says is finished."""
    return [set(json.loads(path.read_text())["files"]) for path in sorted(folder.rglob(JOURNAL))]


def check_kept(folder: Path, sound: Mapping[str, bytes], error: BaseException) -> dict[str, int]:
    """Fail unless nothing is left of builds that ``error`` ended but finished files, byte for byte
    as in the ``sound`` one, and the journals that name just them; and unless the error says so.

    The files by name in the store, and which ones they are on the disk.
    """
    kept, expected, nbytes = dict[str, int](), set[Path](), 0
    for journal in sorted(folder.rglob(JOURNAL)):
        home = journal.parent
        # Or renamed already, but nothing counted it.
        owner = owner_of(home) or home.name
        assert owner_of(home) is not None or owner == "experts-3bit"
        prefix = f"{owner}/" if owner == "experts-3bit" else ""
        finished = json.loads(journal.read_text())["files"]
        assert finished
        for name in finished:
            assert (home / name).read_bytes() == sound[prefix + name], name
            kept[prefix + name] = (home / name).stat().st_ino
        expected |= {journal, *(home / name for name in finished)}
    left = {path for path in folder.rglob("*") if path.is_file()}
    assert left == expected
    if not left:
        assert list(folder.iterdir()) == []
    nbytes = sum(path.stat().st_size for path in left)
    notes = notes_of(error)
    assert len(notes) == bool(left)
    for note in notes:
        size = f"{-(-nbytes >> 20)} MiB"
        assert note.startswith(f"{size} that are finished are kept: the same command goes on with")
    return kept


class Failing:
    """Lets the n-th call of some functions of os fail; counts all."""

    def __init__(
        self, patch: pytest.MonkeyPatch, error: int | BaseException, at: int, *names: str
    ) -> None:
        self.calls = 0
        self._error, self._at = error, at
        for name in names:
            patch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._at:
                if isinstance(self._error, BaseException):
                    raise self._error
                raise OSError(self._error, os.strerror(self._error))
            return function(*args, **options)

        return failing
