"""The embedding block: dequantised rows of the table."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import Format, Layout, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.memory import MlxMemory, quantised
from aegis.kernels.sizes import dtype_nbytes


class MlxEmbedding:
    """EmbeddingBlock over layout row. A row of a quantised table lies in three places of it, so
    only plain numbers can stay on disk."""

    def __init__(
        self,
        memory: MlxMemory,
        traits: Traits,
        shape: tuple[int, int],
        fmt: Format,
        layout: Layout,
        table: Weight | None,
        multiplier: float = 1.0,
    ) -> None:
        if layout != "row":
            raise ValueError(f"the mlx backend reads layout row, not {layout}")
        if table is None and fmt.kind != "dense":
            raise ValueError("a quantised embedding table in layout row must be in memory")
        self._format, self._traits, self._multiplier = fmt, traits, multiplier
        self._arrays = None if table is None else memory.arrays(table)
        self._one = device.compiled(self._rows)
        self.row_nbytes = shape[1] * dtype_nbytes(fmt) if fmt.kind == "dense" else 0

    def row_offset(self, token_id: int) -> int:
        """Where an id's row starts in the stored table."""
        return token_id * self.row_nbytes

    def __call__(self, ids: NDArray[np.int32] | mx.array) -> mx.array:
        """ids [T] to [T, H]."""
        if self._arrays is None:
            raise ValueError("the embedding table is on disk: read its rows and use from_rows")
        where = ids if isinstance(ids, mx.array) else mx.array(ids)
        out: mx.array = self._one(where) if where.size == 1 else self._rows(where)
        return out

    def _rows(self, where: mx.array) -> mx.array:
        assert self._arrays is not None
        rows = [array[where] for array in self._arrays]
        dtype = self._traits.dtype
        if self._format.kind == "dense":
            return self._multiplied(rows[0].astype(dtype))
        fmt = self._format
        params = [array.astype(dtype) if fmt.kind == "affine" else array for array in rows[1:]]
        numbers = mx.dequantize(
            *quantised((rows[0], *params)),
            group_size=fmt.group_size,
            bits=fmt.bits,
            mode=fmt.kind,
            dtype=dtype,
        )
        return self._multiplied(numbers)

    def _multiplied(self, rows: mx.array) -> mx.array:
        return rows if self._multiplier == 1 else rows * self._multiplier

    def from_rows(self, ids: NDArray[np.int32], rows: NDArray[np.uint8]) -> mx.array:
        """The same from rows read from disk, uint8 [T, row_nbytes]."""
        numbers = mx.array(rows[: len(ids)]).view(device.DTYPES[self._format.dtype])
        return self._multiplied(numbers.astype(self._traits.dtype))
