"""Sizes of stored tensors, from shapes and formats alone (no array library needed).

Two layouts hold the same numbers in the same number of bytes, apart from padding:

``il16``  blocks of 16 output rows by one group of inputs (64 in a dense weight), ordered [row
          block][group]; rows are padded to a multiple of 16, and the inputs are a multiple of 64
          whatever the group, since that is what kernels add up. A block of an affine weight is 16
          scales, 16 biases and then its codes as words of 16 lanes, [word][lane]: a row's words
          are the checkpoint's own, but for 3-bit codes (see formats). A block of mxfp4 is two
          groups: 16 scales of the first, 16 of the second, then words. A block of a dense weight
          is 64 x 16 numbers, [input][lane].
``row``   the checkpoint's own packing: rows of codes, then scales, then biases, each part on a
          boundary of ``align`` bytes.

Vectors are plain numbers in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from aegis.kernels.base import Format, Layout

GROUP = 64
"""Inputs of one il16 block of a dense weight and of mxfp4; all of il16 comes in multiples of it."""

MXFP4 = Format("mxfp4", "e8m0", 4, 32)
"""The only format of its kind."""

GROUPS = (32, 64, 128)
"""Inputs that may share a scale and a bias."""

LANES = 16
"""Output rows of one il16 block."""

CODE_BITS = (2, 3, 4, 5, 6, 8)
"""Code widths that the checkpoint format knows."""

RESIDENT_ALIGN = 64
RECORD_ALIGN = 4096
"""Alignment of the parts of a row-layout weight, in resident memory and in an expert record."""

_DTYPE_NBYTES = {"bf16": 2, "f16": 2, "f32": 4, "e8m0": 1}


class FormatError(ValueError):
    """A shape or format that cannot be stored; the message is one sentence."""


@dataclass(frozen=True)
class RowParts:
    """Where the parts of a row-layout quantised weight lie; sizes in bytes."""

    codes_nbytes: int
    params_offsets: tuple[int, ...]
    """Of the scales, and of the biases where the format has some."""
    params_nbytes: int
    """Bytes of the scales, and of the biases."""
    nbytes: int


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is not below ``value``."""
    return -(-value // alignment) * alignment


def dtype_nbytes(fmt: Format) -> int:
    """Bytes of one number (dense) or of one scale."""
    return _DTYPE_NBYTES[fmt.dtype]


def check_format(shape: tuple[int, ...], fmt: Format, layout: Layout) -> None:
    """Raise FormatError unless a tensor of this shape and format can be stored in ``layout``."""
    if not shape or any(size <= 0 for size in shape):
        raise FormatError(f"the shape {list(shape)} has no elements")
    if (fmt.kind == "mxfp4" or fmt.dtype == "e8m0") and fmt != MXFP4:
        raise FormatError("mxfp4 is codes of 4 bits in groups of 32 with e8m0 scales, nothing else")
    if fmt.kind == "affine":
        if fmt.bits not in CODE_BITS:
            raise FormatError(f"{fmt.bits}-bit codes are not supported")
        if fmt.group_size not in GROUPS:
            raise FormatError(
                f"quantisation groups of {fmt.group_size} are not supported, only of 32, 64 and 128"
            )
    if fmt.kind != "dense" and len(shape) != 2:
        raise FormatError(f"a quantised weight has 2 dimensions, not {len(shape)}")
    if len(shape) > 2:
        raise FormatError(f"a stored tensor has 1 or 2 dimensions, not {len(shape)}")
    width = max(GROUP, block_inputs(fmt)) if layout == "il16" else fmt.group_size
    if len(shape) == 2 and width and shape[1] % width:
        raise FormatError(f"{shape[1]} input features are not a multiple of {width}")


def block_inputs(fmt: Format) -> int:
    """Inputs of one il16 block."""
    return fmt.group_size if fmt.kind == "affine" else GROUP


def block_nbytes(fmt: Format) -> int:
    """Bytes of one il16 block of 16 rows."""
    if fmt.kind == "dense":
        return GROUP * LANES * dtype_nbytes(fmt)
    return 2 * LANES * dtype_nbytes(fmt) + LANES * block_inputs(fmt) * fmt.bits // 8


def row_parts(shape: tuple[int, int], fmt: Format, align: int = RESIDENT_ALIGN) -> RowParts:
    """The parts of a quantised weight in layout ``row``."""
    rows, cols = shape
    codes = rows * cols * fmt.bits // 8
    params = rows * (cols // fmt.group_size) * dtype_nbytes(fmt)
    scales, step = align_up(codes, align), align_up(params, align)
    offsets = (scales, scales + step) if fmt.kind == "affine" else (scales,)
    return RowParts(codes, offsets, params, offsets[-1] + params)


def nbytes(shape: tuple[int, ...], fmt: Format, layout: Layout, align: int = RESIDENT_ALIGN) -> int:
    """Bytes of a stored tensor. ``align``: of the parts of a quantised weight in layout row."""
    check_format(shape, fmt, layout)
    if len(shape) == 1:
        return shape[0] * dtype_nbytes(fmt)
    rows, cols = shape
    if layout == "il16":
        return align_up(rows, LANES) // LANES * (cols // block_inputs(fmt)) * block_nbytes(fmt)
    if fmt.kind == "dense":
        return rows * cols * dtype_nbytes(fmt)
    return row_parts((rows, cols), fmt, align).nbytes
