"""Block-scaled FP8 as publishers ship it: e4m3 codes, and one scale for 128 x 128 of them.

A code is a sign, four bits of exponent (biased by 7; 0: no leading one) and three of mantissa;
the largest magnitude is a NaN, and there are no infinities. A weight is its code times its block's
scale, in float32, rounded to bfloat16: what ``mlx_lm`` makes of such checkpoints.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.config import FP8_BLOCK
from aegis.kernels.base import Format
from aegis.kernels.formats import Raw, from_f32

_BF16 = Format("dense", "bf16")


def _values() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)
    )
    magnitude[codes & 127 == 127] = np.nan
    values: NDArray[np.float32] = np.where(codes >> 7, -magnitude, magnitude).astype(np.float32)
    return values


VALUES = _values()
"""float32 [256] by code."""


_NUMBERS_AT_ONCE = 1 << 18
"""Numbers made at once, which bounds the temporaries to a few MiB."""


def dequantized(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> Raw:
    """bfloat16 bits of codes [rows, cols] whose rows have scales [rows, ceil(cols / 128)]."""
    numbers = np.empty(codes.shape, dtype=np.uint16)
    step = max(1, _NUMBERS_AT_ONCE // codes.shape[1])
    for start in range(0, len(codes), step):
        rows = slice(start, start + step)
        values = VALUES[codes[rows]]
        with np.errstate(over="ignore", invalid="ignore"):
            for block in range(scales.shape[1]):
                columns = slice(FP8_BLOCK * block, FP8_BLOCK * (block + 1))
                values[:, columns] *= scales[rows, block : block + 1]
            numbers[rows] = from_f32(values, _BF16)
    return numbers
