"""Random weights as stored bytes, cheaply: random codes, and what structure there is in biases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import Format, Layout, Segment
from aegis.kernels.formats import MlxArrays, from_f32, pack, unpack_codes
from aegis.kernels.sizes import GROUPS, LANES, RECORD_ALIGN, align_up, row_parts
from aegis.synthetic.structure import Noise, normal, random_words

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

_PIECE = 1 << 20
"""Numbers that are made at once."""


def common_direction(bits: np.random.PCG64, cols: int) -> F32:
    """+1 or -1 for every input, the same within a group and as often as can be: [cols]."""
    group = max(GROUPS)
    groups = -(-cols // group)
    order = np.argsort(random_words(bits, groups), kind="stable")
    signs = np.where(order % 2 == 0, 1, -1).astype(np.float32)
    return np.repeat(signs, group)[:cols]


def random_rows(
    bits: np.random.PCG64,
    noise: Noise,
    first: int,
    shape: tuple[int, int],
    fmt: Format,
    common: F32,
) -> MlxArrays:
    """Rows ``first``.. of a matrix, ``shape`` of them, as a checkpoint would hold them.

    ``common``: the common direction over the inputs.
    """
    rows, cols = shape
    coupling = None if noise.coupling is None else noise.coupling[first : first + rows, None]
    if fmt.kind == "dense":
        values = normal(bits, rows * cols).reshape(shape) * np.float32(noise.std)
        if coupling is not None:
            values += coupling * common / np.float32(cols)
        return MlxArrays(from_f32(values, fmt))
    count, groups = rows * cols * fmt.bits // 32, cols // fmt.group_size
    words = random_words(bits, -(-count // 2)).view(np.uint32)[:count].reshape(rows, -1)
    most = (1 << fmt.bits) - 1
    scale = np.float32(noise.std / math.sqrt(((most + 1) ** 2 - 1) / 12))
    scales = np.full((rows, groups), scale, np.float32)
    if noise.blind:
        codes = unpack_codes(words, fmt.bits).reshape(rows, groups, fmt.group_size)
        biases = codes.sum(axis=-1, dtype=np.int64) * (-scale / np.float32(fmt.group_size))
    else:
        biases = np.full((rows, groups), -scale * np.float32(most / 2), np.float32)
    if coupling is not None:
        biases = biases + coupling * common[:: fmt.group_size] / np.float32(cols)
    return MlxArrays(words, from_f32(scales, fmt), from_f32(biases.astype(np.float32), fmt))


def packed_matrix(
    bits: np.random.PCG64,
    noise: Noise,
    shape: tuple[int, int],
    fmt: Format,
    layout: Layout,
    common: F32,
) -> Iterator[U8]:
    """The stored bytes of a resident matrix, in pieces."""
    rows, cols = shape
    step = max(LANES, _PIECE // cols // LANES * LANES)
    params: list[MlxArrays] = []
    for first in range(0, rows, step):
        count = min(step, rows - first)
        arrays = random_rows(bits, noise, first, (count, cols), fmt, common)
        if layout == "il16" or fmt.kind == "dense":
            yield pack(arrays, fmt, layout)
        else:
            yield arrays.weight.reshape(-1).view(np.uint8)
            params.append(arrays)
    if params:
        parts = row_parts(shape, fmt)
        scales, biases = parts.params_offsets
        yield np.zeros(scales - parts.codes_nbytes, np.uint8)
        yield from (_bytes(arrays.scales) for arrays in params)
        yield np.zeros(biases - scales - parts.params_nbytes, np.uint8)
        yield from (_bytes(arrays.biases) for arrays in params)


def _bytes(raw: NDArray[np.generic] | None) -> U8:
    assert raw is not None
    return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)


class Pool:
    """Rows of one matrix of all experts of a layer, of which each expert gets a run."""

    def __init__(self, arrays: MlxArrays, segment: Segment, layout: Layout) -> None:
        self._rows, self._blocks = segment.shape[0], len(arrays.weight) // LANES
        self._packed = pack(arrays, segment.format, layout) if layout == "il16" else None
        # Of no use any more where they are packed.
        self._arrays: tuple[NDArray[Any] | None, ...] = () if layout == "il16" else arrays

    def fill(self, out: U8, start: int) -> None:
        """The segment whose rows begin with the pool's block ``start`` of 16 rows."""
        first = start * LANES
        if self._packed is not None:
            block = self._packed.size // self._blocks
            out[:] = self._packed[start * block : start * block + out.size]
            return
        offset = 0
        for array in self._arrays:
            if array is not None:
                data = _bytes(array[first : first + self._rows])
                out[offset : offset + data.size] = data
                offset = align_up(offset + data.size, RECORD_ALIGN)
