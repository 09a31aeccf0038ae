"""Tensor data of a checkpoint, read in pieces and packed for a store.

Every function here holds a few pieces in memory, whatever the tensor's size; and one expert's
matrix where these lie transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.fileio import UncachedReader
from aegis.checkpoint.safetensors import TensorInfo
from aegis.convert.fp8 import dequantized
from aegis.convert.head_parts import head_parts
from aegis.convert.names import BlockScales, SourceWeight
from aegis.convert.quantize import quantize
from aegis.errors import CheckpointError
from aegis.kernels.base import Format, Layout
from aegis.kernels.formats import (
    MlxArrays,
    Raw,
    from_f32,
    pack,
    raw_dtype,
    repack_codes,
    to_f32,
)
from aegis.kernels.sizes import LANES, RESIDENT_ALIGN, FormatError, align_up, dtype_nbytes
from aegis.kernels.sizes import nbytes as tensor_nbytes

U8 = NDArray[np.uint8]
Take = Callable[[str, Path, int, int, int], U8]

_AHEAD_NBYTES = 128 << 10
_MOST_AHEAD_NBYTES = 4 << 20
"""Disks give much more for few large reads than for many small ones."""
_KEPT_NBYTES = 8 << 20
"""Scales and biases that may wait in memory behind their codes."""

_EXPONENT = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000}
_MOST_E8M0 = 252
"""A scale of which the largest code still makes a finite float32."""


class Streams:
    """Open files of a checkpoint: one reader per stream of consecutive ranges.

    ``run``: so many times what is asked for will be wanted, and is read at once if it is not much.
    """

    def __init__(self, piece_nbytes: int, run: int = 8) -> None:
        self.piece_nbytes, self._run = piece_nbytes, run
        self._readers: dict[str, tuple[Path, UncachedReader]] = {}
        self._kept: dict[str, tuple[tuple[Path, int, int], U8]] = {}
        self._whole: tuple[tuple[Path, int, int], U8] | None = None
        self._scratch: dict[str, U8] = {}

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

    def read_twice(self, stream: str, path: Path, offset: int, nbytes: int, left: int) -> U8:
        """The same for a range that is asked for a second time before any other of the stream."""
        place = (path, offset, nbytes)
        kept = self._kept.pop(stream, None)
        if kept is not None and kept[0] == place:
            return kept[1]
        data = self.read(stream, *place, left)
        self._kept[stream] = place, data
        return data

    def read_whole(self, path: Path, offset: int, nbytes: int) -> U8:
        """A range, however large, that stays in memory until another one is asked for here."""
        place = (path, offset, nbytes)
        if self._whole is None or self._whole[0] != place:
            self._whole = None  # There need not be room for two.
            self._whole = place, self.read("whole", *place)
        return self._whole[1]

    def read(self, stream: str, path: Path, offset: int, nbytes: int, left: int = 0) -> U8:
        """Bytes of a file, behind which ``left`` more may be wanted. Each stream keeps its place,
        so that small ranges share reads."""
        reader, data = self._reader(stream, path, left), np.empty(nbytes, dtype=np.uint8)
        try:
            reader.read_into(offset, data, self._ahead(nbytes, left))
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return data

    def borrow(self, stream: str, path: Path, offset: int, nbytes: int, left: int = 0) -> U8:
        """The same, but the stream's next bytes may come to lie where these are: new memory takes
        longer than what is done with it."""
        reader = self._reader(stream, path, left)
        try:
            data = reader.view(offset, nbytes, self._ahead(nbytes, left))
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self.read(stream, path, offset, nbytes, left) if data is None else data

    def scratch(self, stream: str, nbytes: int) -> U8:
        """Memory for what is made of a stream's bytes, until more is made of it."""
        found = self._scratch.get(stream)
        if found is None or found.size < nbytes:
            self._scratch[stream] = found = np.empty(nbytes, dtype=np.uint8)
        return found[:nbytes]

    def _reader(self, stream: str, path: Path, left: int) -> UncachedReader:
        known = self._readers.get(stream)
        if known is None or known[0] != path:
            if known is not None:
                known[1].close()
            window = max(self.piece_nbytes, _MOST_AHEAD_NBYTES if left else 0)
            self._readers[stream] = known = (path, UncachedReader(path, window))
        return known[1]

    def _ahead(self, nbytes: int, left: int) -> int:
        return max(min(self._run * nbytes, nbytes + left, _MOST_AHEAD_NBYTES), _AHEAD_NBYTES)


def ahead_nbytes(weight: SourceWeight, rows: int, run: int) -> int:
    """What the streams of a weight have in memory where runs of experts of so many rows are
    read."""
    sizes = (rows * weight.row_nbytes(part) for part in range(len(weight.tensors)))
    return sum(min(run * size, _MOST_AHEAD_NBYTES) for size in sizes)


