import ctypes
import errno
import importlib
import mmap
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tier_fakes import cached_nbytes

from aegis.tiers import PythonReadPool, ReadPool, open_read_pool

PAGE = 4096
OpenPool = Callable[..., ReadPool]


def native_pool(threads: int, drop_cache: bool = False) -> ReadPool:
    module = pytest.importorskip("aegis.kernels.native._native")
    pool: ReadPool = module.ReadPool(threads, drop_cache)
    return pool


@pytest.fixture(params=[PythonReadPool, native_pool], ids=["python", "native"])
def open_pool(request: pytest.FixtureRequest) -> Iterator[OpenPool]:
    opened: list[ReadPool] = []

    def open_it(threads: int = 1, **options: bool) -> ReadPool:
        opened.append(request.param(threads, **options))
        return opened[-1]

    yield open_it
    for pool in opened:
        pool.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """Eight pages; page i holds the byte i + 1."""
    path = tmp_path / "pages"
    path.write_bytes(b"".join(bytes([page + 1]) * PAGE for page in range(8)))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


class Memory:
    """A destination; ``address`` and what lies there."""

    def __init__(self, nbytes: int, fill: int = 0) -> None:
        self._buffer = (ctypes.c_char * nbytes)()
        self.address = ctypes.addressof(self._buffer)
        ctypes.memset(self.address, fill, nbytes)

    def __getitem__(self, part: slice) -> bytes:
        return self._buffer[part]


class Occupied:
    """Keeps a pool of one thread busy until the end: zeros into one buffer, 64 GiB of them unless
    it cannot be written any more before."""

    def __init__(self, pool: ReadPool) -> None:
        piece = 64 << 20
        self._memory = mmap.mmap(-1, piece)
        self._memory[0] = 1
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._fd = os.open("/dev/zero", os.O_RDONLY)
        self.ticket = pool.submit_run(self._fd, 0, piece, [self._address] * 1024, True)
        self._pool = pool

    def __enter__(self) -> "Occupied":
        # Until the first zero is there, what is submitted next could overtake it.
        while self._memory[0]:
            pass
        return self

    def end(self) -> None:
        """The read fails: EFAULT."""
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(self._address), PAGE, 0) == 0

    def __exit__(self, *error: object) -> None:
        self.end()
        self._pool.wait(self.ticket)
        assert self._pool.result(self.ticket) == -errno.EFAULT
        os.close(self._fd)


