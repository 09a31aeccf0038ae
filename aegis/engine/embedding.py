"""The embedding table left on disk: a token's row is read when the token comes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from aegis.checkpoint.fileio import leave_direct, open_uncached
from aegis.checkpoint.pagecache import drop_pages, expect_random_reads
from aegis.errors import ReadError
from aegis.kernels.sizes import align_up

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aegis.checkpoint.store import Store
    from aegis.kernels.base import Array, EmbeddingBlock

_ALIGN = 4096


class DiskEmbedding:
    """Reads rows past the page cache into a fixed buffer, one piece per token of a chunk."""

    def __init__(
        self,
        store: Store,
        embedding: EmbeddingBlock,
        buffer: NDArray[np.uint8],
        direct: bool = True,
    ) -> None:
        """buffer: page-aligned, (row_nbytes rounded up to 4096, plus 4096) per row of a chunk.
        direct: past the page cache, where the file system takes the flag."""
        self._embedding, self._offset = embedding, store.layout.embedding.offset
        self._file = store.resident_path
        self._piece = align_up(embedding.row_nbytes, _ALIGN) + _ALIGN
        self._buffer = buffer
        self._fd, self._direct = open_uncached(self._file, os.O_RDONLY)
        if self._direct and not direct:
            # Some take the flag and refuse the read.
            leave_direct(self._fd)
            self._direct = False
        expect_random_reads(self._fd)
        self._file_nbytes = os.fstat(self._fd).st_size

    def __call__(self, ids: NDArray[np.int32]) -> Array:
        """ids [T] to [T, H]."""
        row_nbytes = self._embedding.row_nbytes
        for index, token in enumerate(ids.tolist()):
            start = self._offset + self._embedding.row_offset(token)
            lead = start % _ALIGN
            piece = self._buffer[index * self._piece : (index + 1) * self._piece]
            self._read(piece, start - lead, lead + row_nbytes)
            # Rows are packed to the front, behind what earlier tokens needed: never overlapping.
            self._buffer[index * row_nbytes : (index + 1) * row_nbytes] = piece[
                lead : lead + row_nbytes
            ]
        rows = self._buffer[: len(ids) * row_nbytes].reshape(len(ids), row_nbytes)
        return self._embedding.from_rows(ids, rows)

    def _read(self, piece: NDArray[np.uint8], start: int, needed: int) -> None:
        want = min(align_up(needed, _ALIGN), self._file_nbytes - start)
        got = 0
        while got < needed:
            more = self._read_some(piece[got : align_up(want, _ALIGN)], start + got)
            if not more:
                raise ReadError(
                    f"{self._file} ended at {start + got}, but a row of the embedding table goes on"
                    f" to {start + needed}; convert the model again"
                )
            got += more
        drop_pages(self._fd, start, want)

    def _read_some(self, out: NDArray[np.uint8], start: int) -> int:
        if self._direct and start % _ALIGN:
            # Behind a short read: direct ones begin on whole pages.
            leave_direct(self._fd)
            self._direct = False
        try:
            return os.preadv(self._fd, [out.data], start)
        except OSError as error:
            raise ReadError(f"{self._file} cannot be read at {start}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
