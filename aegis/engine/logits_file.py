"""Logits of a whole text on disk: for a large vocabulary they fit no cap.

The file is gone from its folder before anything is written, so nothing is left behind whatever
happens, and neither writing nor reading leaves pages in the page cache.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aegis.checkpoint.fileio import ALIGN, UncachedReader, UncachedWriter, aligned_buffer
from aegis.checkpoint.storage import scratch_folders
from aegis.convert.build import disk_errors
from aegis.errors import StoreError
from aegis.kernels.sizes import align_up

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray


_PIECE_NBYTES = 128 << 10
"""Written or read at once: these buffers are in the plan's reserve."""


class LogitsFile:
    """Rows of float32 logits: written one after the other, then read one after the other."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """folder: one on a disk, as ``disk_folder`` finds it.

        Raises:
            StoreError: nothing can be written there.
        """
        self._folder = folder
        self._row = aligned_buffer(align_up(vocab_size * 4, ALIGN))
        self._logits = self._row.view(np.float32)[:vocab_size]
        self._read = 0
        self._undo = ExitStack()
        with disk_errors(folder), tempfile.TemporaryDirectory(prefix=".aegis-", dir=folder) as name:
            path = Path(name) / "logits"
            self._writer = self._undo.enter_context(UncachedWriter(path, _PIECE_NBYTES))
            self._reader = self._undo.enter_context(
                UncachedReader(path, _PIECE_NBYTES, _PIECE_NBYTES)
            )

    def __enter__(self) -> LogitsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.__exit__(kind, error, trace)

    def append(self, logits: NDArray[np.float32]) -> None:
        """Write the next row [vocab_size]; StoreError where the disk refuses."""
        self._logits[:] = logits
        with disk_errors(self._folder):
            self._writer.write(self._row)

    def written(self) -> None:
        """All rows are written; reading begins with the first."""
        with disk_errors(self._folder):
            self._writer.flush()

    def next(self) -> NDArray[np.float32]:
        """The next row, valid until the next call."""
        with disk_errors(self._folder):
            self._reader.read_into(self._read, self._row)
        self._read += self._row.size
        return self._logits


def logits_nbytes(rows: int, vocab_size: int) -> int:
    """Disk that a file of so many rows takes."""
    return rows * align_up(vocab_size * 4, ALIGN)


def disk_folder(cache: Path, needed_nbytes: int) -> Path:
    """A folder for a file of that size: where the cache lies, or where temporary files go.

    Raises:
        StoreError: each of them is in memory, full, or cannot be written.
    """
    reasons = []
    for folder, reason in scratch_folders(cache, needed_nbytes):
        if reason is None:
            return folder
        reasons.append(f"{folder} {reason}")
    raise StoreError(
        f"the logits of the first model take {-(-needed_nbytes >> 20)} MiB of a disk:"
        f" {', '.join(reasons)}; set AEGIS_CACHE to a folder on a disk with room, or evaluate fewer"
        " tokens"
    )