def packed(
    streams: Streams,
    role: str,
    weight: SourceWeight,
    rows: range,
    fmt: Format,
    layout: Layout,
    align: int,
) -> Iterator[U8]:
    """The stored bytes of some rows of a weight as one tensor, in pieces, in order: each is there
    until the next one is asked for.

    ``role`` names the streams to read through. ``fmt`` is the stored format.
    """
    if len(weight.shape) == 1:
        yield _vector(streams, role, weight, rows).view(np.uint8)
    elif layout == "il16":
        yield from _packed_il16(streams, role, weight, rows, fmt)
    else:
        yield from _packed_row(streams, role, weight, rows, fmt, align)


def _vector(streams: Streams, role: str, weight: SourceWeight, rows: range) -> NDArray[np.float32]:
    """A whole vector as it is stored."""
    numbers = to_f32(_read_weight(streams, role, weight, rows, weight.stored).weight, weight.stored)
    if weight.add_one and weight.target is None:
        # Exactly; where the checkpoint is quantised meanwhile it was added in the numbers' type.
        numbers = numbers + np.float32(1)
    return np.ascontiguousarray(numbers.reshape(-1, weight.taps or 1).T).reshape(-1)


def _params_nbytes(numbers: int, fmt: Format) -> int:
    """Bytes of the scales and biases of so many numbers."""
    return 2 * numbers // fmt.group_size * dtype_nbytes(fmt) if fmt.kind == "affine" else 0


