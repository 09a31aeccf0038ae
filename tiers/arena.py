"""One anonymous memory region that holds everything large, taken whole at open.

The page size of a read's destination decides the disk's speed (2.5x between 4 KiB and 2 MiB pages),
so whole 2 MiB ranges ask for huge pages and every page is touched before use. Python's default
``mmap(-1, n)`` is MAP_SHARED, where huge pages are off; hence MAP_PRIVATE.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import sys
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.sizes import align_up
from aegis.tiers.errors import ArenaError

HUGE_NBYTES = 2 << 20
PAGE_NBYTES = mmap.PAGESIZE
# Linux 5.14's way to touch pages: it reports failure where a plain store would kill the process.
_MADV_POPULATE_WRITE = 23


class Arena:
    """``nbytes`` of private memory starting at a 2 MiB boundary; regions are taken by name.

    The last part that does not fill 2 MiB stays in small pages, so nothing is lost to rounding.
    """

    def __init__(self, nbytes: int) -> None:
        """Reserve and touch ``nbytes`` (rounded up to a page); raises ArenaError."""
        if nbytes <= 0:
            raise ArenaError(f"an arena of {nbytes} bytes was asked for; ask for at least one")
        self.nbytes = align_up(nbytes, PAGE_NBYTES)
        self.used_nbytes = 0
        self.released_nbytes = 0
        self._closed = False
        self._regions: dict[str, tuple[int, int]] = {}
        self._huge_end = self.nbytes // HUGE_NBYTES * HUGE_NBYTES
        try:
            # The slack before and after the aligned part is never touched, so it costs nothing.
            self._map = mmap.mmap(
                -1, self.nbytes + HUGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, ValueError, OverflowError) as error:
            raise ArenaError(
                f"the system refused {self.nbytes} bytes of memory ({error}); use a smaller cap or "
                "raise the limit on address space (ulimit -v)"
            ) from None
        whole: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._start = -whole.ctypes.data % HUGE_NBYTES
        self._view = whole[self._start : self._start + self.nbytes]
        self.base = int(self._view.ctypes.data)
        self._advise()
        try:
            self._touch(0, self.nbytes)
        except ArenaError:
            self.close()
            raise

    def _advise(self) -> None:
        # A forked child could not use it, would hold a copy of every page that changes here, and
        # could be sent the bytes of a direct read that is under way.
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_DONTFORK)
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        # A kernel built without huge pages answers EINVAL: then small pages it is.
        with contextlib.suppress(OSError):
            if self._huge_end:
                self._map.madvise(mmap.MADV_HUGEPAGE, self._start, self._huge_end)
            if tail := self.nbytes - self._huge_end:
                self._map.madvise(mmap.MADV_NOHUGEPAGE, self._start + self._huge_end, tail)

    def _touch(self, begin: int, end: int) -> None:
        if begin >= end:
            return
        if sys.platform == "linux":
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, self._start + begin, end - begin)
                return
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    raise ArenaError(
                        f"the system has no {end - begin} bytes of memory left ({error}); use a "
                        "smaller cap"
                    ) from None
        self._view[begin:end:PAGE_NBYTES] = 0

    def take(self, name: str, nbytes: int, align: int = 64) -> NDArray[np.uint8]:
        """The next ``nbytes`` as a uint8 view whose address is a multiple of ``align``."""
        if align < 1 or align & (align - 1) or align > HUGE_NBYTES:
            raise ArenaError(f"region {name!r}: align is {align}; use a power of two up to 2 MiB")
        if name in self._regions:
            raise ArenaError(f"region {name!r} was taken before; names are unique")
        offset = align_up(self.used_nbytes, align)
        if nbytes < 0 or offset + nbytes > self.nbytes:
            raise ArenaError(
                f"region {name!r} needs {nbytes} bytes, but the arena has "
                f"{max(0, self.nbytes - offset)} of {self.nbytes} left"
            )
        self._regions[name] = (offset, nbytes)
        self.used_nbytes = offset + nbytes
        return self._view[offset : offset + nbytes]

    def regions(self) -> dict[str, tuple[int, int]]:
        """Offset and size of every region, in the order they were taken."""
        return dict(self._regions)

    def release_tail(self, nbytes: int) -> int:
        """Give the last ``nbytes`` back, as far as whole 2 MiB ranges and the small tail allow.

        The figure is a level, not a step: a smaller one than before changes nothing. Returns how
        much is released now. Contents there are lost; nobody may touch them until restored."""
        begin = self.range_from(self.nbytes - min(max(nbytes, 0), self.nbytes))
        end = self.nbytes - self.released_nbytes
        if begin < end:
            self._discard(begin, end)
            self.released_nbytes = self.nbytes - begin
        return self.released_nbytes

    def restore_tail(self, nbytes: int = 0) -> int:
        """Take released bytes back (zeroed) and touch them until at most ``nbytes`` are released.

        Returns how many came; raises ArenaError, with nothing changed, where there is no memory."""
        begin = self.nbytes - self.released_nbytes
        end = max(begin, self.range_from(self.nbytes - min(max(nbytes, 0), self.nbytes)))
        try:
            self._touch(begin, end)
        except ArenaError:
            self._discard(begin, end)
            raise
        self.released_nbytes = self.nbytes - end
        return end - begin

    def _discard(self, begin: int, end: int) -> None:
        advice = getattr(mmap, "MADV_FREE" if sys.platform == "darwin" else "MADV_DONTNEED")
        self._map.madvise(advice, self._start + begin, end - begin)

    def range_from(self, offset: int) -> int:
        """Where the first range begins that lies wholly behind ``offset``: what can be given back
        alone is 2 MiB, or a page in the part at the end that does not fill them."""
        return align_up(offset, HUGE_NBYTES if offset < self._huge_end else PAGE_NBYTES)

    def range_of(self, offset: int) -> int:
        """Where the range begins that ``offset`` lies in."""
        size = HUGE_NBYTES if offset < self._huge_end else PAGE_NBYTES
        return offset // size * size

    def huge_nbytes(self) -> int | None:
        """How much of the arena lies in huge pages now; None where the system does not say."""
        try:
            # A file that the program has mapped may have any name, ends of lines in it too.
            with open(
                "/proc/self/smaps", encoding="ascii", errors="replace", newline="\n"
            ) as lines:
                return sum(_huge_in(lines, self.base, self.base + self.nbytes))
        except OSError:
            return None

    def close(self) -> None:
        """Give all memory back; views taken before must no longer be used."""
        if self._closed:
            return
        self._closed = True
        if sys.platform != "darwin":
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)
        del self._view
        # Views that callers still hold keep the (now empty) address range alive; that is harmless.
        with contextlib.suppress(BufferError):
            self._map.close()


def _huge_in(lines: Iterator[str], begin: int, end: int) -> Iterator[int]:
    inside = False
    for line in lines:
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low < end and high > begin
        elif inside and head == "AnonHugePages:":
            yield int(line.split()[1]) << 10
