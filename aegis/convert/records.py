"""Writing a layer's expert records: while one is read others are packed and written."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import islice
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.checksum import crc32
from aegis.checkpoint.fileio import PIECE_NBYTES, PlacedWriter, UncachedWriter, aligned_buffer
from aegis.checkpoint.overlapped import OverlappedWriter
from aegis.convert.behind import Behind

U8 = NDArray[np.uint8]
Reader = TypeVar("Reader")
Made = TypeVar("Made")
Pieces = Callable[[Reader, int], Iterator[tuple[int, U8]]]
"""What a record consists of, read through a reader: pieces, and where in the record each lies."""

_MOST_THREADS = 8
"""A disk that is read and written at once gives the more, the more is under way; what it still
gains beyond eight is not worth the memory."""
_TOGETHER_NBYTES = 192 << 20
RUN = 16
"""Neighbouring experts that one thread makes one after the other, at most: what is little of each,
its scales, is then read for several at once."""
_LARGE_NBYTES = 24 << 20


def is_large(stride: int) -> bool:
    """Whether such a record is made alone, and never lies in memory whole."""
    return stride > _LARGE_NBYTES


class Threads(NamedTuple):
    """How the records of a file are shared out."""

    number: int
    """Threads, each of which makes a record at a time."""
    run: int
    """Neighbouring records that a thread makes one after the other."""


def threads_for(count: int, nbytes: int) -> Threads:
    """For so many records, each of which takes so much memory while it is made, its reader's
    included."""
    # One alone would leave the disk idle while it packs.
    number = max(2, min(_MOST_THREADS, _TOGETHER_NBYTES // nbytes))
    return Threads(number, max(1, min(RUN, count // number)))


def write_records(
    path: Path,
    stride: int,
    count: int,
    opened: Callable[[], AbstractContextManager[Reader]],
    pieces: Pieces[Reader],
    report: Callable[[int], None],
    behind: Behind,
    threads: Threads,
    piece_nbytes: int = PIECE_NBYTES,
) -> tuple[int, ...]:
    """Write the file of ``count`` records of ``stride`` bytes; their CRC-32s.

    Each reader is used by one of the ``threads``. What no piece covers is zero. The pieces of a
    large record have to come in order. ``report`` is told what was written. ``behind`` brings the
    file to the disk and closes it.

    Raises:
        OSError: it cannot be written.
    """
    checksums: list[int] = []
    if is_large(stride):
        with ExitStack() as file:
            stream = file.enter_context(OverlappedWriter(path, piece_nbytes))
            with opened() as reader:
                for record in range(count):
                    checksums.append(_write_pieces(stream, stride, pieces(reader, record)))
                    report(stride)
            behind.first(file.pop_all().close)
        return tuple(checksums)
    with ExitStack() as file, ExitStack() as stack:
        writer = file.enter_context(PlacedWriter(path, stride * count))
        given_up = Event()

        def make(place: tuple[Reader, U8], run: range) -> list[int]:
            reader, data = place
            made = []
            for record in run:
                if given_up.is_set():
                    break
                for offset, piece in pieces(reader, record):
                    data[offset : offset + piece.size] = piece
                writer.write(record * stride, data)
                made.append(crc32(data))
            return made

        number, run = threads
        runs = [range(first, min(first + run, count)) for first in range(0, count, run)]
        places = [(stack.enter_context(opened()), aligned_buffer(stride)) for _ in range(number)]
        all_made = stack.enter_context(closing(_in_order(make, places, runs)))
        try:
            for made in all_made:
                checksums += made
                report(stride * len(made))
        except BaseException:
            given_up.set()
            raise
        behind.first(file.pop_all().close)
    return tuple(checksums)


def _write_pieces(writer: UncachedWriter, stride: int, pieces: Iterator[tuple[int, U8]]) -> int:
    checksum = end = 0

    def write(data: U8) -> None:
        nonlocal checksum, end
        checksum = zlib.crc32(data.data, checksum)
        writer.write(data)
        end += data.size

    for offset, piece in pieces:
        write(np.zeros(offset - end, dtype=np.uint8))
        write(piece)
    write(np.zeros(stride - end, dtype=np.uint8))
    return checksum


def _in_order(
    make: Callable[[tuple[Reader, U8], range], Made],
    places: Sequence[tuple[Reader, U8]],
    runs: Iterable[range],
) -> Generator[Made, None, None]:
    """``make(place, run)`` for each run, in order, on a thread for each place.

    The first error ends it. Closing it waits for what is being made.
    """
    with ThreadPoolExecutor(len(places)) as threads:
        line: deque[tuple[tuple[Reader, U8], Future[Made]]] = deque()
        left = iter(runs)
        for place, run in zip(places, left, strict=False):
            line.append((place, threads.submit(make, place, run)))
        while line:
            place, made = line.popleft()
            yield made.result()
            for run in islice(left, 1):
                line.append((place, threads.submit(make, place, run)))
