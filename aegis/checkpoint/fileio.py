"""Reading and writing files without leaving anything in the page cache.

On Linux files are opened with O_DIRECT, on macOS with F_NOCACHE. Where the file system refuses,
the same calls go through the page cache and drop the pages at once.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import zlib
from collections.abc import Iterable
from functools import partial
from io import FileIO
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.pagecache import drop_pages as drop_pages
from aegis.errors import CheckpointError

ALIGN = 4096
PIECE_NBYTES = 1 << 20
"""Default size of one read or write."""

U8 = NDArray[np.uint8]


def aligned_buffer(nbytes: int) -> U8:
    """Page-aligned anonymous memory, zeroed, private to the process."""
    size = max(nbytes, 1)
    if sys.platform == "win32":
        raise OSError("aegis needs Linux or macOS")
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def open_uncached(path: Path, flags: int) -> tuple[int, bool]:
    """A file descriptor, and whether it bypasses the page cache."""
    flags |= os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return os.open(path, flags | direct, 0o644), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
    fd = os.open(path, flags, 0o644)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    return fd, False


def leave_direct(fd: int) -> None:
    """Go on through the page cache: where the flag is taken and a read or write is refused, and
    behind one that came short, since direct ones begin and end on whole pages."""
    import fcntl

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))


class UncachedReader:
    """Reads byte ranges of a file through one small window of its own.

    A read brings at least ``ahead_nbytes``, where it isn't given another number, so that the next
    one may find its bytes in the window; never more than the window holds.
    """

    def __init__(
        self, path: Path, window_nbytes: int = PIECE_NBYTES, ahead_nbytes: int = PIECE_NBYTES
    ) -> None:
        self._path, self._ahead = path, ahead_nbytes
        self._fd, self._direct = open_uncached(path, os.O_RDONLY)
        self._window = aligned_buffer(-(-window_nbytes // ALIGN) * ALIGN + ALIGN)
        self._start = self._end = 0

    def __enter__(self) -> UncachedReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            drop_pages(self._fd)  # What the kernel read ahead and nobody asked for.
            os.close(self._fd)
            self._fd = -1

    def read_into(self, offset: int, out: U8, ahead_nbytes: int | None = None) -> None:
        """Fill ``out`` with the bytes at ``offset``, behind which ``ahead_nbytes`` from there on
        will be wanted next.

        Raises:
            EOFError: the file ends before.
            OSError: reading failed.
        """
        done = 0
        while done < out.size:
            if not self._start <= offset + done < self._end:
                left, ahead = out.size - done, self._ahead
                if ahead_nbytes is not None:
                    ahead = ahead_nbytes - done
                self._load(offset + done, max(left, ahead))
            begin = offset + done - self._start
            count = min(out.size - done, self._end - self._start - begin)
            out[done : done + count] = self._window[begin : begin + count]
            done += count

    def view(self, offset: int, nbytes: int, ahead_nbytes: int) -> U8 | None:
        """The same bytes where they lie in the window, which they do until the next call; None if
        it cannot hold them.

        Raises:
            EOFError: the file ends before.
            OSError: reading failed.
        """
        if nbytes + ALIGN > self._window.size:
            return None
        if not self._start <= offset <= offset + nbytes <= self._end:
            self._load(offset, max(nbytes, ahead_nbytes))
        begin, end = offset - self._start, offset + nbytes - self._start
        return self._window[begin:end] if offset + nbytes <= self._end else None

    def _load(self, offset: int, wanted: int) -> None:
        """Move the window to ``offset``; it may hold more than is wanted for the next call."""
        start = offset // ALIGN * ALIGN
        size = -(-(offset - start + wanted) // ALIGN) * ALIGN
        self._start = self._end = start
        filled = 0
        while start + filled <= offset:
            got = self._read(self._window[filled:size], start + filled)
            filled += got
            # Direct reads too: some file systems answer those from the page cache.
            drop_pages(self._fd, start, filled)
            if got == 0:
                raise EOFError(f"{self._path} ends before byte {offset + 1}")
        self._end = start + filled

    def _read(self, out: U8, offset: int) -> int:
        try:
            return os.preadv(self._fd, [out.data], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._leave_direct()
        return os.preadv(self._fd, [out.data], offset)

    def _leave_direct(self) -> None:
        leave_direct(self._fd)
        self._direct = False


class _NewFile:
    """A new file that is written past the page cache."""

    def __init__(self, path: Path) -> None:
        self._fd, self._direct = open_uncached(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_at(self, offset: int, view: memoryview) -> None:
        while view:
            try:
                count = os.pwrite(self._fd, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                leave_direct(self._fd)
                self._direct = False
                continue
            view = view[count:]
            offset += count
        if not self._direct:
            os.fdatasync(self._fd) if hasattr(os, "fdatasync") else os.fsync(self._fd)
            drop_pages(self._fd)

    def _finish(self) -> None:
        """Write what was not written yet."""

    def close(self) -> None:
        """Write what is buffered and wait until everything is on the disk."""
        try:
            self._finish()
            os.fsync(self._fd)
            drop_pages(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1


class PlacedWriter(_NewFile):
    """Writes ranges of a new file in any order, by several threads at a time.

    Offsets and sizes are multiples of 4096 bytes, as are the addresses of the data.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(path)
        try:
            os.truncate(self._fd, nbytes)  # Writes that lengthen a file wait for each other.
        except OSError:
            os.close(self._fd)
            raise

    def __enter__(self) -> PlacedWriter:
        return self

    def write(self, offset: int, data: U8) -> None:
        """Write bytes; several threads may do so."""
        self._write_at(offset, data.data)


