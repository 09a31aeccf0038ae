"""How fast records are read from the cache's disk, into huge and into small pages.

A file without a name is written (so nothing is left behind, whatever happens), then records are
read from it at random places by the engine's own read pool, past the page cache where the file
system allows it. Amounts and times are bounded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.fileio import aligned_buffer
from aegis.checkpoint.pagecache import drop_pages, expect_random_reads
from aegis.checkpoint.storage import IN_MEMORY, scratch_folders, storage_of
from aegis.doctor.huge_pages import arena_nbytes_for
from aegis.settings import DEFAULT_IO_THREADS
from aegis.tiers.arena import HUGE_NBYTES, Arena
from aegis.tiers.errors import ArenaError
from aegis.tiers.read_pool import open_read_pool

MIB = 1 << 20
FILE_NBYTES = 256 * MIB
LEAST_FILE_NBYTES = 16 * MIB
USUAL_RECORD_NBYTES = 1_769_472
"""An expert of a 35B model with 2048 x 512 matrices in 4 bits."""

_PIECE_NBYTES = 4 * MIB
_WRITE_SECONDS = 8.0
_ROUNDS = 3
_ROUND_NBYTES = 128 * MIB
_ROUND_SECONDS = 0.5


@dataclass(frozen=True)
class ReadSpeed:
    """The best of a few rounds of reading records of one size into one kind of pages."""

    record_nbytes: int
    huge_pages: bool
    nbytes_per_s: int


@dataclass(frozen=True)
class DiskTest:
    """What was measured, or why nothing was."""

    folder: Path | None = None
    """Where the file lay; not always the cache: that may be read-only."""
    direct: bool = False
    """Whether the reads bypassed the page cache."""
    file_nbytes: int = 0
    speeds: tuple[ReadSpeed, ...] = ()
    skipped: str | None = None
    """Why nothing was measured; None where something was."""
    failed: bool = False
    """Whether that is because the system refused to write or to read."""


def measure_disk(cache: Path, records: Sequence[int], free_memory_nbytes: int | None) -> DiskTest:
    """Measure reads of ``records`` (multiples of 4096) where the cache lies.

    free_memory_nbytes: bounds the memory that is read into; None: unknown.
    """
    folder = _folder_for(cache)
    if isinstance(folder, str):
        return DiskTest(skipped=folder)
    room = _room(folder)
    if room < LEAST_FILE_NBYTES:
        return DiskTest(skipped=f"{folder} has too little free space to try")
    if arena_nbytes_for(free_memory_nbytes) < max(records):
        return DiskTest(skipped="too little memory is free to try")
    try:
        return _direct_or_buffered(folder, records, room, arena_nbytes_for(free_memory_nbytes))
    except ArenaError as error:
        return DiskTest(skipped=str(error))
    except OSError as error:
        reason = f"writing or reading in {folder} failed: {error.strerror or error}"
        return DiskTest(skipped=reason, failed=True)


def _folder_for(cache: Path) -> Path | str:
    """The cache's folder, else that of temporary files; or why neither will do."""
    reasons = []
    for folder, reason in scratch_folders(cache):
        if reason is None:
            return folder
        reasons.append(f"{folder} {reason}")
        if len(reasons) == 1 and reason == IN_MEMORY:
            break  # What lies elsewhere says nothing about a cache that is in memory.
    return " and ".join(reasons)