def _pieces(streams: Streams, rows: range, row_nbytes: int, multiple: int = 1) -> Iterator[range]:
    """Ranges of rows that take about a piece."""
    step = max(multiple, streams.piece_nbytes // row_nbytes // multiple * multiple)
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


def _packed_il16(
    streams: Streams, role: str, weight: SourceWeight, rows: range, fmt: Format
) -> Iterator[U8]:
    for part in _pieces(streams, rows, weight.row_nbytes(0), LANES):
        size = tensor_nbytes((len(part), weight.shape[1]), fmt, "il16", RESIDENT_ALIGN)
        out = streams.scratch(role, size)
        yield pack(_read_weight(streams, role, weight, part, fmt), fmt, "il16", out=out)


def _packed_row(
    streams: Streams, role: str, weight: SourceWeight, rows: range, fmt: Format, align: int
) -> Iterator[U8]:
    written = 0
    for array in _row_arrays(streams, role, weight, rows, fmt):
        padding = align_up(written, align) - written
        if padding:
            yield np.zeros(padding, dtype=np.uint8)
        written += padding
        for data in array:
            piece = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            written += piece.size
            yield piece


def _row_arrays(
    streams: Streams, role: str, weight: SourceWeight, rows: range, fmt: Format
) -> Iterator[Iterator[Raw]]:
    """Code words, scales and biases (or plain numbers), one after the other, each in pieces."""
    if weight.target is None:
        for index in range(len(weight.tensors)):
            parts = _pieces(streams, rows, weight.row_nbytes(index))
            yield (_read_part(streams, role, weight, index, part, fmt.bits) for part in parts)
        return
    # Quantising again is dearer than keeping the scales and biases of what fits; what does not
    # is read once for each of the three.
    again = 3 if fmt.kind == "affine" else 1
    keep = _params_nbytes(len(rows) * weight.shape[1], fmt) <= _KEPT_NBYTES
    kept: list[list[Raw]] = [[], []]

    def arrays(index: int) -> Iterator[Raw]:
        for part in _pieces(streams, rows, weight.row_nbytes(0)):
            found = _read_weight(streams, role, weight, part, fmt)
            if keep and index == 0:
                for each, array in zip(kept, found[1:], strict=True):
                    if array is not None:
                        each.append(array)
            chosen = found[index]
            assert chosen is not None
            yield chosen

    for index in range(again):
        yield iter(kept[index - 1]) if keep and index else arrays(index)


def _read_weight(
    streams: Streams, role: str, weight: SourceWeight, rows: range, fmt: Format
) -> MlxArrays:
    """Rows of a weight as the checkpoint's arrays, quantised if that is its target; code words at
    the width of ``fmt``."""
    if weight.target is None:
        count = range(len(weight.tensors))
        return MlxArrays(*(_read_part(streams, role, weight, i, rows, fmt.bits) for i in count))
    tensor, target = weight.tensors[0], weight.target
    raw = _read_numbers(streams, role, weight, 0, rows)
    if weight.add_one:
        _refuse_not_finite(raw, weight.format, tensor)
        raw = from_f32(to_f32(raw, weight.format) + np.float32(1), weight.format)
    if target.dtype != weight.format.dtype:
        _refuse_not_finite(raw, weight.format, tensor)
        with np.errstate(over="ignore"):
            raw = from_f32(to_f32(raw, weight.format), target)
        _refuse_not_finite(raw, target, tensor, f" as {target.dtype}")
    if target.kind == "dense":
        return MlxArrays(raw)
    try:
        arrays, _ = quantize(raw, target, target.bits, target.group_size)
    except FormatError as error:
        _refuse_not_finite(raw, target, tensor)
        raise CheckpointError(
            f"{tensor.name} in {tensor.path} cannot be quantised: {error}; convert it without"
            " --bits"
        ) from error
    return arrays._replace(weight=repack_codes(arrays.weight, target.bits, fmt.bits))


def _read_part(
    streams: Streams, role: str, weight: SourceWeight, index: int, rows: range, bits: int
) -> Raw:
    """Rows of one of a weight's tensors as [rows, items]; code words at ``bits`` per code."""
    raw = _read_numbers(streams, role, weight, index, rows)
    if weight.format.kind != "dense" and index == 0:
        return repack_codes(raw, weight.format.bits, bits)
    _refuse_not_finite(raw, weight.format, weight.tensors[index])
    return raw


def _read_numbers(
    streams: Streams,
    role: str,
    weight: SourceWeight,
    index: int,
    rows: range,
    borrow: bool = True,
) -> Raw:
    """Rows of one of a weight's tensors as they lie in the file, or as they follow from it.
    ``borrow``: others of the stream may come to lie where these are."""
    if weight.heads is not None:

        def read(whole: SourceWeight, index: int, rows: range) -> Raw:
            return _read_numbers(streams, f"{role}.{index}", whole, index, rows, borrow=False)

        return head_parts(read, *weight.heads, rows)
    places = weight.places(rows)
    borrow = borrow and len(places) == 1
    pieces = [_read_rows(streams, role, weight, index, place, borrow) for place in places]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _read_columns(streams: Streams, weight: SourceWeight, rows: range) -> Raw:
    """Neighbouring rows of one matrix that lies transposed, as [rows, inputs]."""
    tensor, (turn, turns) = weight.tensors[0], weight.turn
    count, inputs, columns = tensor.shape
    matrix, first = divmod(rows.start * turns, columns)
    size = tensor.nbytes // count
    data = streams.read_whole(tensor.path, tensor.offset + matrix * size, size)
    numbers: Raw = data.view(raw_dtype(weight.format)).reshape(inputs, columns)
    return numbers[:, first + turn : first + len(rows) * turns : turns].T.copy()


def _read_rows(
    streams: Streams, role: str, weight: SourceWeight, index: int, rows: range, borrow: bool
) -> Raw:
    """Neighbouring rows of one of a weight's tensors as [rows, items]; those in FP8 as numbers."""
    if weight.transposed:
        return _read_columns(streams, weight, rows)
    tensor, row_nbytes = weight.tensors[index], weight.row_nbytes(index)
    turn, turns = weight.turn
    once = turns == 1
    take: Take = streams.borrow if borrow else streams.read
    if not once:
        take = streams.read_twice
    start, size = tensor.offset + rows.start * row_nbytes, len(rows) * row_nbytes
    stream = f"{role}.{index}" if once else tensor.name
    left = tensor.offset + tensor.nbytes - start - size
    data = take(stream, tensor.path, start, size, left).reshape(len(rows), -1)
    if weight.scales is not None:
        return dequantized(data, _block_scales(streams, role, weight.scales, rows))
    words = weight.format.kind != "dense" and index == 0
    raw: Raw = data.view(np.uint32 if words else raw_dtype(weight.format))
    if not raw.flags.aligned:
        raw = raw.copy()
    return raw.reshape(len(rows), turns, -1)[:, turn]


def _block_scales(
    streams: Streams, role: str, scales: BlockScales, rows: range
) -> NDArray[np.float32]:
    """float32 scales of rows of codes, [rows, blocks of columns]."""
    places = np.array([scales.row(row) for row in rows])
    first, count = int(places[0]), int(places[-1] - places[0]) + 1
    offset = scales.tensor.offset + first * scales.row_nbytes
    tensor, size = scales.tensor, count * scales.row_nbytes
    raw: Raw = streams.read(f"{role}.scales", tensor.path, offset, size)
    numbers = to_f32(raw.view(raw_dtype(scales.format)), scales.format)
    found: NDArray[np.float32] = numbers.reshape(count, -1)[places - first]
    return found


def _refuse_not_finite(raw: Raw, fmt: Format, tensor: TensorInfo, how: str = "") -> None:
    # A ufunc's own call: for so little at a time methods take longer than what they do.
    if fmt.dtype == "e8m0":
        wrong = np.maximum.reduce(raw, axis=None, initial=0) > _MOST_E8M0
    else:
        mask = raw.dtype.type(_EXPONENT[fmt.dtype])
        wrong = np.maximum.reduce(raw & mask, axis=None, initial=0) == mask
    if wrong:
        raise CheckpointError(
            f"{tensor.name} in {tensor.path} holds values that are not finite{how} (NaN or"
            " infinity); the checkpoint is damaged"
        )
