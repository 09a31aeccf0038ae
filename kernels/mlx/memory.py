"""Resident weights and expert slots in MLX's own arrays, filled through numpy views of them.

An evaluated array can be written through ``np.array(array, copy=False)``; on CUDA that moves it
into memory that both sides see. Slots are not views of one pool with gaps between the matrices:
CUDA's gather_qmm refuses arrays that are not contiguous, and Metal may copy them. So every array of
an expert (codes, scales and biases of three matrices) has a contiguous pool of its own, and a read
scatters the parts of a record over the pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import Format, Segment, SlotPart, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.sizes import segment_ranges
from aegis.kernels.sizes import RECORD_ALIGN, RESIDENT_ALIGN, align_up, dtype_nbytes, row_parts

Arrays = tuple[mx.array, ...]
"""Codes, scales and biases of an affine matrix, or the numbers of a dense one."""

_VIEWS = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}


def host_view(array: mx.array) -> NDArray[Any]:
    """The array's memory, writable, of the array's shape."""
    mx.eval(array)
    view: NDArray[Any] = np.array(array, copy=False)
    return view


def _raw(fmt: Format) -> tuple[type[np.uint16] | type[np.uint32], mx.Dtype]:
    """The unsigned type numbers are written through, since numpy has no bfloat16; and their own."""
    return (np.uint16 if dtype_nbytes(fmt) == 2 else np.uint32), _VIEWS[fmt.dtype]


class MlxMemory:
    """OwnMemory of one backend."""

    def __init__(self, traits: device.Traits) -> None:
        self._traits = traits
        self._region: mx.array | None = None
        self._region_base = 0
        self.pools: dict[str, Arrays] = {}
        """Matrix name to its pools, [slots, ...] each."""
        self.kv_nbytes = 0
        """What KV caches have taken."""
        self._held_nbytes = {"slots": 0, "resident_weights": 0}

    def resident(self, nbytes: int) -> NDArray[np.uint8]:
        """See OwnMemory. Lines of 64 bytes: MLX counts elements of a dimension in 32 bits."""
        lines = align_up(nbytes, RESIDENT_ALIGN) // RESIDENT_ALIGN
        self._region = mx.array(np.zeros((lines, RESIDENT_ALIGN), np.uint8))
        view: NDArray[np.uint8] = host_view(self._region).reshape(-1)
        self._region_base = int(view.ctypes.data)
        self._held_nbytes["resident_weights"] = view.nbytes
        return view[:nbytes]

    def arrays(self, weight: Weight) -> Arrays:
        """A resident weight as arrays over the same memory."""
        shape, fmt = weight.shape, weight.format
        start = int(weight.data.ctypes.data) - self._region_base
        _, numbers = _raw(fmt)
        if fmt.kind == "dense":
            pieces = [self._piece(start, shape, numbers)]
        else:
            rows, cols = shape
            parts = row_parts((rows, cols), fmt, RESIDENT_ALIGN)
            groups = (rows, cols // fmt.group_size)
            pieces = [
                self._piece(start, (rows, cols * fmt.bits // 32), mx.uint32),
                self._piece(start + parts.scales_offset, groups, numbers),
                self._piece(start + parts.biases_offset, groups, numbers),
            ]
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
        """See OwnMemory."""
        parts = []
        for name, segment in segments.items():
            pools = []
            for (shape, raw, dtype), place in zip(
                _pool_shapes(segment), segment_ranges(segment), strict=True
            ):
                pool, base = _allocate(num_slots, shape, raw)
                pools.append(pool if dtype == pool.dtype else pool.view(dtype))
                parts.append(SlotPart(place.offset, place.nbytes, base, place.nbytes))
            mx.eval(pools)
            self.pools[name] = tuple(pools)
        self._held_nbytes["slots"] = num_slots * sum(part.nbytes for part in parts)
        return tuple(parts)

    def measured(self) -> dict[str, int]:
        """See OwnMemory. What is none of the others' is workspace."""
        held = self._held_nbytes | {"kv_cache": self.kv_nbytes}
        peak = int(mx.get_peak_memory()) - sum(held.values())
        return held | {"workspace": max(0, peak)}

    def taken_nbytes(self, resident: int, shared: int) -> int:
        """See OwnMemory."""
        return device.taken_nbytes(self._traits, resident, shared)

    def close(self) -> None:
        """Drop every array."""
        self._region = None
        self.pools.clear()


def _pool_shapes(segment: Segment) -> list[tuple[tuple[int, int], type[Any], mx.Dtype]]:
    """Shape of one slot, the type it is written through and the type kernels see, by array."""
    (rows, cols), fmt = segment.shape, segment.format
    raw, numbers = _raw(fmt)
    if fmt.kind == "dense":
        return [((rows, cols), raw, numbers)]
    groups = (rows, cols // fmt.group_size)
    codes = (rows, cols * fmt.bits // 32)
    return [(codes, np.uint32, mx.uint32), (groups, raw, numbers), (groups, raw, numbers)]


def _allocate(num_slots: int, shape: tuple[int, int], raw: type[Any]) -> tuple[mx.array, int]:
    """A pool [num_slots, *shape] of zeros and its address.

    Where slots have a size that direct reads could fill, the pool starts on such an address.
    """
    # From numpy, whose zeros take no memory until written: mx.zeros would be on the GPU first.
    pool = mx.array(np.zeros((num_slots, *shape), raw))
    view = host_view(pool)
    address, slot = int(view.ctypes.data), int(np.prod(shape)) * view.itemsize
    if not address % RECORD_ALIGN or slot % RECORD_ALIGN:
        return pool, address
    size, slack = num_slots * slot // view.itemsize, RECORD_ALIGN // view.itemsize
    del view, pool
    whole = mx.array(np.zeros(size + slack, raw))
    address = int(host_view(whole).ctypes.data)
    first = -address % RECORD_ALIGN
    pool = whole[first // whole.itemsize :][:size].reshape(num_slots, *shape)
    mx.eval(pool)
    return pool, address + first
