"""What a backend offers whose calls return before their result is there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from aegis.kernels.base import (
    Array,
    AttentionBlock,
    ExpertsBlock,
    HeadBlock,
    KVCache,
    RouterBlock,
    Routing,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class QueuedLayer(Protocol):
    """A layer's attention, router and experts as one call, which needs no host: for one row, where
    all of the layer's experts lie in slots."""

    def __call__(self, x: Array, cache: KVCache, start: int, table: Array) -> tuple[Array, Routing]:
        """x [1, H] at position ``start`` to the new residual stream, in the bits of the blocks, and
        what was chosen. ``table``, made by the backend's queue, says where experts lie."""


class QueuedExpertsBlock(ExpertsBlock, Protocol):
    """An experts block that can be told where experts will lie before they do."""

    def expect(self, experts: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Of a call for one row, what will be added yet, and where: what can be prepared is, while
        they are being read. Others may be added all the same."""


class QueuedHeadBlock(HeadBlock, Protocol):
    """A head block that can choose a token without the host."""

    def best(self, x: Array) -> Array:
        """x [1, H] to the id of its largest logit, int32 [1] on the device, the lowest of equals;
        -1 where that logit is not a finite number. The embedding block takes it for ids."""


class Queue(Protocol):
    """Calls that return before their result is there, one thread at a time."""

    def stream(self) -> AbstractContextManager[Any]:
        """Held around all calls of blocks, so that any thread's go to the same queue."""

    def start(self, results: Sequence[Array], routings: Sequence[Routing] = ()) -> None:
        """Have these computed, without waiting. ``routings`` will be read later, all of them."""

    def token(self, best: Array) -> int:
        """Wait for what a head chose."""

    def layer(
        self, attention: AttentionBlock, router: RouterBlock, experts: ExpertsBlock
    ) -> QueuedLayer:
        """These three blocks as one."""

    def table(self, slots: NDArray[np.int32]) -> Array:
        """Expert id to slot, int32 [E], as a ``QueuedLayer`` wants it."""

    def read(self, routings: Sequence[Routing]) -> NDArray[np.int32]:
        """What was chosen in these, each of one row and started: int32 [routings, K], any order
        within a row."""

    def settle(self) -> None:
        """Wait until everything called so far is computed: slots may then be overwritten."""

    def spent(self) -> tuple[float, float]:
        """Seconds, since the backend was opened, in which calls were handed to the device, and in
        which the host waited for it."""