def _room(folder: Path) -> int:
    """Bytes to write: never more than a quarter of what is free."""
    disk = os.statvfs(folder)
    room = min(FILE_NBYTES, disk.f_bavail * disk.f_frsize // 4)
    return room // _PIECE_NBYTES * _PIECE_NBYTES


def _direct_or_buffered(
    folder: Path, records: Sequence[int], room: int, arena_nbytes: int
) -> DiskTest:
    try:
        # Some accept the flag and answer from the page cache: then that is what is measured.
        direct = storage_of(folder).kind != "buffered"
        return _measure(folder, records, room, arena_nbytes, direct)
    except OSError as error:
        # Some file systems accept the flag and refuse what is done with it.
        if error.errno != errno.EINVAL:
            raise
        return _measure(folder, records, room, arena_nbytes, False)


def _measure(
    folder: Path, records: Sequence[int], room: int, arena_nbytes: int, try_direct: bool
) -> DiskTest:
    # On Linux this file never has a name, elsewhere it loses it at once.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        fd = file.fileno()
        direct = try_direct and _go_direct(fd)
        size = _write(fd, room, direct)
        if not direct:
            expect_random_reads(fd)
        best: dict[tuple[int, bool], float] = {}
        # Rounds take turns, so that a disturbance does not fall on one kind of pages alone.
        for _ in range(_ROUNDS):
            for huge in (True, False):
                for record in records:
                    speed = _round(fd, size, record, huge, arena_nbytes, direct)
                    best[record, huge] = max(speed, best.get((record, huge), 0.0))
    speeds = (ReadSpeed(*key, nbytes_per_s=round(best[key])) for key in sorted(best))
    return DiskTest(folder, direct, size, tuple(speeds))


def _go_direct(fd: int) -> bool:
    """Make reads and writes of an open file bypass the page cache; False where it refuses."""
    if sys.platform == "darwin":
        return fcntl.fcntl(fd, fcntl.F_NOCACHE, 1) != -1
    flag = getattr(os, "O_DIRECT", 0)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | flag)
    except OSError:
        return False
    return bool(flag)


def _write(fd: int, nbytes: int, direct: bool) -> int:
    """Fill a file with noise, which nothing can compress; returns how much was written in time."""
    piece = aligned_buffer(_PIECE_NBYTES)
    piece[:] = np.frombuffer(random.Random(1).randbytes(_PIECE_NBYTES), np.uint8)
    done, end = 0, time.monotonic() + _WRITE_SECONDS
    while done < nbytes and (time.monotonic() < end or done < LEAST_FILE_NBYTES):
        view = memoryview(piece.data)
        while view:
            count = os.pwrite(fd, view, done)
            view, done = view[count:], done + count
        if not direct:
            os.fsync(fd)
            drop_pages(fd)
    os.fsync(fd)
    return done


def _round(fd: int, size: int, record: int, huge: bool, arena_nbytes: int, direct: bool) -> float:
    """Bytes per second of reading records at random places for a while."""
    with ExitStack() as stack:
        memory = _pages(stack, arena_nbytes, huge)
        pool = open_read_pool(DEFAULT_IO_THREADS, drop_cache=not direct)
        stack.callback(pool.close)
        base = int(memory.ctypes.data)
        free = deque(range(base, base + arena_nbytes - record + 1, record))
        places = list(range(0, size - record + 1, record))
        random.shuffle(places)
        del places[_ROUND_NBYTES // record :]
        reading: deque[tuple[int, int]] = deque()
        done, start = 0, time.perf_counter()
        while reading or places:
            while places and free and time.perf_counter() - start < _ROUND_SECONDS:
                address = free.popleft()
                reading.append((pool.submit(fd, places.pop(), record, address, True), address))
            if not reading:
                break
            ticket, address = reading.popleft()
            pool.wait(ticket)
            count = pool.result(ticket)
            if count != record:
                raise OSError(-min(count, 0), os.strerror(-count) if count < 0 else "short read")
            free.append(address)
            done += count
        return done / max(time.perf_counter() - start, 1e-9)


def _pages(stack: ExitStack, nbytes: int, huge: bool) -> NDArray[np.uint8]:
    """Touched memory in huge pages, as the engine's arena gets them, or in small ones."""
    if huge:
        arena = Arena(nbytes)
        stack.callback(arena.close)
        return arena.take("records", nbytes, HUGE_NBYTES)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    small = mmap.mmap(-1, nbytes, flags=flags)
    with contextlib.suppress(OSError, AttributeError):
        small.madvise(mmap.MADV_NOHUGEPAGE)
    view: NDArray[np.uint8] = np.frombuffer(small, np.uint8)
    view[:: mmap.PAGESIZE] = 0
    return view
