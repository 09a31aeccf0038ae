"""Where the bytes of a record go when a slot is not one range of memory.

A direct read needs addresses, offsets and sizes that are multiples of 4096. Parts of a slot with
such are read into, where that is safe; all others come through a bounce buffer of the reader's
thread.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple

from aegis.kernels.base import SlotPart
from aegis.kernels.sizes import RECORD_ALIGN

RUN_NBYTES = 2 << 20
"""Records that follow each other in a file are read together up to so many bytes."""


class _Range(NamedTuple):
    """Bytes of a record that are read to one place: a part's, or (None) the bounce buffer."""

    nbytes: int
    part: SlotPart | None


class Copy(NamedTuple):
    """What is to be copied once a read has ended: addresses and a size."""

    source: int
    target: int
    nbytes: int


class Scatter:
    """How records of ``nbytes`` are split over the parts of slots."""

    def __init__(self, parts: Sequence[SlotPart], nbytes: int) -> None:
        self._ranges: list[_Range] = []
        self._copied: list[tuple[SlotPart, int]] = []
        """Parts that are not read into, and where in the bounce buffer they arrive."""
        self.bounce_nbytes = 0
        """Bytes of a record that go through the bounce buffer, padding included."""
        at, waiting = 0, list[SlotPart]()
        for part in sorted(parts, key=lambda part: part.offset):
            if _direct(part):
                self._bounce(at, part.offset, waiting)
                self._ranges.append(_Range(part.nbytes, part))
                at, waiting = part.offset + part.nbytes, []
            else:
                waiting.append(part)
        self._bounce(at, nbytes, waiting)
        self._own = threading.local()
        self._usual_nbytes = max(1, RUN_NBYTES // nbytes) * self.bounce_nbytes

    def _bounce(self, begin: int, end: int, parts: Sequence[SlotPart]) -> None:
        """Bytes ``begin`` to ``end`` of a record, with the parts in them, are bounced."""
        if begin == end:
            return
        self._ranges.append(_Range(end - begin, None))
        for part in parts:
            self._copied.append((part, self.bounce_nbytes + part.offset - begin))
        self.bounce_nbytes += end - begin

    def places(self, slots: Sequence[int]) -> tuple[list[list[memoryview]], list[Copy]]:
        """Where to read records that go to these slots, one list of views for each, and what to
        copy afterwards. The bounce buffer is the calling thread's: read and copy before asking
        again."""
        buffer = self._buffer(len(slots) * self.bounce_nbytes)
        records, copies, at = list[list[memoryview]](), list[Copy](), buffer
        for slot in slots:
            views, begin = list[memoryview](), at
            for nbytes, part in self._ranges:
                if part is None:
                    views.append(view_of(at, nbytes))
                    at += nbytes
                else:
                    views.append(view_of(part.base + slot * part.stride, nbytes))
            for part, place in self._copied:
                target = part.base + slot * part.stride
                copies.append(Copy(begin + place, target, part.nbytes))
            records.append(views)
        return records, copies

    @staticmethod
    def finish(copies: Sequence[Copy]) -> None:
        """Bring what was bounced to where it belongs."""
        for source, target, nbytes in copies:
            ctypes.memmove(target, source, nbytes)

    def _buffer(self, nbytes: int) -> int:
        """The address of this thread's buffer, which has at least so many bytes.

        It is made large enough for the longest usual run at once, and touched before the first
        read, as the arena is.
        """
        held: mmap.mmap | None = getattr(self._own, "buffer", None)
        if held is None or len(held) < nbytes:
            size = max(nbytes, self._usual_nbytes, mmap.PAGESIZE)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._own.buffer = held = mmap.mmap(-1, size, flags=flags)
            for page in range(0, size, mmap.PAGESIZE):
                held[page] = 0
        return ctypes.addressof(ctypes.c_char.from_buffer(held))


def _direct(part: SlotPart) -> bool:
    numbers = (part.offset, part.nbytes, part.base, part.stride)
    return part.direct and not any(n % RECORD_ALIGN for n in numbers)


def view_of(address: int, nbytes: int) -> memoryview:
    """Memory at an address, writable."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
