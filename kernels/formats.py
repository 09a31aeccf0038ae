"""Quantised formats in numpy: the truth that every kernel is tested against.

A checkpoint tensor ("MLX arrays") is either dense, an array of raw numbers, or affine, three
arrays: code words uint32 [rows, in * bits / 32], and scales and biases [rows, in / group_size], or
mxfp4, the same without biases. Raw numbers of bf16 and f16 are uint16 arrays, those of f32 uint32
arrays, those of e8m0 uint8 arrays, so that nothing is ever rounded by accident. ``pack`` turns
these into the bytes of a stored tensor and ``unpack`` turns them back.

Packing a range of rows that starts on a multiple of 16 gives exactly the bytes of those rows in
layout il16, so large tensors can be packed in pieces.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import Format, Layout, Weight
from aegis.kernels.sizes import (
    LANES,
    RESIDENT_ALIGN,
    FormatError,
    block_inputs,
    block_nbytes,
    dtype_nbytes,
    nbytes,
    row_parts,
)

__all__ = [
    "MlxArrays",
    "affine_scales",
    "bf16_to_f32",
    "block_nbytes",
    "dequantize",
    "dequantize_mlx",
    "f32_to_bf16",
    "nbytes",
    "pack",
    "pack_codes",
    "raw_dtype",
    "repack_codes",
    "requantize_3bit",
    "row_parts",
    "to_f32",
    "unpack",
    "unpack_codes",
]

_REQUANTIZE_CODES = 1 << 18
"""Codes requantised at once, which bounds the temporaries to a few MiB."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What the codes of mxfp4 mean."""

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Raw = NDArray[Any]
"""Raw numbers: uint16 for bf16 and f16, uint32 for f32, uint8 for e8m0."""
_Places = tuple[NDArray[np.intp], ...]


class MlxArrays(NamedTuple):
    """One tensor as a checkpoint holds it; what its format does not have is None."""

    weight: Raw
    scales: Raw | None = None
    biases: Raw | None = None


_RAW: dict[int, type[np.uint8] | type[np.uint16] | type[np.uint32]]
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def raw_dtype(fmt: Format) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    """The numpy type of raw numbers of this format (of its scales, if quantised)."""
    return _RAW[dtype_nbytes(fmt)]


def bf16_to_f32(raw: Raw) -> F32:
    """Widen bfloat16 bits to float32, exactly."""
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: F32) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def to_f32(raw: Raw, fmt: Format) -> F32:
    """Widen raw numbers of ``fmt.dtype`` to float32, exactly."""
    if fmt.dtype == "bf16":
        return bf16_to_f32(raw)
    if fmt.dtype == "f16":
        return raw.view(np.float16).astype(np.float32)
    if fmt.dtype == "e8m0":
        # 255 stands for NaN, which no checkpoint may hold; the least is a denormal float32.
        return np.ldexp(np.float32(1), raw.astype(np.int32) - 127)
    return raw.view(np.float32)


