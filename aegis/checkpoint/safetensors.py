"""Headers of safetensors files, read with every bound checked, and made.

A file is: u64 little-endian header length, the header (JSON: name to dtype, shape and byte range),
and the tensors' bytes. Only the header is read, or made, here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aegis.checkpoint.plainfile import (
    FileDamageError,
    parse_object,
    read_regular,
    regular_nbytes,
    shown,
    shown_name,
)
from aegis.errors import CheckpointError

MAX_HEADER_NBYTES = 32 << 20
"""What 90,000 tensors take twice."""

_ALIGN = 4096
"""Where the tensors of a file that is written begin: at a page."""
_MAX_RANK = 8
_MAX_SIZE = 1 << 50
_MAX_NAME = 1024

_LFS_POINTER = b"version "
"""What a pointer file begins with; as a length it would be beyond any disk."""

_DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: where its bytes are (absolute offset) and what they mean."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file by name.

    Raises:
        CheckpointError: the file is truncated, or its header is damaged.
    """
    try:
        size = regular_nbytes(path)
        length = header_nbytes(path, size, read_regular(path, 8, 0, 8))
        header = read_regular(path, MAX_HEADER_NBYTES, 8, length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a checkpoint folder needs it") from None
    except FileDamageError as error:
        raise CheckpointError(error.about(path)) from error
    return parse_header(path, size, header)


def header_nbytes(path: Path, size: int, start: bytes) -> int:
    """The length of the header of a file of ``size`` bytes that begins with ``start``, 8 of them.

    Raises:
        CheckpointError: the file cannot have such a header.
    """
    if start == _LFS_POINTER:
        raise CheckpointError(f"{path} is a pointer of Git LFS; fetch the file: git lfs pull")
    length = int.from_bytes(start, "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(_not_whole(path, length, size))
    return length


def parse_header(path: Path, size: int, header: bytes) -> dict[str, TensorInfo]:
    """Every tensor by name of a file of ``size`` bytes, which need not be here, by its header.

    Raises:
        CheckpointError: the header is damaged, or the file is truncated.
    """
    begin = 8 + len(header)
    tensors = [_tensor(path, name, entry, begin) for name, entry in _entries(path, header)]
    _check_ranges(path, tensors, begin, size)
    return {tensor.name: tensor for tensor in tensors}


def file_start(tensors: Iterable[TensorInfo]) -> tuple[bytes, tuple[TensorInfo, ...]]:
    """The first bytes of a file of these tensors, wherever they are now, and the order in which
    their own bytes follow: those of wide numbers first, so that all lie at multiples of their
    width."""
    ordered = tuple(sorted(tensors, key=lambda t: (-_DTYPE_BITS[t.dtype], t.name)))
    entries, end = {}, 0
    for tensor in ordered:
        span = [end, end := end + tensor.nbytes]
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": span,
        }
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGN)
    return len(header).to_bytes(8, "little") + header, ordered


def file_nbytes(tensors: Collection[TensorInfo]) -> int:
    """The size of that file; 0 where there are none."""
    return len(file_start(tensors)[0]) + sum(t.nbytes for t in tensors) if tensors else 0


def _not_whole(path: Path, length: int, size: int) -> str:
    if not size:
        return f"{path} is empty; download it again"
    return (
        f"{path} is not a whole safetensors file: its header claims {length} bytes of a file of"
        f" {size}; download it again"
    )


def _entries(path: Path, header: bytes) -> list[tuple[str, Any]]:
    try:
        data = parse_object(header)
    except FileDamageError as error:
        raise CheckpointError(
            f"{path} has a damaged header: it {error}; download it again"
        ) from error
    entries = [(name, entry) for name, entry in data.items() if name != "__metadata__"]
    for name, _ in entries:
        if not name.isprintable() or len(name) > _MAX_NAME:
            raise CheckpointError(
                f"{path} has a damaged header: {shown(name)} is no name of a tensor; download it"
                " again"
            )
    return entries


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


def _sizes(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(map(_is_size, value))


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """Check one header entry by itself: types, and dtype times shape against the byte range."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (
        isinstance(dtype, str) and _sizes(shape, _MAX_RANK) and _sizes(span, 2) and len(span) == 2
    ):
        raise CheckpointError(
            f"{path} has a damaged header entry for {shown_name(name)}; download it again"
        )
    if dtype not in _DTYPE_BITS:
        raise CheckpointError(
            f"{path} stores {shown_name(name)} as {shown(dtype)}, which aegis does not know; use a"
            " checkpoint in BF16, F16, F32 or MLX's quantised format"
        )
    begin, end = span
    nbytes = math.prod(shape) * _DTYPE_BITS[dtype] // 8
    if end - begin != nbytes:
        raise CheckpointError(
            f"{path} gives {shown_name(name)} {end - begin} bytes, but {dtype} {shape} takes"
            f" {nbytes}; download it again"
        )
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, nbytes)


def _check_ranges(path: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    """Byte ranges must follow each other without a gap, from the header to the file's end."""
    end = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        name = shown_name(tensor.name)
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError(
                f"{path} is truncated: {name} ends at byte {tensor.offset + tensor.nbytes} of a"
                f" file of {size}; download it again"
            )
        if not tensor.nbytes:
            continue
        if tensor.offset < end:
            raise CheckpointError(f"{path} stores {name} over another tensor; download it again")
        if tensor.offset > end:
            raise CheckpointError(
                f"{path} has {tensor.offset - end} bytes before {name} that belong to no tensor;"
                " download it again"
            )
        end = tensor.offset + tensor.nbytes
    if end < size:
        raise CheckpointError(
            f"{path} ends with {size - end} bytes that belong to no tensor; download it again"
        )
