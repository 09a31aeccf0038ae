"""Reader threads with two queues: demand before guess, first come first served within each.

A read may carry the checksum that its bytes must have; its reader compares it.
The C++ pool of aegis.kernels.native is used where it is built; the Python pool does the same with
threads and os.preadv. Both take the call that reads as an argument, so that tests can make it fail,
and both refuse to work in a child that was forked while they were open: it has none of the threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

from aegis.tiers.errors import ReadPoolError
from aegis.tiers.scatter import Copy, Scatter, view_of

ReadCall = Callable[[int, list[memoryview], int], int]
"""(file descriptor, destinations, offset) -> bytes read, 0 at the end of the file, or OSError."""

UNCHECKED = -1
"""In place of a checksum: do not check."""

_SWITCH_INTERVAL_S = 1e-4


class ReadPool(Protocol):
    """What both pools offer. Tickets are positive ints; ``result`` and ``cancel`` forget them."""

    def submit(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        address: int,
        demand: bool,
        checksum: int = UNCHECKED,
    ) -> int:
        """Queue a read of ``nbytes`` into memory at ``address``; returns its ticket.

        address: the number of a slot where the pool was opened for slots in parts.
        checksum: the CRC-32 (as in zlib) that the bytes must have."""

    def submit_run(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        addresses: Sequence[int],
        demand: bool,
        checksums: Sequence[int] = (),
    ) -> int:
        """The same for pieces of ``nbytes`` that follow each other in the file, one per address.

        checksums: one per piece, or none at all."""

    def promote(self, ticket: int) -> bool:
        """Move a guess that has not begun behind the demands; False if it had begun or was one."""

    def cancel(self, ticket: int) -> bool:
        """Withdraw and forget a read that has not begun; False (and no effect) if it has."""

    def done(self, ticket: int) -> bool:
        """Whether the read has ended."""

    def wait(self, ticket: int) -> None:
        """Block until the read has ended. Ctrl-C interrupts."""

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        """Those of ``tickets`` that have ended; ``block`` waits for at least one."""

    def damaged(self, ticket: int) -> list[int]:
        """Which pieces of a read that has ended arrived with another checksum than expected."""

    def result(self, ticket: int) -> int:
        """Bytes read, or -errno, of a read that has ended; forgets the ticket.

        Fewer bytes than asked for mean the end of the file."""

    @property
    def read_nbytes(self) -> int:
        """Bytes read since open."""

    @property
    def depth(self) -> int:
        """Reads queued or being read."""

    @property
    def busy_s(self) -> float:
        """Seconds since open in which at least one read was under way, its checksums included."""

    def close(self) -> None:
        """Withdraw what is queued (result -ECANCELED) and join the threads."""


def open_read_pool(
    threads: int, drop_cache: bool = False, scatter: Scatter | None = None
) -> ReadPool:
    """The C++ pool if it is built, else the Python one, which is also the one that scatters.

    drop_cache: drop a read's pages from the page cache after it, for files read buffered.
    Raises ReadPoolError where the system gives no thread; a few less than asked for will do."""
    make: Callable[[int, bool], ReadPool] = partial(PythonReadPool, scatter=scatter)
    if scatter is None:
        with contextlib.suppress(ImportError):
            from aegis.kernels.native._native import ReadPool as NativeReadPool

            make = NativeReadPool
    try:
        return make(threads, drop_cache)
    except RuntimeError as error:
        raise ReadPoolError(
            f"no thread could be started for reading ({error}); end other processes or raise the "
            "limit on them (ulimit -u)"
        ) from None


class PythonReadPool:
    """The pool in Python.

    While one is open the interpreter switches threads faster: at its default of 5 ms every
    completion would wait that long for a busy main thread."""

    def __init__(
        self,
        threads: int,
        drop_cache: bool = False,
        read: ReadCall | None = None,
        scatter: Scatter | None = None,
    ) -> None:
        """read: what reads instead of os.preadv. scatter: addresses are slots, and this says where
        their parts lie. Raises RuntimeError where no thread starts."""
        if threads < 1:
            raise ValueError(f"a read pool of {threads} threads was asked for; use at least one")
        self._process = os.getpid()
        self._read = read or _preadv
        self._scatter = scatter
        self._drop_cache = drop_cache and hasattr(os, "posix_fadvise")
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._jobs: dict[int, _Job] = {}
        self._demands: deque[int] = deque()
        self._guesses: deque[int] = deque()
        self._next = 1
        self._closed = False
        self._read_nbytes = 0
        self._pending = 0
        self._reading = 0
        """Threads that are inside of a read."""
        self._began = self._busy_s = 0.0
        """When the first of these began, and what was before."""
        self._threads: list[threading.Thread] = []
        self._start(threads)
        self._switched = True
        _switch_faster(+1)

    def _start(self, threads: int) -> None:
        """Where the system gives fewer threads, those must do."""
        for index in range(threads):
            name = f"aegis-read-{index}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _own_lock(self) -> threading.RLock:
        """The lock, refused to another process. Not a generator's context: Ctrl-C between its
        ``yield`` and the block would leave it locked for as long as the traceback lives."""
        if os.getpid() != self._process:
            raise RuntimeError("the read pool was opened by another process, which forked this one")
        return self._lock

    def _unlock_what_was_interrupted(self) -> None:
        """An exception that struck at the very end of a block can leave this thread the lock."""
        with contextlib.suppress(RuntimeError):
            while True:
                self._lock.release()

    def submit(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        address: int,
        demand: bool,
        checksum: int = UNCHECKED,
    ) -> int:
        """See ReadPool."""
        return self.submit_run(fd, offset, nbytes, (address,), demand, (checksum,))

    def submit_run(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        addresses: Sequence[int],
        demand: bool,
        checksums: Sequence[int] = (),
    ) -> int:
        """See ReadPool."""
        if len(checksums) not in (0, len(addresses)):
            raise ValueError(
                f"{len(checksums)} checksums for {len(addresses)} pieces; give one for each"
            )
        with self._own_lock():
            if self._closed:
                raise RuntimeError("the read pool is closed")
            ticket = self._next
            self._next += 1
            self._jobs[ticket] = _Job(
                fd, offset, nbytes, tuple(addresses), demand, tuple(checksums)
            )
            (self._demands if demand else self._guesses).append(ticket)
            self._pending += 1
            self._work.notify()
            return ticket

    def promote(self, ticket: int) -> bool:
        """See ReadPool."""
        with self._own_lock():
            job = self._jobs.get(ticket)
            if job is None or job.started or job.demand:
                return False
            # Its entry among the guesses stays behind and is skipped: the job has begun by then.
            job.demand = True
            self._demands.append(ticket)
            return True

    def cancel(self, ticket: int) -> bool:
        """See ReadPool."""
        with self._own_lock():
            job = self._jobs.get(ticket)
            if job is None or job.started:
                return False
            del self._jobs[ticket]
            self._pending -= 1
            return True

    def done(self, ticket: int) -> bool:
        """See ReadPool."""
        with self._own_lock():
            return self._jobs[ticket].result is not None

    def wait(self, ticket: int) -> None:
        """See ReadPool."""
        self.wait_any([ticket])

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        """See ReadPool."""
        with self._own_lock():
            while True:
                ended = [t for t in tickets if self._jobs[t].result is not None]
                if ended or not block or not tickets:
                    return ended
                self._ended.wait()

    def damaged(self, ticket: int) -> list[int]:
        """See ReadPool."""
        with self._own_lock():
            self._result_of(ticket)
            return self._jobs[ticket].damaged

    def result(self, ticket: int) -> int:
        """See ReadPool."""
        with self._own_lock():
            result = self._result_of(ticket)
            del self._jobs[ticket]
            return result

    def _result_of(self, ticket: int) -> int:
        result = self._jobs[ticket].result
        if result is None:
            raise RuntimeError(f"read {ticket} has not ended; wait for it first")
        return result

    @property
    def read_nbytes(self) -> int:
        """See ReadPool."""
        return self._read_nbytes

    @property
    def depth(self) -> int:
        """See ReadPool."""
        return self._pending

    @property
    def busy_s(self) -> float:
        """See ReadPool."""
        with self._own_lock():
            return self._busy_s + (perf_counter() - self._began if self._reading else 0.0)

    def close(self) -> None:
        """See ReadPool. A forked child leaves everything as it is."""
        if os.getpid() != self._process:
            return
        self._unlock_what_was_interrupted()
        with self._lock:
            # All of it again where a first call was interrupted.
            self._closed = True
            for job in self._jobs.values():
                if not job.started:
                    job.started, job.result = True, -errno.ECANCELED
                    self._pending -= 1
            self._work.notify_all()
            self._ended.notify_all()
        for thread in self._threads:
            thread.join()
        if self._switched:
            self._switched = False
            _switch_faster(-1)

    def _take(self) -> _Job | None:
        """The next job, demands first; None when the pool closes."""
        with self._lock:
            while True:
                for queue in (self._demands, self._guesses):
                    while queue:
                        job = self._jobs.get(queue.popleft())
                        if job is not None and not job.started:
                            job.started = True
                            if not self._reading:
                                self._began = perf_counter()
                            self._reading += 1
                            return job
                if self._closed:
                    return None
                self._work.wait()

    def _serve(self) -> None:
        while (job := self._take()) is not None:
            try:
                result = self._perform(job)
            except MemoryError:
                result = -errno.ENOMEM
            with self._lock:
                self._reading -= 1
                if not self._reading:
                    self._busy_s += perf_counter() - self._began
                job.result = result
                self._read_nbytes += max(0, result)
                self._pending -= 1
                self._ended.notify_all()

    def _perform(self, job: _Job) -> int:
        records, copies = self._places(job)
        got = self._fill(job, [view for views in records for view in views])
        if got < 0:
            return got
        if self._drop_cache:
            with contextlib.suppress(OSError):
                os.posix_fadvise(
                    job.fd, job.offset, job.nbytes * len(records), os.POSIX_FADV_DONTNEED
                )
        known = zip(job.checksums, records[: got // job.nbytes], strict=False)
        job.damaged = [
            index
            for index, (checksum, views) in enumerate(known)
            if checksum != UNCHECKED and _crc32(views) != checksum
        ]
        Scatter.finish(copies)
        return got

    def _places(self, job: _Job) -> tuple[list[list[memoryview]], Sequence[Copy]]:
        """Where each piece goes, and what is to be copied when all have come."""
        if self._scatter is not None:
            return self._scatter.places(job.addresses)
        return [[view_of(address, job.nbytes)] for address in job.addresses], ()

    def _fill(self, job: _Job, views: list[memoryview]) -> int:
        """Read until every view is full or the file ends; bytes read or -errno."""
        got = 0
        while views:
            try:
                count = self._read(job.fd, views, job.offset + got)
            except InterruptedError:
                continue
            except OSError as error:
                # After the unaligned end of a file a direct read fails instead of saying 0.
                if error.errno == errno.EINVAL and got:
                    break
                return -(error.errno or errno.EIO)
            if count <= 0:
                break
            got += count
            views = _rest(views, count)
        return got


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of views after their first ``count`` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def _crc32(views: Sequence[memoryview]) -> int:
    """The checksum of views that follow each other."""
    crc = 0
    for view in views:
        crc = zlib.crc32(view, crc)
    return crc


_open_pools, _usual_interval = 0, 0.0


def _switch_faster(change: int) -> None:
    """Count the open pools; the first one sets the interval and the last one puts it back."""
    global _open_pools, _usual_interval
    if _open_pools == 0:
        _usual_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(_usual_interval, _SWITCH_INTERVAL_S))
    _open_pools += change
    if _open_pools == 0:
        sys.setswitchinterval(_usual_interval)


class _Job:
    __slots__ = (
        "addresses",
        "checksums",
        "damaged",
        "demand",
        "fd",
        "nbytes",
        "offset",
        "result",
        "started",
    )

    def __init__(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        addresses: tuple[int, ...],
        demand: bool,
        checksums: tuple[int, ...],
    ) -> None:
        self.fd, self.offset, self.nbytes, self.addresses = fd, offset, nbytes, addresses
        self.checksums = checksums
        self.demand = demand
        self.started = False
        self.damaged: list[int] = []
        self.result: int | None = None


def _preadv(fd: int, views: list[memoryview], offset: int) -> int:
    return os.preadv(fd, views, offset)
