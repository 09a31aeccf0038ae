"""The embedding block: dequantised rows of a table in memory, or of ranges read from disk."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import Format, Layout, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.descs import linear_desc, located_desc
from aegis.kernels.native.workspace import Workspace
from aegis.kernels.sizes import LANES, nbytes

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


class NativeEmbedding:
    """EmbeddingBlock over il16, where a range holds the 16 rows of one row block."""

    def __init__(
        self,
        workspace: Workspace,
        shape: tuple[int, int],
        fmt: Format,
        layout: Layout,
        table: Weight | None,
        multiplier: float = 1.0,
    ) -> None:
        if layout != "il16":
            raise ValueError(f"the native backend reads layout il16, not {layout}")
        if shape[1] != workspace.spec.hidden_size:
            raise ValueError(
                f"the embedding has {shape[1]} columns but hidden_size is "
                f"{workspace.spec.hidden_size}"
            )
        self.row_nbytes = nbytes((LANES, shape[1]), fmt, "il16")
        self._rows = shape[0]
        self._table = table
        self._desc = located_desc(0, shape, fmt) if table is None else linear_desc(table)
        self._hidden: F32 = workspace.hidden
        self._multiplier = multiplier

    def row_offset(self, token_id: int) -> int:
        """Where the range of this id starts in the stored table."""
        if not 0 <= token_id < self._rows:
            raise ValueError(f"token id {token_id} is not between 0 and {self._rows - 1}")
        return token_id // LANES * self.row_nbytes

    def __call__(self, ids: I32) -> F32:
        """ids [T] to rows [T, H], in the workspace's residual stream."""
        if self._table is None:
            raise ValueError("the embedding table is on disk: read its rows and use from_rows")
        _native.gather(self._desc, ids, None, self._hidden, self._multiplier)
        return self._hidden[: len(ids)]

    def from_rows(self, ids: I32, rows: NDArray[np.uint8]) -> F32:
        """The same from ranges [T, row_nbytes] read from disk."""
        _native.gather(self._desc, ids, rows, self._hidden, self._multiplier)
        return self._hidden[: len(ids)]
