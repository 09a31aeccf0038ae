"""Writing while the next bytes are being made."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from aegis.checkpoint.fileio import PIECE_NBYTES, UncachedWriter, aligned_buffer


class OverlappedWriter(UncachedWriter):
    """An UncachedWriter with two buffers: one is on its way to the disk while the other is filled.

    What fails on the way is raised by the call after it, ``close`` at the latest.
    """

    def __init__(self, path: Path, buffer_nbytes: int = PIECE_NBYTES) -> None:
        super().__init__(path, buffer_nbytes)
        self._other = aligned_buffer(self._buffer.size)
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            # Nobody may write to a descriptor that is closed.
            self._thread.shutdown()
        super().__exit__(kind, error, trace)

    def flush(self) -> None:
        """Write what is buffered."""
        self._flush()
        self._await()

    def _flush(self) -> None:
        self._await()
        view = self._buffer[: self._fill].data
        self._buffer, self._other = self._other, self._buffer
        self._fill = 0
        self._under_way = self._thread.submit(self._write_out, view)

    def _await(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _finish(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()
