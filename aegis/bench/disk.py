"""What the disk gives for records of a store's own size: its expert files, read at random places.

Files, read pool, number of threads and pages are those that the engine uses; only nothing is
computed beside, and there always is a read to begin.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from aegis.checkpoint.storage import storage_of
from aegis.checkpoint.store import Store
from aegis.errors import ReadError
from aegis.settings import MIB, ExpertBits
from aegis.tiers.arena import HUGE_NBYTES, Arena
from aegis.tiers.read_pool import ReadPool, open_read_pool
from aegis.tiers.store import ExpertFiles

ROUNDS = 3
AHEAD = 3
"""Reads queued per thread: none of them waits for us."""
_ARENA_NBYTES = 32 * MIB


@dataclass(frozen=True)
class Reads:
    """How the engine reads: ``run`` records at once, by so many threads."""

    run: int
    threads: int
    ahead: int = AHEAD
    """Reads queued per thread."""

    @property
    def queued(self) -> int:
        """Of all threads."""
        return self.threads * self.ahead


def disk_limits(path: Path, experts: ExpertBits, kinds: list[Reads], seconds: float) -> list[float]:
    """Bytes per second of each kind of reads: the best of a few rounds of so many seconds, which
    take turns.

    Raises:
        ReadError: the disk refuses.
        StoreError, ExpertFileError, ArenaError: as they say.
    """
    store = Store.open(path)
    geometry = store.layout.geometry(experts)
    storage = storage_of(store.resident_path)
    files = ExpertFiles(
        store.expert_paths(experts),
        geometry.record_nbytes,
        geometry.stride,
        store.layout.num_experts,
        direct=storage.kind != "buffered",
    )
    with closing(files):
        return [max(of_kind) for of_kind in read_speeds(files, kinds, seconds)]


def read_speeds(files: ExpertFiles, kinds: list[Reads], seconds: float) -> list[list[float]]:
    """Bytes per second of every round of each kind of reads; kinds take turns.

    Raises:
        ReadError: the disk refuses.
        ArenaError: there is no memory to read into.
    """
    most = max(kind.run * kind.queued for kind in kinds) * files.stride
    with closing(Arena(max(most, _ARENA_NBYTES))) as arena:
        base = int(arena.take("records", arena.nbytes, HUGE_NBYTES).ctypes.data)
        speeds = [[_round(files, base, kind, seconds) for kind in kinds] for _ in range(ROUNDS)]
    return [list(of_kind) for of_kind in zip(*speeds, strict=True)]


def _round(files: ExpertFiles, base: int, kind: Reads, seconds: float) -> float:
    """Bytes per second of reading for a while."""
    with closing(open_read_pool(kind.threads, drop_cache=files.mode == "buffered")) as pool:
        stride = files.stride * kind.run
        free = deque(base + stride * index for index in range(kind.queued))
        reading: deque[tuple[int, int]] = deque()
        places, done = _places(files, kind.run), 0
        start = time.perf_counter()
        while (now := time.perf_counter()) - start < seconds or reading:
            while free and now - start < seconds:
                address = free.popleft()
                reading.append((_submit(pool, files, next(places), kind.run, address), address))
            ticket, address = reading.popleft()
            pool.wait(ticket)
            done += _ended(pool, files, ticket, stride)
            free.append(address)
        return done / (time.perf_counter() - start)


def _places(files: ExpertFiles, run: int) -> Iterator[tuple[int, int]]:
    """Layer and first expert, at random; every place has room for the run."""
    draw = random.Random()
    while True:
        yield draw.randrange(files.num_layers), draw.randrange(files.num_experts - run + 1)


def _submit(
    pool: ReadPool, files: ExpertFiles, place: tuple[int, int], run: int, address: int
) -> int:
    fd, offset, nbytes = files.locate(*place)
    return pool.submit_run(fd, offset, nbytes, [address + i * nbytes for i in range(run)], True)


def _ended(pool: ReadPool, files: ExpertFiles, ticket: int, nbytes: int) -> int:
    count = pool.result(ticket)
    if count != nbytes:
        what = os.strerror(-count) if count < 0 else "the file ends too early"
        raise ReadError(f"{files.paths[0].parent} cannot be read: {what}; run `aegis verify` on it")
    return count
