"""Resident weights and expert slots in MLX's own arrays, filled through numpy views of them.

An evaluated array can be written through ``np.array(array, copy=False)``; on CUDA that moves it
into memory that both sides see. The driver moves the pages of that memory between host and GPU
as either touches them, even while a direct read is on its way to them: its bytes are then lost,
which was seen in 14 of 9276 reads of 4096 bytes beside a busy GPU. So there the host copies what
it has read. Slots are not views of one pool with gaps between the matrices:
CUDA's gather_qmm refuses arrays that are not contiguous, and Metal may copy them. So every array of
an expert (codes, scales and biases of three matrices) has a contiguous pool of its own, and a read
scatters the parts of a record over the pools.

Codes never end where their allocation does, since a kernel on CUDA reads behind narrow matrices
(see ``sizes.inputs_behind``). In the resident region their scales follow them, which are enough; a
pool is the front of an allocation with room behind it, planned and measured as workspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import Format, Segment, SlotPart, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.sizes import ROOM_NBYTES, segment_ranges
from aegis.kernels.sizes import RECORD_ALIGN, RESIDENT_ALIGN, align_up, dtype_nbytes, row_parts

Arrays = tuple[mx.array, ...]
"""Codes, scales and biases of an affine matrix, codes and scales of one in mxfp4, or the numbers of
what is dense."""

_OF_ONE_INPUT = ("gate_proj", "up_proj", "gate_proj.bias", "up_proj.bias")


def quantised(arrays: Arrays) -> tuple[mx.array, mx.array, mx.array | None]:
    """Codes, scales and, if there are any, biases, as MLX's operations take them."""
    return arrays[0], arrays[1], arrays[2] if len(arrays) > 2 else None


def host_view(array: mx.array) -> NDArray[Any]:
    """The array's memory, writable, of the array's shape."""
    mx.eval(array)
    view: NDArray[Any] = np.array(array, copy=False)
    return view


_RAW: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _raw(fmt: Format) -> tuple[type[Any], mx.Dtype]:
    """The unsigned type numbers are written through, since numpy has no bfloat16; and their own."""
    return _RAW[dtype_nbytes(fmt)], device.DTYPES[fmt.dtype]