def from_f32(values: F32, fmt: Format) -> Raw:
    """Round float32 to raw numbers of ``fmt.dtype``, to nearest even."""
    if fmt.dtype == "bf16":
        return f32_to_bf16(values)
    if fmt.dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def unpack_codes(words: U32, bits: int) -> U8:
    """Code words [..., n] to codes [..., n * 32 / bits], first element in the lowest bits."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data.copy()
    if bits in (2, 4):
        return _split_bytes(data, bits)
    return _split_stream(data, bits)


def _split_bytes(data: U8, bits: int) -> U8:
    """Codes of 2 or 4 bits, which never cross a byte: widen each byte to one byte per code."""
    wide = data.astype(np.uint16)
    wide = (wide | wide << np.uint16(4)) & np.uint16(0x0F0F)
    codes = wide.view(np.uint8)
    return codes if bits == 4 else _split_nibbles(codes)


def _split_nibbles(nibbles: U8) -> U8:
    wide = nibbles.astype(np.uint16)
    return ((wide | wide << np.uint16(6)) & np.uint16(0x0303)).view(np.uint8)


def _split_stream(data: U8, bits: int) -> U8:
    """Codes of 3, 5 or 6 bits: eight of them in every ``bits`` bytes, little endian."""
    chunks = data.reshape(*data.shape[:-1], -1, bits).astype(np.uint64)
    stream = np.zeros(chunks.shape[:-1], dtype=np.uint64)
    for byte in range(bits):
        stream |= chunks[..., byte] << np.uint64(8 * byte)
    codes = np.empty((*stream.shape, 8), dtype=np.uint8)
    for index in range(8):
        codes[..., index] = (stream >> np.uint64(bits * index)) & np.uint64((1 << bits) - 1)
    return codes.reshape(*data.shape[:-1], -1)


def pack_codes(codes: U8, bits: int) -> U32:
    """Codes [..., k] (k * bits a multiple of 32) to code words; the inverse of unpack_codes."""
    lead = codes.shape[:-1]
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits in (2, 4):
        data = _join_halves(np.ascontiguousarray(codes), bits)
        return (data if bits == 4 else _join_halves(data, 4)).view(np.uint32)
    eights = np.ascontiguousarray(codes).reshape(*lead, -1, 8)
    if bits == 3:
        return _join_3bit(eights).reshape(*lead, -1).view(np.uint32)
    stream = np.zeros(eights.shape[:-1], dtype=np.uint64)
    for index in range(8):
        stream |= eights[..., index].astype(np.uint64) << np.uint64(bits * index)
    data = np.empty((*stream.shape, bits), dtype=np.uint8)
    for byte in range(bits):
        data[..., byte] = (stream >> np.uint64(8 * byte)) & np.uint64(0xFF)
    return data.reshape(*lead, -1).view(np.uint32)


def _join_halves(numbers: U8, bits: int) -> U8:
    """Neighbours of ``bits`` bits each, one per byte, in one byte: the first is the lower."""
    pairs = numbers.view(np.uint16)
    return (pairs | pairs >> np.uint16(8 - bits)).astype(np.uint8)


def _join_3bit(eights: U8) -> U8:
    """Eight codes, one per byte of a uint64, to three bytes: neighbours move together thrice."""
    x = eights.view(np.uint64)[..., 0]
    x = (x | x >> np.uint64(5)) & np.uint64(0x003F_003F_003F_003F)
    x = (x | x >> np.uint64(10)) & np.uint64(0x0000_0FFF_0000_0FFF)
    x |= x >> np.uint64(20)
    return np.ascontiguousarray(x.astype(np.uint32)[..., None].view(np.uint8)[..., :3])


def repack_codes(words: U32, bits: int, new_bits: int) -> U32:
    """The same codes in words of another width that can hold them."""
    return words if bits == new_bits else pack_codes(unpack_codes(words, bits), new_bits)


# Per 32 codes the checkpoint has 96 consecutive bits s0 s1 s2 and il16 has six 16-bit halves. Half
# t holds bits 15t..15t+14 of the stream (five whole codes). The last six bits of the stream, two
# codes, are on top of the halves: one code over the low halves of the three words, the other over
# the high ones, so that three shifts gather both.


def _stream_to_halves(words: U32) -> U32:
    """3-bit code words [..., n * 3] from the checkpoint's order to il16's."""
    stream = words.reshape(*words.shape[:-1], -1, 3)
    s0, s1, s2 = stream[..., 0], stream[..., 1], stream[..., 2]
    low = np.uint32(0x7FFF)
    out = np.empty_like(stream)
    out[..., 0] = (s0 & low) | ((s0 & np.uint32(0x3FFF8000)) << np.uint32(1))
    out[..., 1] = (((s0 >> np.uint32(30)) | (s1 << np.uint32(2))) & low) | (
        ((s1 >> np.uint32(13)) & low) << np.uint32(16)
    )
    out[..., 2] = (((s1 >> np.uint32(28)) | (s2 << np.uint32(4))) & low) | (
        ((s2 >> np.uint32(11)) & low) << np.uint32(16)
    )
    spare = s2 >> np.uint32(26)
    for word in range(3):
        bit, top = spare >> np.uint32(word), spare >> np.uint32(word + 3)
        out[..., word] |= ((bit & np.uint32(1)) << np.uint32(15)) | (top << np.uint32(31))
    return out.reshape(words.shape)


def _halves_to_stream(words: U32) -> U32:
    """The inverse of _stream_to_halves."""
    blocks = words.reshape(*words.shape[:-1], -1, 3)
    low, one = np.uint32(0x7FFF), np.uint32(1)
    half = [(blocks[..., t // 2] >> np.uint32(16 * (t % 2))) & low for t in range(6)]
    spare = [(blocks[..., t % 3] >> np.uint32(16 * (t // 3) + 15)) & one for t in range(6)]
    out = np.empty_like(blocks)
    out[..., 0] = half[0] | (half[1] << np.uint32(15)) | (half[2] << np.uint32(30))
    out[..., 1] = (
        (half[2] >> np.uint32(2)) | (half[3] << np.uint32(13)) | (half[4] << np.uint32(28))
    )
    out[..., 2] = (half[4] >> np.uint32(4)) | (half[5] << np.uint32(11))
    for t in range(6):
        out[..., 2] |= spare[t] << np.uint32(26 + t)
    return out.reshape(words.shape)


def _interleave(rows: Raw, blocks: Raw) -> None:
    """Write rows [n, groups * width] into block parts [ceil(n / 16), groups, width * 16]."""
    groups = blocks.shape[1]
    width = rows.shape[1] // groups
    full = rows.shape[0] // LANES
    lanes = blocks.reshape(blocks.shape[0], groups, width, LANES)
    lanes[:full] = rows[: full * LANES].reshape(full, LANES, groups, width).transpose(0, 2, 3, 1)
    rest = rows[full * LANES :]
    if rest.shape[0]:
        lanes[full, ..., rest.shape[0] :] = 0
        lanes[full, ..., : rest.shape[0]] = rest.reshape(-1, groups, width).transpose(1, 2, 0)


def _deinterleave(blocks: Raw, rows: int) -> Raw:
    """The inverse of _interleave, without the padding rows."""
    count, groups, _ = blocks.shape
    lanes = blocks.reshape(count, groups, -1, LANES).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(lanes.reshape(count * LANES, -1)[:rows])


def _block_parts(data: U8, groups: int, fmt: Format) -> tuple[Raw, ...]:
    """Views of an il16 tensor: (numbers,) if dense, else code words, scales and, if affine, biases;
    each [row blocks, blocks of a row block, items of one block]."""
    blocks = data.reshape(-1, groups, block_nbytes(fmt))
    if fmt.kind == "dense":
        return (blocks.view(raw_dtype(fmt)),)
    step = LANES * dtype_nbytes(fmt)
    if fmt.kind == "mxfp4":
        return blocks[..., 2 * step :].view(np.uint32), blocks[..., : 2 * step]
    return (
        blocks[..., 2 * step :].view(np.uint32),
        blocks[..., :step].view(raw_dtype(fmt)),
        blocks[..., step : 2 * step].view(raw_dtype(fmt)),
    )


def _shape_of(arrays: MlxArrays, fmt: Format) -> tuple[int, ...]:
    shape = tuple(int(size) for size in arrays.weight.shape)
    return shape if fmt.kind == "dense" else (shape[0], shape[1] * 32 // fmt.bits)


def pack(
    arrays: MlxArrays,
    fmt: Format,
    layout: Layout,
    *,
    align: int = RESIDENT_ALIGN,
    out: U8 | None = None,
) -> U8:
    """The bytes of a stored tensor, written to ``out`` where given (exactly its size)."""
    shape = _shape_of(arrays, fmt)
    size = nbytes(shape, fmt, layout, align)
    if out is None:
        out = np.empty(size, dtype=np.uint8)
    if out.shape != (size,):
        raise FormatError(f"a tensor of {size} bytes cannot be packed into {out.size}")
    if len(shape) == 1 or (layout == "row" and fmt.kind == "dense"):
        out[:] = np.ascontiguousarray(arrays.weight).reshape(-1).view(np.uint8)
    elif layout == "row":
        _pack_row(arrays, shape, fmt, align, out)
    else:
        _pack_il16(arrays, shape, fmt, out)
    return out


def _params(arrays: MlxArrays, fmt: Format) -> tuple[Raw, ...]:
    """Scales, and biases where the format has some."""
    params = arrays[1:] if fmt.kind == "affine" else arrays[1:2]
    found = tuple(array for array in params if array is not None)
    if len(found) < len(params):
        raise FormatError("a quantised weight needs scales, and biases unless it is mxfp4")
    return found


def _pack_row(arrays: MlxArrays, shape: tuple[int, ...], fmt: Format, align: int, out: U8) -> None:
    parts = row_parts((shape[0], shape[1]), fmt, align)
    offset = 0
    starts = (0, *parts.params_offsets)
    for start, array in zip(starts, (arrays.weight, *_params(arrays, fmt)), strict=True):
        out[offset:start] = 0
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out[start : start + data.size] = data
        offset = start + data.size


def _pack_il16(arrays: MlxArrays, shape: tuple[int, ...], fmt: Format, out: U8) -> None:
    targets = _block_parts(out, shape[1] // block_inputs(fmt), fmt)
    if fmt.kind == "dense":
        _interleave(arrays.weight, targets[0])
        return
    words = _stream_to_halves(arrays.weight) if fmt.bits == 3 else arrays.weight
    for rows, target in zip((words, *_params(arrays, fmt)), targets, strict=True):
        _interleave(rows, target)


def unpack(weight: Weight, *, align: int = RESIDENT_ALIGN) -> MlxArrays:
    """The checkpoint arrays of a stored tensor; the inverse of ``pack``."""
    shape, fmt = weight.shape, weight.format
    size = nbytes(shape, fmt, weight.layout, align)
    if weight.data.size < size:
        raise FormatError(f"a tensor of {size} bytes was given {weight.data.size}")
    data = weight.data[:size]
    if len(shape) == 1 or (weight.layout == "row" and fmt.kind == "dense"):
        return MlxArrays(data.copy().view(raw_dtype(fmt)).reshape(shape))
    if weight.layout == "row":
        parts = row_parts((shape[0], shape[1]), fmt, align)
        params = [
            data[s : s + parts.params_nbytes].copy().view(raw_dtype(fmt)).reshape(shape[0], -1)
            for s in parts.params_offsets
        ]
        codes = data[: parts.codes_nbytes].copy().view(np.uint32).reshape(shape[0], -1)
        return MlxArrays(codes, *params)
    groups = shape[1] // block_inputs(fmt)
    rows = [_deinterleave(p, shape[0]) for p in _block_parts(data, groups, fmt)]
    if fmt.kind == "affine" and fmt.bits == 3:
        rows[0] = _halves_to_stream(rows[0])
    return MlxArrays(*rows)


def dequantize(weight: Weight, *, align: int = RESIDENT_ALIGN) -> F32:
    """The float32 values of a stored tensor."""
    return dequantize_mlx(unpack(weight, align=align), weight.format)


def dequantize_mlx(arrays: MlxArrays, fmt: Format) -> F32:
    """The float32 values of checkpoint arrays: scale * code + bias, rounded once.

    A bf16 or f16 scale times a code of at most 8 bits is exact in float32, so the sum is the only
    rounding and equals a fused multiply-add. Scales of f32 go through float64, where the product
    is exact too. Nothing is rounded in mxfp4.
    """
    if fmt.kind == "dense":
        return to_f32(arrays.weight, fmt)
    scales, *biases = (to_f32(raw, fmt)[..., None] for raw in _params(arrays, fmt))
    codes = unpack_codes(arrays.weight, fmt.bits)
    grouped = codes.reshape(*codes.shape[:-1], -1, fmt.group_size)
    values = _affine(grouped, scales, biases[0], fmt) if biases else E2M1[grouped] * scales
    return values.reshape(codes.shape)


def _affine(codes: U8, scales: F32, biases: F32, fmt: Format) -> F32:
    """scale * code + bias in float32, rounded as dequantize_mlx says."""
    if fmt.dtype == "f32":
        return (scales.astype(np.float64) * codes + biases).astype(np.float32)
    values = codes.astype(np.float32) * scales
    values += biases
    return values


def affine_scales(low: F32, high: F32, bits: int) -> tuple[F32, F32]:
    """Scale and bias of groups whose smallest and largest values are ``low`` and ``high``, float32.

    The rule is that of MLX's affine quantiser (``mx.quantize`` on its CPU), every step in float32:
    the edge (smallest or largest value) of larger magnitude, the largest of equals, shall be
    represented exactly. From ``scale = max((high - low) / (2^bits - 1), 1e-7)``, negative where the
    edge is the largest value, follows ``steps = rint(edge / scale)``. Then ``bias = edge`` and
    ``scale = edge / steps``; where ``steps`` is 0, bias is 0 and the scale stays.
    """
    from_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / np.float32((1 << bits) - 1), np.float32(1e-7))
    scale = np.where(from_low, scale, -scale)
    edge = np.where(from_low, low, high)
    steps = np.rint(edge / scale)
    bias = np.where(steps == 0, np.float32(0), edge)
    scale = np.where(steps == 0, scale, edge / np.where(steps == 0, np.float32(1), steps))
    return scale, bias


def requantize_3bit(arrays: MlxArrays, fmt: Format) -> tuple[MlxArrays, Format]:
    """A 4-bit weight as 3-bit codes, with scales and biases refitted to them.

    Two neighbouring codes become one, ``q = c >> 1``: no step fits 16 evenly spaced values better,
    and one that spans them from the smallest to the largest (15/7) errs half as much again. Per
    group follow the scale of least squares over the old values and, after it is rounded to
    ``fmt.dtype``, the bias of least squares, rounded too. A group whose codes span at most eight
    neighbours keeps them, less the smallest, and its scale, if that errs less: its bias then moves
    by whole steps, mostly without rounding. All sums are of whole numbers, so every machine gives
    the same bits.
    """
    if fmt.kind != "affine" or fmt.bits != 4:
        raise FormatError("3-bit experts are derived from 4-bit weights")
    scales, biases = _params(arrays, fmt)
    rows, words = arrays.weight.shape
    out = MlxArrays(
        np.empty((rows, words * 3 // 4), dtype=np.uint32),
        np.empty_like(scales),
        np.empty_like(biases),
    )
    step = max(1, _REQUANTIZE_CODES // (words * 8))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        pieces = _requantize_rows(arrays.weight[part], scales[part], biases[part], fmt)
        for target, piece in zip(out, pieces, strict=True):
            if target is not None:
                target[part] = piece
    return out, Format("affine", fmt.dtype, 3, fmt.group_size)


@np.errstate(over="ignore", invalid="ignore")  # Scales that are no numbers stay so.
def _requantize_rows(words: U32, scales: Raw, biases: Raw, fmt: Format) -> tuple[Raw, Raw, Raw]:
    words = np.ascontiguousarray(words)
    moments, wide = _moments_of_halves(words, fmt.group_size)
    halves, odd, squares, odd_halves = moments
    old_scale, old_bias = (to_f32(raw, fmt).astype(np.float64) for raw in (scales, biases))
    # c = 2q + r, so the slope of c over q is 2 and that of r over q.
    spread = fmt.group_size * squares - halves * halves
    slope = (fmt.group_size * odd_halves - halves * odd) / np.maximum(spread, 1)
    scale = from_f32((old_scale * (2 + slope)).astype(np.float32), fmt)
    kept = to_f32(scale, fmt).astype(np.float64)
    bias = old_bias + (old_scale * (2 * halves + odd) - kept * halves) / fmt.group_size
    codes, bias = words >> np.uint32(1), from_f32(bias.astype(np.float32), fmt)
    if not wide.all():
        narrow, low = _narrow(words, fmt.group_size, wide)
        s, b = old_scale[narrow], old_bias[narrow]
        level = b + s * low
        moved = from_f32(level.astype(np.float32), fmt)
        off = to_f32(moved, fmt).astype(np.float64) - level
        # What the fit misses by is (2s - S) q + s r + (b - B), and r * r is r.
        u, t = 2 * s - kept[narrow], b - to_f32(bias[narrow], fmt).astype(np.float64)
        n, (q, r, qq, qr) = fmt.group_size, (part[narrow] for part in moments)
        missed = u * u * qq + s * s * r + t * t * n + 2 * (u * s * qr + u * t * q + s * t * r)
        better = n * off * off < missed
        keeps = tuple(place[better] for place in narrow)
        scale[keeps], bias[keeps] = scales[keeps], moved[better]
        grouped = (len(words), -1, fmt.group_size // 8)
        less = low[better, None].astype(np.uint32) * np.uint32(0x1111_1111)
        codes.reshape(grouped)[keeps] = words.reshape(grouped)[keeps] - less
    return _join_nibbles(codes), scale, bias


def _narrow(words: U32, group_size: int, wide: NDArray[np.bool_]) -> tuple[_Places, U8]:
    """Places (row, group) of the groups whose codes span at most eight, and their smallest code.

    wide: groups of which it is known that they do not.
    """
    places = np.nonzero(~wide)
    codes = unpack_codes(words.reshape(len(words), -1, group_size // 8)[places], 4)
    least = codes.min(axis=-1, initial=15)
    fits = codes.max(axis=-1, initial=0) - least <= 7
    return tuple(place[fits] for place in places), least[fits]


def _moments_of_halves(words: U32, group_size: int) -> tuple[list[I64], NDArray[np.bool_]]:
    """Sums over each group of q, r, q * q and q * r, where a code is 2q + r, int64.

    Also whether it has codes below 4 and from 12 on, which are more than eight apart.
    """
    fours = words.view(np.uint16).reshape(len(words), -1, group_size // 4)
    sums = np.take(_moments_of_fours(), fours).sum(axis=-1)
    parts = [(sums >> at) & mask for at, mask in _FIELDS]
    return parts, (sums & _LOWEST != 0) & (sums > _HIGHEST)


_FIELDS = ((0, 0x3FF), (10, 0xFF), (18, 0x1FFF), (31, 0x3FF))
"""Where each sum lies in 64 bits, wide enough for 128 codes, so that one addition adds all."""
_LOWEST = 0xFF << 41
"""Where the codes below 4 are counted."""
_HIGHEST = (1 << 49) - 1
"""The codes from 12 on are counted above it."""


@functools.cache
def _moments_of_fours() -> I64:
    """By each four codes of a uint16, the sums and counts in the parts of one number."""
    codes = unpack_codes(np.arange(1 << 16, dtype=np.uint32)[:, None], 4)[:, :4]
    q, r = codes >> 1, codes & 1
    sums = [x.sum(axis=1, dtype=np.int64) for x in (q, r, q * q, q * r, codes < 4, codes > 11)]
    table = np.zeros(1 << 16, np.int64)
    for part, at in zip(sums, [*(at for at, _ in _FIELDS), 41, 49], strict=True):
        table |= part << at
    return table


def _join_nibbles(words: U32) -> U32:
    """The lower three bits of every 4-bit code in 3-bit code words."""
    x = (words & np.uint32(0x0707_0707)) | ((words & np.uint32(0x7070_7070)) >> np.uint32(1))
    x = (x & np.uint32(0x003F_003F)) | ((x & np.uint32(0x3F00_3F00)) >> np.uint32(2))
    x = (x & np.uint32(0x0000_0FFF)) | ((x & np.uint32(0x0FFF_0000)) >> np.uint32(4))
    stream = x.reshape(len(words), -1, 4)
    out = np.empty((*stream.shape[:2], 3), np.uint32)
    for word, (low, high) in enumerate(((0, 24), (8, 16), (16, 8))):
        out[..., word] = stream[..., word] >> np.uint32(low)
        out[..., word] |= stream[..., word + 1] << np.uint32(high)
    return out.reshape(len(words), -1)
