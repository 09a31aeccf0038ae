"""Matrix products of the reference backend, made independent of how rows are grouped.

BLAS picks other summation orders for other row counts. So that the answer does not depend on the
prefill step, every product here has exactly TILE rows, and a row always sits at the place given by
its absolute position modulo TILE; missing rows are zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aegis.kernels import formats
from aegis.kernels.base import Weight
from aegis.kernels.reference.sizes import TILE
from aegis.kernels.sizes import LANES, nbytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

F32 = np.float32

_PIECE = 1 << 18
"""Numbers widened at once."""


def widen(weight: Weight) -> NDArray[np.float32]:
    """A stored tensor as a float32 array of its logical shape."""
    out = np.empty(weight.shape, F32)
    if weight.layout != "il16" or out.ndim != 2:
        out[...] = formats.dequantize(weight).reshape(weight.shape)
        return out
    # Piece by piece: the temporaries of a whole embedding table would outweigh it several times.
    rows = max(_PIECE // weight.shape[1] // LANES, 1) * LANES
    for start in range(0, len(out), rows):
        part = out[start : start + rows]
        first = nbytes((start, weight.shape[1]), weight.format, "il16") if start else 0
        size = nbytes(part.shape, weight.format, "il16")
        piece = Weight(part.shape, weight.format, "il16", weight.data[first : first + size])
        part[...] = formats.dequantize(piece)
    return out


def linear(
    x: NDArray[np.float32],
    positions: NDArray[np.int64],
    matrix: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """x [T, in] at ascending absolute positions [T], matrix [out, in] to [T, out]."""
    out = np.empty((len(x), len(matrix)), F32)
    for block in np.unique(positions // TILE):
        rows = np.flatnonzero(positions // TILE == block)
        tile = np.zeros((TILE, x.shape[1]), F32)
        tile[positions[rows] % TILE] = x[rows]
        out[rows] = (tile @ matrix.T)[positions[rows] % TILE]
    return out if bias is None else out + bias


def rms_norm(
    x: NDArray[np.float32], weight: NDArray[np.float32], eps: float
) -> NDArray[np.float32]:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=F32)
    return np.asarray(weight * (x / np.sqrt(mean + F32(eps))), F32)


def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + small), small / (1 + small)), F32)


def silu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x * sigmoid(x)."""
    return x * sigmoid(x)