def test_bytes_land_where_they_were_sent(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(3), Memory(8 * PAGE)
    tickets = [
        pool.submit(file, page * PAGE, PAGE, memory.address + page * PAGE, page % 2 == 0)
        for page in range(8)
    ]
    waiting = list(tickets)
    while waiting:
        for ticket in pool.wait_any(waiting):
            waiting.remove(ticket)
            assert pool.done(ticket)
            assert pool.result(ticket) == PAGE
    assert memory[:] == os.pread(file, 8 * PAGE, 0)
    assert pool.read_nbytes == 8 * PAGE
    assert pool.depth == 0
    assert pool.wait_any([]) == []
    with pytest.raises(KeyError):
        pool.result(tickets[0])


def test_a_run_is_scattered_over_its_addresses(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(), Memory(8 * PAGE)
    addresses = [memory.address + page * PAGE for page in (5, 0, 3)]
    ticket = pool.submit_run(file, 2 * PAGE, PAGE, addresses, True)
    pool.wait(ticket)
    assert pool.result(ticket) == 3 * PAGE
    assert [memory[page * PAGE : page * PAGE + 1] for page in (5, 0, 3)] == [b"\3", b"\4", b"\5"]


def page_checksum(page: int) -> int:
    return zlib.crc32(bytes([page + 1]) * PAGE)


def test_a_wrong_checksum_is_told_with_the_read(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(), Memory(PAGE)
    right = page_checksum(3)
    for checksum, damaged in ((right, []), (right ^ 1, [0]), (0, [0]), (-1, [])):
        ticket = pool.submit(file, 3 * PAGE, PAGE, memory.address, True, checksum)
        pool.wait(ticket)
        assert pool.damaged(ticket) == damaged
        assert pool.result(ticket) == PAGE
        with pytest.raises(KeyError):
            pool.damaged(ticket)


def test_each_piece_of_a_run_has_a_checksum_of_its_own(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(), Memory(8 * PAGE)
    addresses = [memory.address + page * PAGE for page in (5, 0, 3, 1)]
    checksums = [page_checksum(2), page_checksum(2), -1, page_checksum(2)]
    ticket = pool.submit_run(file, 2 * PAGE, PAGE, addresses, True, checksums)
    pool.wait(ticket)
    assert pool.damaged(ticket) == [1, 3]
    assert pool.result(ticket) == 4 * PAGE
    with pytest.raises(ValueError, match="2 checksums for 4 pieces"):
        pool.submit_run(file, 2 * PAGE, PAGE, addresses, True, [1, 2])
    unchecked = pool.submit_run(file, 2 * PAGE, PAGE, addresses, True)
    pool.wait(unchecked)
    assert pool.damaged(unchecked) == []


def test_what_has_not_arrived_is_short_and_not_damaged(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(), Memory(8 * PAGE)
    addresses = [memory.address + page * PAGE for page in range(3)]
    ticket = pool.submit_run(file, 6 * PAGE, PAGE, addresses, True, [0, page_checksum(7), 0])
    pool.wait(ticket)
    assert pool.damaged(ticket) == [0]
    assert pool.result(ticket) == 2 * PAGE
    failed = pool.submit(987654, 0, PAGE, memory.address, True, 0)
    pool.wait(failed)
    assert pool.damaged(failed) == []
    assert pool.result(failed) == -errno.EBADF


@pytest.mark.skipif(sys.platform != "linux", reason="where one call reads at most 2 GiB")
def test_a_piece_that_came_in_two_calls_is_checked_as_a_whole(open_pool: OpenPool) -> None:
    pool, piece = open_pool(), 16 << 20
    memory = Memory(3 * piece, fill=1)
    addresses = [memory.address] * 130
    addresses[127] = memory.address + piece
    checksums = [-1] * 130
    checksums[127] = zlib.crc32(bytes(piece))
    fd = os.open("/dev/zero", os.O_RDONLY)
    for wrong in (0, 1):
        checksums[127] ^= wrong
        ticket = pool.submit_run(fd, 0, piece, addresses, True, checksums)
        pool.wait(ticket)
        assert pool.damaged(ticket) == [127] * wrong
        assert pool.result(ticket) == 130 * piece
    os.close(fd)


def test_the_end_of_the_file_is_a_short_result(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(), Memory(8 * PAGE)
    for offset, expected in ((7 * PAGE, PAGE), (8 * PAGE, 0), (99 * PAGE, 0)):
        ticket = pool.submit(file, offset, 2 * PAGE, memory.address, True)
        pool.wait(ticket)
        assert pool.result(ticket) == expected
    run = [memory.address, memory.address + PAGE, memory.address + 2 * PAGE]
    ticket = pool.submit_run(file, 6 * PAGE, PAGE, run, True)
    pool.wait(ticket)
    assert pool.result(ticket) == 2 * PAGE


def test_a_direct_read_across_an_odd_end_is_short_too(open_pool: OpenPool, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.write_bytes(b"x" * (PAGE + 100))
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        pytest.skip("no direct reads here")
    pool, memory = open_pool(), Memory(4 * PAGE)
    aligned = -(-memory.address // PAGE) * PAGE
    ticket = pool.submit(fd, 0, 2 * PAGE, aligned, True)
    pool.wait(ticket)
    assert pool.result(ticket) == PAGE + 100
    os.close(fd)


def test_an_error_is_a_negative_errno(open_pool: OpenPool, tmp_path: Path) -> None:
    pool, memory = open_pool(), Memory(PAGE)
    fd = os.open(tmp_path, os.O_RDONLY)
    for bad, expected in ((fd, errno.EISDIR), (987654, errno.EBADF)):
        ticket = pool.submit(bad, 0, PAGE, memory.address, True)
        pool.wait(ticket)
        assert pool.result(ticket) == -expected
    os.close(fd)


def last_read(pool: ReadPool, memory: Memory, tickets: list[int]) -> bytes:
    for ticket in tickets:
        pool.wait(ticket)
        assert pool.result(ticket) == PAGE
    return memory[:1]


def test_a_demand_overtakes_every_guess(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(), Memory(PAGE)
    with Occupied(pool):
        guess = pool.submit(file, 0, PAGE, memory.address, False)
        demand = pool.submit(file, PAGE, PAGE, memory.address, True)
    assert last_read(pool, memory, [guess, demand]) == b"\1"


def test_within_a_queue_the_first_comes_first(open_pool: OpenPool, file: int) -> None:
    for demand in (False, True):
        pool, memory = open_pool(), Memory(PAGE)
        with Occupied(pool):
            tickets = [
                pool.submit(file, page * PAGE, PAGE, memory.address, demand) for page in range(4)
            ]
        assert last_read(pool, memory, tickets) == b"\4"


def test_a_promoted_guess_overtakes_the_others(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(), Memory(PAGE)
    with Occupied(pool):
        first = pool.submit(file, 0, PAGE, memory.address, False)
        second = pool.submit(file, PAGE, PAGE, memory.address, False)
        assert pool.promote(second)
        assert not pool.promote(second)
    assert last_read(pool, memory, [first, second]) == b"\1"
    assert not pool.promote(first)


def test_only_what_has_not_begun_can_be_cancelled(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(), Memory(PAGE)
    with Occupied(pool) as running:
        queued = pool.submit(file, 0, PAGE, memory.address, False)
        assert not pool.cancel(running.ticket)
        assert pool.depth == 2
        assert pool.cancel(queued)
        assert not pool.cancel(queued)
        assert pool.depth == 1
    assert memory[:1] == b"\0"
    with pytest.raises(KeyError):
        pool.done(queued)


def test_waiting_without_blocking_returns_at_once(open_pool: OpenPool) -> None:
    pool = open_pool()
    with Occupied(pool) as running:
        assert pool.wait_any([running.ticket], False) == []
        with pytest.raises(RuntimeError, match="has not ended"):
            pool.result(running.ticket)
        with pytest.raises(RuntimeError, match="has not ended"):
            pool.damaged(running.ticket)


def test_ctrl_c_interrupts_a_wait(open_pool: OpenPool) -> None:
    pool = open_pool()

    class Interrupt(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    with Occupied(pool) as running:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interrupt):
            pool.wait(running.ticket)
        signal.signal(signal.SIGALRM, before)


def test_closing_withdraws_what_is_queued_and_ends_the_threads(
    open_pool: OpenPool, file: int
) -> None:
    pool, memory = open_pool(), Memory(PAGE)
    with Occupied(pool) as running:
        queued = pool.submit(file, 0, PAGE, memory.address, True)
        closing = threading.Thread(target=pool.close)
        closing.start()
        pool.wait(queued)
        running.end()
        closing.join()
    assert pool.result(queued) == -errno.ECANCELED
    assert memory[:1] == b"\0"
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(file, 0, PAGE, memory.address, True)
    pool.close()


def test_a_pool_is_busy_while_it_reads_and_never_longer_than_it_is_open(
    open_pool: OpenPool, file: int
) -> None:
    begun = time.perf_counter()
    pool, memory = open_pool(3), Memory(8 * PAGE)
    assert pool.busy_s == 0
    before = 0.0
    for pages in (1, 8, 3):
        tickets = [
            pool.submit(file, page * PAGE, PAGE, memory.address + page * PAGE, page % 2 == 0)
            for page in range(pages)
        ]
        for ticket in tickets:
            pool.wait(ticket)
            assert pool.result(ticket) == PAGE
        # All have ended: from here on nothing is added.
        busy = pool.busy_s
        assert busy == pool.busy_s
        # However many threads read at a time.
        assert before < busy <= time.perf_counter() - begun
        before = busy


def test_a_read_that_has_not_ended_counts_as_far_as_it_is(open_pool: OpenPool) -> None:
    pool = open_pool()
    with Occupied(pool):
        first = pool.busy_s
        while pool.busy_s <= first:
            pass
    end = pool.busy_s
    assert end > first
    assert pool.busy_s == end


def test_what_is_withdrawn_is_no_reading(open_pool: OpenPool, file: int) -> None:
    pool, memory = open_pool(), Memory(PAGE)
    with Occupied(pool):
        assert pool.cancel(pool.submit(file, 0, PAGE, memory.address, False))
    busy = pool.busy_s
    pool.close()
    assert pool.busy_s == busy


def test_a_pool_needs_a_thread(open_pool: OpenPool) -> None:
    with pytest.raises(ValueError, match="at least one"):
        open_pool(0)


def test_short_and_interrupted_reads_are_continued(file: int) -> None:
    calls = 0

    def grudging(fd: int, views: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise InterruptedError
        return os.preadv(fd, [views[0][:700]], offset)

    pool, memory = PythonReadPool(1, read=grudging), Memory(2 * PAGE)
    addresses = [memory.address + PAGE, memory.address]
    ticket = pool.submit_run(file, 0, PAGE, addresses, True)
    pool.wait(ticket)
    assert pool.result(ticket) == 2 * PAGE
    assert memory[:] == b"\2" * PAGE + b"\1" * PAGE
    pool.close()


def test_the_python_pool_leaves_the_interpreter_as_it_was() -> None:
    interval, threads = sys.getswitchinterval(), threading.active_count()
    pool = PythonReadPool(2)
    other = PythonReadPool(1)
    assert sys.getswitchinterval() < interval
    pool.close()
    pool.close()
    assert sys.getswitchinterval() < interval
    other.close()
    assert sys.getswitchinterval() == interval
    assert threading.active_count() == threads


def test_without_the_extension_python_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aegis.kernels.native._native", None)
    pool = open_read_pool(1)
    assert isinstance(pool, PythonReadPool)
    pool.close()
    monkeypatch.undo()
    try:
        importlib.import_module("aegis.kernels.native._native")
    except ImportError:
        return
    pool = open_read_pool(1)
    assert not isinstance(pool, PythonReadPool)
    pool.close()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing drops pages here")
@pytest.mark.parametrize("drop_cache", [False, True])
def test_a_buffered_read_leaves_pages_in_memory_only_where_it_may(
    open_pool: OpenPool, file: int, tmp_path: Path, drop_cache: bool
) -> None:
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_nbytes(tmp_path / "pages"):
        pytest.skip("this file system keeps its pages in memory")
    pool, memory = open_pool(1, drop_cache=drop_cache), Memory(8 * PAGE)
    ticket = pool.submit(file, 0, 8 * PAGE, memory.address, True)
    pool.wait(ticket)
    assert pool.result(ticket) == 8 * PAGE
    assert bool(cached_nbytes(tmp_path / "pages")) is not drop_cache
