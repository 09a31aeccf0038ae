"""A matrix made of each head's part of another one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aegis.checkpoint.tensor_map import HeadPart
from aegis.convert.names import SourceWeight
from aegis.kernels.base import Format
from aegis.kernels.formats import Raw, from_f32, to_f32, unpack_codes

Read = Callable[[SourceWeight, int, range], Raw]
"""Rows of one of a weight's tensors as they lie in the file."""


def head_parts(read: Read, whole: SourceWeight, part: HeadPart, rows: range) -> Raw:
    """Rows of the matrix that is made of a part of ``whole``, as plain numbers of its type."""
    width = whole.shape[1] if part.transposed else part.count
    pieces = []
    for head in range(rows.start // width, -(-rows.stop // width)):
        first = head * part.head_rows + part.first
        numbers = _plain(read, whole, range(first, first + part.count))
        numbers = numbers.T if part.transposed else numbers
        start = head * width
        pieces.append(numbers[max(rows.start - start, 0) : rows.stop - start])
    return np.concatenate(pieces)


def _plain(read: Read, weight: SourceWeight, rows: range) -> Raw:
    """Rows of a weight as plain numbers. Codes times scales, and plus biases, are each rounded to
    the type of these, as MLX does it."""
    fmt = weight.format
    if fmt.kind == "dense":
        return read(weight, 0, rows)
    plain = Format("dense", fmt.dtype)
    words, *params = (read(weight, index, rows) for index in range(3))
    scales, biases = (np.repeat(to_f32(each, plain), fmt.group_size, axis=1) for each in params)
    products = unpack_codes(words, fmt.bits).astype(np.float32) * scales
    return from_f32(to_f32(from_f32(products, plain), plain) + biases, plain)
