"""A GGUF file: keys and values, the tensors' names and places, then their data."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf_blocks import BLOCK_SIZES
from numpy.typing import NDArray

from aegis.checkpoint.overlapped import OverlappedWriter

U8 = NDArray[np.uint8]
ALIGN = 32
"""Every tensor's data begins on a multiple of it, counted from the first one's."""
_PAGE = 4096
_PIECE = 4 << 20
_VERSION = 3
_TYPES = {"f32": 0, "q4_1": 3, "q4_k": 12}
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; ``pieces`` yields its bytes."""

    name: str
    shape: tuple[int, ...]
    """What lies next to each other last, as in numpy."""
    kind: str
    pieces: Callable[[], Iterator[U8]]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        weights, nbytes = BLOCK_SIZES[self.kind]
        return math.prod(self.shape) // weights * nbytes


class File:
    """What a file will hold: strings, floats, bools, whole numbers (uint32) and lists of these by
    key, and tensors."""

    def __init__(self, description: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._head = _header(description, tensors)
        self.nbytes = len(self._head) + sum(_aligned(tensor.nbytes) for tensor in tensors)
        """Its size, but for zeros up to a whole page."""

    def write(self, path: Path, progress: Callable[[int, int], None]) -> None:
        """Write it to a new file, past the page cache; ``progress`` is called with (done, total)
        bytes."""
        with OverlappedWriter(path, _PIECE) as writer:
            writer.write(np.frombuffer(self._head, np.uint8))
            for tensor in self._tensors:
                end = writer.written + tensor.nbytes
                for piece in tensor.pieces():
                    writer.write(piece)
                    progress(writer.written, self.nbytes)
                if writer.written != end:
                    raise AssertionError(f"{tensor.name} was to end at {end}: {writer.written}")
                writer.pad_to(ALIGN)
            writer.pad_to(_PAGE)


def _header(description: dict[str, Any], tensors: Sequence[Tensor]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(description))]
    for key, value in description.items():
        kind, data = _value(value)
        parts += [_text(key), struct.pack("<I", kind), data]
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        parts += [_text(tensor.name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        parts.append(struct.pack("<IQ", _TYPES[tensor.kind], offset))
        offset += _aligned(tensor.nbytes)
    data = b"".join(parts)
    return data.ljust(_aligned(len(data)), b"\0")


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> tuple[int, bytes]:
    """The type of a value, and its bytes."""
    if isinstance(value, bool):  # Ahead of int, which it is to Python.
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return _UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return _FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _text(value)
    kinds, items = zip(*map(_value, value), strict=True)
    return _ARRAY, struct.pack("<IQ", kinds[0], len(items)) + b"".join(items)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
