"""4-bit codes with a scale and a bias per group, as the blocks of a GGUF file.

``q4_1``  32 weights in 20 bytes: a scale and a bias as float16, ``w = d * q + m``. A group of 64
          is two blocks of the same numbers, exactly the same weights where those fit float16.
``q4_k``  256 weights in 144 bytes, as many as eight groups of 32 take here: two float16 units and
          6-bit multiples of them, ``w = d * sc * q - dmin * m``. Exact where all groups of a block
          have one scale and one bias, or multiples of one; else the nearest.

The codes themselves are never changed, but for those of a negative scale in q4_k, which are turned
round.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Kind = Literal["q4_1", "q4_k", "f32"]

BLOCK = 32
"""Weights that share a scale and a bias."""
SUPER = 256
"""Weights of a block of q4_k."""
BLOCK_SIZES = {"q4_1": (BLOCK, 20), "q4_k": (SUPER, 144), "f32": (1, 4)}
"""Weights and bytes of a block."""
_CODES = 15
_MOST = 63
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])


def blocks(kind: Kind, pairs: U8, scales: F32, biases: F32) -> tuple[U8, float]:
    """The bytes of rows, and how far a weight may be off, in steps from code to code.

    pairs: neighbours in a byte, the first one in the lower bits [rows, cols / 2]; scales and biases
    [rows, cols / 32].
    """
    encode = _q4_1 if kind == "q4_1" else _q4_k
    found, d, m = encode(pairs, scales, biases)
    step = np.maximum(np.abs(scales), np.finfo(np.float32).tiny).astype(np.float64)
    # w is linear in the code, so it is farthest off at the first or at the last one.
    first = np.abs(m - biases)
    last = np.abs((d - scales) * _CODES + (m - biases))
    off = np.maximum(first, last) / step
    return found.view(np.uint8).reshape(-1), float(off.max(initial=0.0))


def _q4_1(pairs: U8, scales: F32, biases: F32) -> tuple[NDArray[Any], F64, F64]:
    out = np.empty(scales.size, _Q4_1)
    out["d"], out["m"] = scales.reshape(-1), biases.reshape(-1)
    out["qs"] = _halved(pairs, BLOCK)
    d, m = (out[name].astype(np.float64).reshape(scales.shape) for name in ("d", "m"))
    return out, d, m


def _q4_k(pairs: U8, scales: F32, biases: F32) -> tuple[NDArray[Any], F64, F64]:
    wide, back = scales.astype(np.float64), biases.astype(np.float64)
    turned = wide < 0
    if turned.any():
        ones = np.repeat(np.where(turned, np.uint8(255), np.uint8(0)), BLOCK // 2, axis=1)
        pairs = pairs ^ ones
        back = np.where(turned, back + _CODES * wide, back)
    each = SUPER // BLOCK
    size, multiples = _units(np.abs(wide).reshape(-1, each))
    less, times = _units(-back.reshape(-1, each))
    out = np.empty(len(size), _Q4_K)
    out["d"], out["dmin"] = size, less
    out["scales"] = _six_bits(multiples, times)
    out["qs"] = _halved(pairs, 2 * BLOCK).reshape(len(size), -1)
    d = size.astype(np.float64)[:, None] * multiples
    m = -less.astype(np.float64)[:, None] * times
    d, m = d.reshape(scales.shape), m.reshape(scales.shape)
    return out, np.where(turned, -d, d), np.where(turned, m + _CODES * d, m)


def _halved(pairs: U8, count: int) -> U8:
    """Of every ``count`` codes the first half in the lower bits of so many bytes, the second half
    in the upper ones."""
    halves = pairs.reshape(-1, 2, count // 4)
    low, high = halves[:, 0], halves[:, 1]
    out = np.empty((len(halves), count // 4, 2), np.uint8)
    out[..., 0] = low & np.uint8(15) | high << np.uint8(4)
    out[..., 1] = low >> np.uint8(4) | high & np.uint8(240)
    return out.reshape(len(halves), -1)


def _units(values: F64) -> tuple[NDArray[np.float16], U8]:
    """A unit per row and multiples of 0 to 63 that come nearest to the values [n, 8].

    Values of the other sign than the largest become 0.
    """
    unit = _largest(values).astype(np.float16)
    times = np.ones(values.shape, np.uint8)
    missed = np.abs(unit[:, None].astype(np.float64) - values).max(axis=1)
    rest = np.flatnonzero(missed)
    if rest.size:
        # Rows of few kinds are common, and trying takes long.
        kinds, of = np.unique(values[rest], axis=0, return_inverse=True)
        found, multiples = _nearest(kinds)
        unit[rest], times[rest] = found[of.reshape(-1)], multiples[of.reshape(-1)]
    return unit, times


def _largest(values: F64) -> F64:
    """Of each row, by size."""
    places = np.abs(values).argmax(axis=1)
    found: F64 = np.take_along_axis(values, places[:, None], axis=1)[:, 0]
    return found


def _nearest(values: F64) -> tuple[NDArray[np.float16], U8]:
    """By trying 32 to 63 for the largest one: what smaller ones say, twice as many say too."""
    largest = _largest(values)
    unit, times = np.zeros(len(values), np.float16), np.zeros(values.shape, np.uint8)
    missed = np.full(len(values), np.inf)
    for most in range(_MOST // 2 + 1, _MOST + 1):
        tried = (largest / most).astype(np.float16)
        wide = tried.astype(np.float64)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.nan_to_num(np.rint(values / wide), posinf=_MOST, neginf=0)
        found = found.clip(0, _MOST)
        off = np.abs(wide * found - values).max(axis=1)
        better = off < missed
        missed[better], unit[better] = off[better], tried[better]
        times[better] = found[better].astype(np.uint8)
    return unit, times


def _six_bits(first: U8, second: U8) -> U8:
    """Eight numbers of 6 bits and eight more in 12 bytes: [n, 8] twice to [n, 12]."""
    low, mins = first[:, :4], second[:, :4]
    high, more = first[:, 4:], second[:, 4:]
    top = np.uint8(4)
    return np.concatenate(
        [
            low | (high >> top) << np.uint8(6),
            mins | (more >> top) << np.uint8(6),
            (high & np.uint8(15)) | (more & np.uint8(15)) << top,
        ],
        axis=1,
    )