class UncachedWriter(_NewFile):
    """Writes a new file from start to end through an aligned buffer.

    What is written must add up to a multiple of 4096 bytes before ``close``.
    """

    def __init__(self, path: Path, buffer_nbytes: int = PIECE_NBYTES) -> None:
        super().__init__(path)
        self._buffer = aligned_buffer(buffer_nbytes // ALIGN * ALIGN)
        self._fill = 0
        self._on_disk = 0
        self.written = 0
        """Bytes taken so far, buffered ones included."""

    def __enter__(self) -> UncachedWriter:
        return self

    def write(self, data: U8) -> None:
        """Append bytes."""
        done = 0
        while done < data.size:
            count = min(data.size - done, self._buffer.size - self._fill)
            self._buffer[self._fill : self._fill + count] = data[done : done + count]
            self._fill += count
            done += count
            if self._fill == self._buffer.size:
                self._flush()
        self.written += data.size

    def pad_to(self, alignment: int) -> None:
        """Append zeros up to a multiple of ``alignment``."""
        missing = -self.written % alignment
        if missing:
            self.write(np.zeros(missing, dtype=np.uint8))

    def flush(self) -> None:
        """Have what is buffered written: whole pages, where reads and writes are direct."""
        self._flush()

    def _flush(self) -> None:
        self._write_out(self._buffer[: self._fill].data)
        self._fill = 0

    def _write_out(self, view: memoryview) -> None:
        self._write_at(self._on_disk, view)
        self._on_disk += len(view)

    def _finish(self) -> None:
        self._flush()


def sync_folder(path: Path) -> None:
    """Make creations and renames in a folder durable, where its file system knows how to."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes, durable: bool = True) -> None:
    """Replace a small file atomically; ``durable``: it is there after a power failure, too."""
    temporary = path.with_name(f".{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        if durable:
            os.fsync(fd)
        drop_pages(fd)
    temporary.replace(path)
    if durable:
        sync_folder(path.parent)


def write_pieces(path: Path, pieces: Iterable[bytes]) -> tuple[int, int]:
    """Write a new file, leaving nothing in the page cache; its size and CRC-32."""
    size = crc = 0
    with path.open("xb", buffering=0) as writer:
        for piece in pieces:
            crc, size = zlib.crc32(piece, crc), size + len(piece)
            view = memoryview(piece)
            while view:
                view = view[writer.write(view) :]
        os.fsync(writer.fileno())
        drop_pages(writer.fileno())
    return size, crc


def copy_file(source: Path, target: Path) -> tuple[int, int]:
    """Copy a file in pieces, leaving neither in the page cache; its size and CRC-32."""
    with source.open("rb", buffering=0) as reader:
        written = write_pieces(target, iter(partial(_next_piece, source, reader), b""))
        drop_pages(reader.fileno())
    return written


def _next_piece(path: Path, reader: FileIO) -> bytes:
    """Failing to read is the source's fault, not that of the place written to."""
    try:
        return reader.read(PIECE_NBYTES) or b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
