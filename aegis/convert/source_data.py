"""Tensor data of a checkpoint, read in pieces and packed for a store.

Every function here holds a few pieces in memory, whatever the tensor's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.fileio import UncachedReader
from aegis.convert.names import SourceWeight
from aegis.errors import CheckpointError
from aegis.kernels.base import Format, Layout
from aegis.kernels.formats import MlxArrays, Raw, pack, raw_dtype, repack_codes, to_f32
from aegis.kernels.sizes import LANES, align_up

U8 = NDArray[np.uint8]

_AHEAD_NBYTES = 128 << 10
_EXPONENT = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000}


class Streams:
    """Open files of a checkpoint: one reader per stream of consecutive ranges."""

    def __init__(self, piece_nbytes: int) -> None:
        self.piece_nbytes = piece_nbytes
        self._readers: dict[str, tuple[Path, UncachedReader]] = {}

    def __enter__(self) -> Streams:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, reader in self._readers.values():
            reader.close()

    def read(self, stream: str, path: Path, offset: int, nbytes: int) -> U8:
        """Bytes of a file. Each stream keeps its place, so that small ranges share reads."""
        known = self._readers.get(stream)
        if known is None or known[0] != path:
            if known is not None:
                known[1].close()
            reader = UncachedReader(path, self.piece_nbytes, _AHEAD_NBYTES)
            self._readers[stream] = known = (path, reader)
        data = np.empty(nbytes, dtype=np.uint8)
        try:
            known[1].read_into(offset, data)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return data


def packed(
    streams: Streams,
    role: str,
    weight: SourceWeight,
    rows: range,
    fmt: Format,
    layout: Layout,
    align: int,
) -> Iterator[U8]:
    """The stored bytes of some rows of a weight as one tensor, in pieces, in order.

    ``role`` names the streams to read through. ``fmt`` is the stored format.
    """
    if len(weight.shape) == 1:
        raw = _read_part(streams, role, weight, 0, rows, 1)
        yield to_f32(raw.reshape(-1), weight.format).view(np.uint8)
    elif layout == "il16":
        yield from _packed_il16(streams, role, weight, rows, fmt)
    else:
        yield from _packed_row(streams, role, weight, rows, fmt, align)


def _packed_il16(
    streams: Streams, role: str, weight: SourceWeight, rows: range, fmt: Format
) -> Iterator[U8]:
    step = max(LANES, streams.piece_nbytes // weight.row_nbytes(0) // LANES * LANES)
    for start in range(rows.start, rows.stop, step):
        part = range(start, min(start + step, rows.stop))
        arrays = [
            _read_part(streams, role, weight, index, part, fmt.bits)
            for index in range(len(weight.tensors))
        ]
        yield pack(MlxArrays(*arrays), fmt, "il16")


def _packed_row(
    streams: Streams, role: str, weight: SourceWeight, rows: range, fmt: Format, align: int
) -> Iterator[U8]:
    written = 0
    for index in range(len(weight.tensors)):
        padding = align_up(written, align) - written
        if padding:
            yield np.zeros(padding, dtype=np.uint8)
        written += padding
        step = max(1, streams.piece_nbytes // weight.row_nbytes(index))
        for start in range(rows.start, rows.stop, step):
            part = range(start, min(start + step, rows.stop))
            data = _read_part(streams, role, weight, index, part, fmt.bits)
            piece = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            written += piece.size
            yield piece


def _read_part(
    streams: Streams, role: str, weight: SourceWeight, index: int, rows: range, bits: int
) -> Raw:
    """Rows of one of a weight's tensors as [rows, items]; code words at ``bits`` per code."""
    tensor, row_nbytes = weight.tensors[index], weight.row_nbytes(index)
    offset = tensor.offset + rows.start * row_nbytes
    data = streams.read(f"{role}.{index}", tensor.path, offset, len(rows) * row_nbytes)
    if weight.format.kind == "affine" and index == 0:
        words = data.view(np.uint32).reshape(len(rows), -1)
        return repack_codes(words, weight.format.bits, bits)
    raw: Raw = data.view(raw_dtype(weight.format)).reshape(len(rows), -1)
    mask = raw.dtype.type(_EXPONENT[weight.format.dtype])
    if ((raw & mask) == mask).any():
        raise CheckpointError(
            f"{tensor.name} in {tensor.path} holds values that are not finite (NaN or infinity);"
            " the checkpoint is damaged"
        )
    return raw
