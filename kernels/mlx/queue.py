"""What was called and may not be computed yet."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import Routing
from aegis.kernels.mlx.router import read


class MlxQueue:
    """Queue of one backend: the last results that read from slots."""

    def __init__(self) -> None:
        self._last: mx.array | None = None

    def add(self, result: mx.array) -> None:
        """A result whose graph reads from slots. It depends on all results before it, or is
        computed after them: operations of one stream run in order."""
        self._last = result

    def table(self, slots: NDArray[np.int32]) -> mx.array:
        """See Queue."""
        table = mx.array(slots.astype(np.uint32))
        mx.eval(table)
        return table

    def read(self, routings: Sequence[Routing]) -> None:
        """See Queue."""
        read(routings)

    def settle(self) -> None:
        """See Queue."""
        if self._last is not None:
            mx.eval(self._last)
            self._last = None
