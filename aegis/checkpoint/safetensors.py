"""Headers of safetensors files, read with every bound checked.

A file is: u64 little-endian header length, the header (JSON: name to dtype, shape and byte range),
and the tensors' bytes. Only the header is read here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aegis.checkpoint.pagecache import drop_pages
from aegis.errors import CheckpointError

MAX_HEADER_NBYTES = 100 << 20

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
        with path.open("rb", buffering=0) as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_NBYTES):
                raise CheckpointError(
                    f"{path} is not a whole safetensors file: its header claims {length} bytes of"
                    f" a file of {size}; download it again"
                )
            header = file.read(length)
            drop_pages(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in _entries(path, header)]
    _check_ranges(path, tensors, 8 + length, size)
    return {tensor.name: tensor for tensor in tensors}


def _entries(path: Path, header: bytes) -> list[tuple[str, Any]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path} lists {twice} twice in its header")
        return data

    try:
        data = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} has a damaged header: it is not a JSON object")
    return [(name, entry) for name, entry in data.items() if name != "__metadata__"]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """Check one header entry by itself: types, and dtype times shape against the byte range."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or not (isinstance(shape, list) and all(map(_is_size, shape)))
        or not (isinstance(span, list) and len(span) == 2 and all(map(_is_size, span)))
    ):
        raise CheckpointError(f"{path} has a damaged header entry for {name}")
    if dtype not in _DTYPE_BITS:
        raise CheckpointError(f"{path} stores {name} as {dtype}, which aegis does not know")
    begin, end = span
    nbytes = math.prod(shape) * _DTYPE_BITS[dtype] // 8
    if end - begin != nbytes:
        raise CheckpointError(
            f"{path} gives {name} {end - begin} bytes, but {dtype} {shape} takes {nbytes}"
        )
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, nbytes)


def _check_ranges(path: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    """Byte ranges must lie inside the file and not overlap."""
    end = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.nbytes and tensor.offset < end:
            raise CheckpointError(f"{path} stores {tensor.name} over another tensor")
        end = max(end, tensor.offset + tensor.nbytes)
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: {tensor.name} ends at byte {end} of a file of {size};"
                " download it again"
            )
