"""What the engine holds: experts by key in, slots with their bytes out.

Not thread-safe: one thread calls it, the read pool's threads only fill memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from aegis.tiers.read_pool import ReadPool
from aegis.tiers.slots import SlotPool
from aegis.tiers.stats import TierStats
from aegis.tiers.store import ExpertFiles

Batch = tuple[NDArray[np.int32], NDArray[np.int32]]
"""(experts ascending, the slot of each), both int32 of equal length."""


class Acquisition:
    """The chosen experts of one layer, pinned until ``release``. A context manager."""

    complete: bool
    """Every chosen expert has been handed out by ``ready`` or ``wait``."""

    def ready(self) -> Batch:
        """What is there now and was not handed out before; never blocks, may be empty."""
        raise NotImplementedError

    def wait(self) -> Batch:
        """Block until more arrive and hand them out; empty once ``complete``.

        Raises ReadError; calling ``wait`` again retries that read, ``release`` gives up."""
        raise NotImplementedError

    def release(self) -> None:
        """Unpin, count the choice and let the policy decide who stays. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Acquisition:
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError


class ExpertTiers:
    """Experts in slots, fetched on demand, guessed ahead, kept by a policy."""

    stats: TierStats
    candidates: int
    """How many experts to ask of the router for a guess (0: the guess needs none)."""

    def __init__(
        self,
        files: ExpertFiles,
        slots: SlotPool,
        *,
        num_experts_per_tok: int,
        staging_slots: int,
        policy: str = "lfu",
        guess: str = "cross-layer",
        guess_width: int = 6,
        io_threads: int = 2,
        pool: ReadPool | None = None,
        seed: int = 0,
    ) -> None:
        """slots: all of them, hot and staging together. ``staging_slots`` of these serve prefill and
        belong to the hot tier otherwise. policy: lfu, lru, random. guess: cross-layer, previous,
        none. pool: shared read pool (stays open at close); None opens one of ``io_threads``."""
        raise NotImplementedError

    def guess(self, layer_index: int, ranked: Sequence[int] | NDArray[np.int32]) -> int:
        """Start reads for what MoE layer ``layer_index`` (counted among MoE layers) may choose.

        ranked: best first (ignored unless the guess is cross-layer). Returns the reads issued."""
        raise NotImplementedError

    def acquire(self, layer_index: int, experts: Sequence[int] | NDArray[np.int32]) -> Acquisition:
        """Pin the chosen experts (distinct, ascending, at most as many as there are slots); reads
        for the missing start at once, ahead of every guess."""
        raise NotImplementedError

    def begin_prefill(self) -> None:
        """Take the staging slots back from the hot tier, coldest first."""
        raise NotImplementedError

    def prefill_layer(
        self,
        layer_index: int,
        experts: Sequence[int] | NDArray[np.int32],
        next_guess: Sequence[int] | NDArray[np.int32] | None = None,
        rows: Sequence[int] | NDArray[np.int32] | None = None,
    ) -> Iterator[Batch]:
        """Visit ``experts`` (distinct, ascending; any number) in batches in ascending order.

        Asking for the next batch says that the one before is no longer in use. next_guess:
        experts of layer_index + 1 to read ahead. rows: how many rows chose each expert; with it the
        hot tier counts them. Closing the iterator early is allowed."""
        raise NotImplementedError

    def end_prefill(self) -> None:
        """Let the hot tier have the staging slots again."""
        raise NotImplementedError

    def release_slots(self, count: int) -> int:
        """Give up to ``count`` slots from the end back to the system; returns how many went.

        Never goes below num_experts_per_tok slots, nor past a pinned slot."""
        raise NotImplementedError

    def restore_slots(self) -> int:
        """Take every released slot back; returns how many came."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop reading. Waits only for reads that the disk is already doing."""
        raise NotImplementedError