class MlxMemory:
    """OwnMemory of one backend."""

    def __init__(self, traits: device.Traits) -> None:
        self._traits = traits
        self._region: mx.array | None = None
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        """The host's view of the region."""
        self.pools: dict[str, Arrays] = {}
        """Matrix name to its pools, [slots, ...] each. Matrices whose pools are the same lie one
        behind the other in every slot."""
        self.kv_nbytes = 0
        """What KV caches have taken."""
        self.recurrent_nbytes = 0
        """What recurrent states may take."""
        self._held_nbytes = {"slots": 0, "resident_weights": 0}

    def resident(self, nbytes: int) -> NDArray[np.uint8]:
        """See OwnMemory. Lines of 64 bytes: MLX counts elements of a dimension in 32 bits."""
        lines = align_up(nbytes, RESIDENT_ALIGN) // RESIDENT_ALIGN
        self._region = mx.array(np.zeros((lines, RESIDENT_ALIGN), np.uint8))
        self._bytes = host_view(self._region).reshape(-1)
        self._held_nbytes["resident_weights"] = self._bytes.nbytes
        return self._bytes[:nbytes]

    def _start(self, weight: Weight) -> int:
        """Where a resident weight lies in the region."""
        return int(weight.data.ctypes.data) - int(self._bytes.ctypes.data)

    def join(self, weights: Sequence[Weight], between: Sequence[Weight]) -> list[Weight] | None:
        """Make matrices one, its rows theirs one after the other; it, and then ``between`` anew.

        Bytes are moved inside the range that all of these fill, so only their owner may do it, and
        before it uses them. None, with nothing moved, where formats differ or the range holds more.
        """
        first, ordered = weights[0], sorted([*weights, *between], key=self._start)
        begin = at = self._start(ordered[0])
        for weight in ordered:
            if self._start(weight) != at:
                return None
            at += align_up(weight.data.nbytes, RESIDENT_ALIGN)
        if any((w.format, w.shape[1:]) != (first.format, first.shape[1:]) for w in weights):
            return None
        # Codes of all, then scales of all, then biases of all.
        pieces = [piece for same in zip(*map(_pieces, weights), strict=True) for piece in same]
        if any(piece.nbytes % RESIDENT_ALIGN for piece in pieces):
            return None
        whole = self._bytes[begin : begin + sum(piece.nbytes for piece in pieces)]
        moved, at = [replace(first, shape=_stacked(weights), data=whole)], begin + whole.nbytes
        kept = [weight.data.copy() for weight in between]
        whole[:] = np.concatenate(pieces)
        for weight, data in zip(between, kept, strict=True):
            place = self._bytes[at : at + data.nbytes]
            place[:] = data
            moved.append(replace(weight, data=place))
            at += align_up(data.nbytes, RESIDENT_ALIGN)
        return moved

    def arrays(self, weight: Weight) -> Arrays:
        """A resident weight as arrays over the same memory."""
        shape, fmt = weight.shape, weight.format
        start = self._start(weight)
        _, numbers = _raw(fmt)
        if fmt.kind == "dense":
            pieces = [self._piece(start, shape, numbers)]
        else:
            rows, cols = shape
            parts = row_parts((rows, cols), fmt, RESIDENT_ALIGN)
            groups = (rows, cols // fmt.group_size)
            pieces = [self._piece(start, (rows, cols * fmt.bits // 32), mx.uint32)]
            pieces += [self._piece(start + at, groups, numbers) for at in parts.params_offsets]
        mx.eval(pieces)
        return tuple(pieces)

    def _piece(self, start: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        assert self._region is not None
        count = int(np.prod(shape))
        first = start // RESIDENT_ALIGN
        lines = align_up(count * dtype.size, RESIDENT_ALIGN) // RESIDENT_ALIGN
        piece = self._region[first : first + lines].view(dtype).reshape(-1)[:count]
        return piece.reshape(shape)

    def slots(self, num_slots: int, segments: Mapping[str, Segment]) -> tuple[SlotPart, ...]:
        """See OwnMemory. Matrices of one input share pools, if their formats agree: one operation
        computes them."""
        parts, names = list[SlotPart](), list(segments)
        while names:
            first = segments[names[0]]
            same = [n for n in names if _kind(n, segments[n]) == _kind(names[0], first)]
            names = [name for name in names if name not in same]
            pools = []
            for index, ((rows, *cols), raw, dtype) in enumerate(_pool_shapes(first)):
                room = ROOM_NBYTES if dtype == mx.uint32 else 0
                pool, base = _allocate(num_slots, (len(same) * rows, *cols), raw, room)
                pools.append(pool if dtype == pool.dtype else pool.view(dtype))
                for place, name in enumerate(same):
                    at = segment_ranges(segments[name])[index]
                    start, stride = base + place * at.nbytes, len(same) * at.nbytes
                    parts.append(
                        SlotPart(at.offset, at.nbytes, start, stride, self._traits.reads_direct)
                    )
            mx.eval(pools)
            self.pools |= dict.fromkeys(same, tuple(pools))
        self._held_nbytes["slots"] = num_slots * sum(part.nbytes for part in parts)
        return tuple(parts)

    def measured(self) -> dict[str, int]:
        """See OwnMemory. What is none of the others' is workspace."""
        held = self._held_nbytes | {"kv_cache": self.kv_nbytes}
        if self.recurrent_nbytes:
            held["recurrent_state"] = self.recurrent_nbytes
        peak = int(mx.get_peak_memory()) - sum(held.values())
        return held | {"workspace": max(0, peak)}

    def apart(self, resident: int, shared: int) -> tuple[int, int]:
        """See OwnMemory."""
        return device.apart(self._traits, resident, shared)

    def close(self) -> None:
        """Drop every array."""
        self._region, self._bytes = None, np.empty(0, np.uint8)
        self.pools.clear()


def _pieces(weight: Weight) -> list[NDArray[np.uint8]]:
    """Codes, scales and biases, or what of these the format has."""
    if weight.format.kind == "dense":
        return [weight.data]
    parts = row_parts((weight.shape[0], weight.shape[1]), weight.format, RESIDENT_ALIGN)
    params = [weight.data[at : at + parts.params_nbytes] for at in parts.params_offsets]
    return [weight.data[: parts.codes_nbytes], *params]


def _stacked(weights: Sequence[Weight]) -> tuple[int, ...]:
    """The shape of all rows together."""
    return (sum(weight.shape[0] for weight in weights), *weights[0].shape[1:])


def _kind(name: str, segment: Segment) -> tuple[bool, Format, tuple[int, ...]]:
    """What matrices must have in common to share pools: their input, too."""
    return name in _OF_ONE_INPUT, segment.format, segment.shape


def _pool_shapes(segment: Segment) -> list[tuple[tuple[int, ...], type[Any], mx.Dtype]]:
    """Shape of one slot, the type it is written through and the type kernels see, by array."""
    fmt = segment.format
    raw, numbers = _raw(fmt)
    if fmt.kind == "dense":
        return [(segment.shape, raw, numbers)]
    rows, cols = segment.shape
    groups = ((rows, cols // fmt.group_size), raw, numbers)
    codes = ((rows, cols * fmt.bits // 32), np.uint32, mx.uint32)
    return [codes, groups, groups] if fmt.kind == "affine" else [codes, groups]


def _allocate(
    num_slots: int, shape: tuple[int, ...], raw: type[Any], room: int
) -> tuple[mx.array, int]:
    """A pool [num_slots, *shape] of zeros with ``room`` bytes behind it, and its address.

    Where slots have a size that direct reads could fill, the pool starts on such an address.
    """
    (high, *width), item = shape, np.dtype(raw).itemsize
    rows, spare = num_slots * high, -(-room // (int(np.prod(width)) * item))
    # From numpy, whose zeros take no memory until written: mx.zeros would be on the GPU first. By
    # rows, since MLX counts elements of a dimension in 32 bits.
    whole = mx.array(np.zeros((rows + spare, *width), raw))
    address, slot = int(host_view(whole).ctypes.data), int(np.prod(shape)) * item
    first, wanted = 0, whole[:rows]
    if address % RECORD_ALIGN and not slot % RECORD_ALIGN:
        del whole, wanted
        size, slack = num_slots * slot // item, (RECORD_ALIGN + room) // item
        whole = mx.array(np.zeros(size + slack, raw))
        address = int(host_view(whole).ctypes.data)
        first = -address % RECORD_ALIGN
        wanted = whole[first // item :][:size]
    pool = wanted.reshape(num_slots, *shape)
    mx.eval(pool)
    return pool, address + first
