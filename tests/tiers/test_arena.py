import errno
import mmap
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from aegis.tiers import Arena, ArenaError

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def mapped_nbytes(arena: Arena) -> int:
    """Memory behind the arena alone: the allocator gives its own back whenever it likes."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start < arena.base + arena.nbytes and arena.base < end
        elif name == "Rss:" and inside:
            total += int(values[0]) * 1024
    return total


def test_regions_are_aligned_disjoint_and_keep_what_is_written() -> None:
    arena = Arena(5 * MIB + 1)
    assert arena.base % (2 * MIB) == 0
    first, second = arena.take("first", 100), arena.take("second", 4096, align=4096)
    assert first.ctypes.data % 64 == 0
    assert second.ctypes.data % 4096 == 0
    first[:], second[:] = 1, 2
    assert (first == 1).all()
    assert (second == 2).all()
    assert arena.regions() == {"first": (0, 100), "second": (4096, 4096)}
    arena.close()


def test_a_region_that_does_not_fit_is_refused_by_name() -> None:
    arena = Arena(MIB)
    arena.take("first", MIB)
    with pytest.raises(ArenaError, match="'second' needs 1 bytes"):
        arena.take("second", 1)
    with pytest.raises(ArenaError, match="'first' was taken before"):
        arena.take("first", 0)
    with pytest.raises(ArenaError, match="power of two"):
        arena.take("third", 0, align=3)
    with pytest.raises(ArenaError, match="at least one"):
        Arena(0)


@linux
def test_memory_that_cannot_be_had_is_one_clear_sentence() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, before[1]))
    try:
        with pytest.raises(ArenaError, match="refused 1073741824 bytes"):
            Arena(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class OldKernel(mmap.mmap):
    """Memory of a kernel that knows nothing of touching ahead or of huge pages."""

    refuses = errno.EINVAL

    def madvise(self, option: int, *part: int) -> None:
        if option in (23, getattr(mmap, "MADV_HUGEPAGE", 14)):
            raise OSError(self.refuses, "refused")
        super().madvise(option, *part)


class FullKernel(OldKernel):
    """Memory of a kernel that has none left."""

    refuses = errno.ENOMEM


@linux
def test_a_kernel_that_cannot_touch_ahead_still_gives_every_page_at_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mmap, "mmap", OldKernel)
    arena = Arena(4 * MIB + 8192)
    assert mapped_nbytes(arena) >= 4 * MIB + 8192
    arena.release_tail(2 * MIB + 8192)
    assert mapped_nbytes(arena) < 3 * MIB
    arena.restore_tail()
    assert mapped_nbytes(arena) >= 4 * MIB + 8192
    arena.close()


@linux
def test_memory_that_is_not_there_when_touched_is_one_clear_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mmap, "mmap", FullKernel)
    before = resident_nbytes()
    with pytest.raises(ArenaError, match=r"no 4194304 bytes of memory left .* smaller cap"):
        Arena(4 * MIB)
    assert resident_nbytes() - before < MIB


def test_where_the_system_says_nothing_of_huge_pages_the_figure_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(*args: object, **options: object) -> None:
        raise FileNotFoundError

    arena = Arena(MIB)
    monkeypatch.setattr("builtins.open", nothing)
    assert arena.huge_nbytes() is None
    arena.close()


@linux
def test_every_page_is_there_at_open_so_nothing_grows_later() -> None:
    nbytes = 16 * MIB + 12288
    arena = Arena(nbytes)
    at_open = mapped_nbytes(arena)
    assert at_open >= nbytes
    kept = arena.take("all", nbytes)
    kept[:] = 1
    assert mapped_nbytes(arena) - at_open < MIB
    # Nor is anything left behind, whoever still holds a view.
    arena.close()
    assert mapped_nbytes(arena) < MIB


@linux
def test_whole_ranges_are_huge_and_the_rest_is_not_rounded_up() -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("this system has no huge pages")
    arena = Arena(8 * MIB + 4096)
    huge = arena.huge_nbytes()
    assert huge is not None
    # Less only where memory is so fragmented that the kernel finds no free range.
    assert 0 < huge <= 8 * MIB
    assert huge % (2 * MIB) == 0
    assert arena.nbytes == 8 * MIB + 4096
    arena.close()


@linux
def test_a_released_tail_is_memory_given_back_and_comes_back_zeroed() -> None:
    arena = Arena(16 * MIB + 8192)
    view = arena.take("all", arena.nbytes)
    view[:] = 7
    before = mapped_nbytes(arena)
    # The range that would cut through a huge page stays.
    assert arena.release_tail(5 * MIB) == 4 * MIB + 8192
    assert before - mapped_nbytes(arena) >= 4 * MIB
    assert arena.release_tail(MIB) == 4 * MIB + 8192
    assert (view[: 12 * MIB] == 7).all()
    assert arena.restore_tail() == 4 * MIB + 8192
    assert abs(before - mapped_nbytes(arena)) < MIB
    assert not view[12 * MIB :].any()
    assert arena.restore_tail() == 0
    arena.close()


@linux
def test_a_part_of_the_released_tail_comes_back_in_whole_ranges() -> None:
    arena = Arena(16 * MIB + 8192)
    view = arena.take("all", arena.nbytes)
    view[:] = 7
    assert arena.release_tail(9 * MIB) == 8 * MIB + 8192
    before = mapped_nbytes(arena)
    assert arena.restore_tail(5 * MIB) == 4 * MIB
    assert arena.released_nbytes == 4 * MIB + 8192
    assert abs(mapped_nbytes(arena) - before - 4 * MIB) < MIB
    assert not view[8 * MIB : 12 * MIB].any()
    assert arena.restore_tail(9 * MIB) == 0
    assert arena.released_nbytes == 4 * MIB + 8192
    arena.close()


@linux
def test_a_tail_that_cannot_come_back_stays_released(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(8 * MIB)
    arena.release_tail(4 * MIB)
    before, touch = mapped_nbytes(arena), arena._touch

    def half(begin: int, end: int) -> None:
        touch(begin, (begin + end) // 2)
        raise ArenaError("the system has no memory left")

    monkeypatch.setattr(arena, "_touch", half)
    with pytest.raises(ArenaError):
        arena.restore_tail()
    assert arena.released_nbytes == 4 * MIB
    assert abs(mapped_nbytes(arena) - before) < MIB
    monkeypatch.undo()
    assert arena.restore_tail() == 4 * MIB
    arena.close()


def test_the_tail_in_small_pages_can_be_released_by_itself() -> None:
    arena = Arena(2 * MIB + 4 * mmap.PAGESIZE)
    assert arena.release_tail(2 * mmap.PAGESIZE + 1) == 2 * mmap.PAGESIZE
    assert arena.release_tail(arena.nbytes * 2) == arena.nbytes
    arena.restore_tail()
    arena.close()


def test_views_and_arena_may_be_closed_in_any_order() -> None:
    arena = Arena(MIB)
    view = arena.take("all", MIB)
    assert view.dtype == np.uint8
    arena.close()
    arena.close()
