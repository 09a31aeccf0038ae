"""A reader of GGUF files that shares nothing with what writes them: plain loops over the format."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass
class Gguf:
    """What a file says, and its tensors."""

    data: bytes
    keys: dict[str, Any]
    places: dict[str, tuple[list[int], int, int]]
    """Of each tensor its shape, ggml's number of its type, and where its data begins."""

    def values(self, name: str) -> F64:
        """A tensor dequantised; what lies next to each other last."""
        shape, kind, start = self.places[name]
        return _values(self.data[start:], kind, int(np.prod(shape))).reshape(shape)


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self) -> str:
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        return self.number({4: "I", 6: "f", 7: "?"}[kind])


def q4_1(block: bytes) -> list[float]:
    """32 weights of 20 bytes."""
    d, m = np.frombuffer(block[:4], np.float16).astype(float)
    low = [d * (byte & 15) + m for byte in block[4:]]
    return low + [d * (byte >> 4) + m for byte in block[4:]]


def q4_k(block: bytes) -> list[float]:
    """256 weights of 144 bytes."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(float)
    packed, codes = block[4:16], block[16:]
    found = []
    for j in range(8):
        if j < 4:
            scale, less = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
            less = packed[j + 4] >> 4 | packed[j] >> 6 << 4
        part = codes[j // 2 * 32 : j // 2 * 32 + 32]
        found += [d * scale * (byte >> 4 if j % 2 else byte & 15) - dmin * less for byte in part]
    return found


_BLOCKS = {3: (32, 20, q4_1), 12: (256, 144, q4_k)}


def _values(data: bytes, kind: int, count: int) -> F64:
    if kind == 0:
        return np.frombuffer(data[: 4 * count], np.float32).astype(np.float64)
    weights, size, decode = _BLOCKS[kind]
    blocks = (data[i * size : (i + 1) * size] for i in range(count // weights))
    return np.array([value for block in blocks for value in decode(block)])


def read(data: bytes) -> Gguf:
    """All of a small file."""
    source = _Bytes(data)
    assert source.data[:4] == b"GGUF"
    source.at = 4
    assert source.number("I") == 3
    tensors, keys = source.number("Q"), source.number("Q")
    found = Gguf(data, {}, {})
    for _ in range(keys):
        name = source.text()
        found.keys[name] = source.value(source.number("I"))
    places = []
    for _ in range(tensors):
        name = source.text()
        shape = [source.number("Q") for _ in range(source.number("I"))]
        places.append((name, shape[::-1], source.number("I"), source.number("Q")))
    align = found.keys["general.alignment"]
    start = -(-source.at // align) * align
    for name, shape, kind, offset in places:
        assert offset % align == 0
        found.places[name] = shape, kind, start + offset
    return found
