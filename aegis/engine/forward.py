"""One pass over the layers: decode for a single row, prefill for a chunk of rows.

Nothing here can change a result: routing comes from the model's own router, the guess only says
what to read early, and the blocks sum in an order that does not depend on arrival.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from aegis.engine.embedding import DiskEmbedding
from aegis.models.base import MoeBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from aegis.kernels.base import Array, Routing
    from aegis.kernels.queued import Queue, QueuedExpertsBlock, QueuedHeadBlock, QueuedLayer
    from aegis.models.base import Decoder
    from aegis.tiers.facade import ExpertTiers


_COUNTED_TOGETHER = 16
"""Tokens whose choices are counted at once: bringing them to the host and counting takes as long
for one as for many."""


class Embed(Protocol):
    """Token ids to the first residual stream, wherever the table lies."""

    def __call__(self, ids: NDArray[np.int32] | Array) -> Array:
        """ids [T] to [T, H]."""


class Observer(Protocol):
    """Looks on while tokens are decoded one by one."""

    def look(self, index: int, x: Array) -> None:
        """What an MoE layer's router is about to see [1, H]."""

    def chose(self, experts: NDArray[np.int32]) -> None:
        """What it chose [K]."""


class Forward:
    """Runs a decoder over expert tiers."""

    observer: Observer | None = None

    def __init__(
        self,
        decoder: Decoder,
        tiers: ExpertTiers,
        embed: Embed,
        watch: Callable[[], None],
        queue: Queue | None = None,
    ) -> None:
        """watch: called before every layer, while no slot is pinned. queue: the backend's."""
        self._decoder, self._tiers, self._embed, self._watch = decoder, tiers, embed, watch
        self._queue, self._num_moe_layers = queue, len(decoder.moe)
        self._queued: list[QueuedLayer] = []
        """Every MoE layer as one call, where the backend queues."""
        if queue is not None:
            moe = [(la.attention, la.mlp) for la in decoder.layers if isinstance(la.mlp, MoeBlocks)]
            self._queued = [queue.layer(first, mlp.router, mlp.experts) for first, mlp in moe]
        self._tables: dict[int, tuple[NDArray[np.int32], Array]] = {}
        """MoE layer to its table, on the host and as the backend wants it."""
        self._unseen: list[list[tuple[int, Routing]]] = []
        """Routing that nobody has looked at yet, by MoE layer, of the latest tokens."""

    @property
    def blocks(self) -> tuple[Decoder, Embed]:
        """What tokens go through. Where the backend does not queue, others that compute the same
        may take their place: a bench puts clocks around them."""
        return self._decoder, self._embed

    @blocks.setter
    def blocks(self, blocks: tuple[Decoder, Embed]) -> None:
        self._decoder, self._embed = blocks

    def decode(self, token: int, position: int) -> Array:
        """One token at ``position`` to its last hidden state [1, H]."""
        self.count(least=_COUNTED_TOGETHER)
        x = self._embed(np.array([token], np.int32))
        unseen: list[tuple[int, Routing]] = []
        candidates = self._tiers.candidates
        for layer in self._decoder.layers:
            self._watch()
            mlp = layer.mlp
            if not isinstance(mlp, MoeBlocks):
                x = mlp(layer.attention(x, layer.cache, position))
            elif (table := self._table(mlp.index)) is None:
                self.count()
                x = layer.attention(x, layer.cache, position)
                if self.observer is not None:
                    self.observer.look(mlp.index, x)
                routing = mlp.router(x, candidates)
                if self.observer is not None:
                    self.observer.chose(routing.experts[0])
                x = self._decode_experts(mlp, x, routing)
            else:
                x, routing = self._queued[mlp.index](x, layer.cache, position, table)
                unseen.append((mlp.index, routing))
        if unseen:
            self._start(x, unseen)
        return x

    def _start(self, result: Array, unseen: list[tuple[int, Routing]]) -> None:
        """Have a token computed, and every now and then what the latest ones have chosen."""
        assert self._queue is not None
        self._unseen.append(unseen)
        together = self._unseen if len(self._unseen) == _COUNTED_TOGETHER else []
        self._queue.start([result], [routing for token in together for _, routing in token])

    def decode_ahead(self, best: Array, position: int) -> tuple[Array, Array] | None:
        """The same for a token that only the device knows, and what the head chooses behind it.

        None where a layer would have to wait for its routing. Nothing waits.
        """
        queue = self._queue
        if queue is None or isinstance(self._embed, DiskEmbedding):
            return None
        self._watch()
        tables = [self._table(index) for index in range(self._num_moe_layers)]
        if any(table is None for table in tables):
            return None
        self.count(least=_COUNTED_TOGETHER, all_but=1)
        x = self._embed(best)
        unseen: list[tuple[int, Routing]] = []
        for layer in self._decoder.layers:
            mlp = layer.mlp
            if not isinstance(mlp, MoeBlocks):
                x = mlp(layer.attention(x, layer.cache, position))
                continue
            x, routing = self._queued[mlp.index](x, layer.cache, position, tables[mlp.index])
            unseen.append((mlp.index, routing))
        following = cast("QueuedHeadBlock", self._decoder.head).best(x)
        self._start(following, unseen)
        return x, following

    def best(self, hidden: Array) -> Array:
        """What the head chooses behind a token, on the device; only where the backend queues."""
        assert self._queue is not None
        best = cast("QueuedHeadBlock", self._decoder.head).best(hidden)
        self._queue.start([best])
        return best

    def forget_ahead(self) -> None:
        """The token of the last ``decode_ahead`` is not wanted: it counts for nothing."""
        if self._unseen:
            self._unseen.pop()

    def _table(self, index: int) -> Array | None:
        """Where a layer's experts lie, if the backend can use it and nothing needs the routing:
        all are in slots, and so are the next layer's, which would otherwise be guessed."""
        if self._queue is None or self.observer is not None:
            return None
        table, following = self._tiers.table(index), index + 1
        if table is None:
            return None
        guessed = self._tiers.guesses and following < self._num_moe_layers
        if guessed and self._tiers.table(following) is None:
            return None
        known = self._tables.get(index)
        if known is None or known[0] is not table:
            self._tables[index] = known = (table, self._queue.table(table))
        return known[1]

    @property
    def has_uncounted(self) -> bool:
        """Whether ``count`` has anything to do."""
        return bool(self._unseen)

    def count(self, least: int = 1, all_but: int = 0) -> None:
        """Tell the tiers what was chosen by routers that nobody waited for.

        least: not for fewer tokens. all_but: leave so many of the latest, which may still be
        computed.
        """
        queue, ready = self._queue, len(self._unseen) - all_but
        if queue is None or ready < least:
            return
        tokens, self._unseen = self._unseen[:ready], self._unseen[ready:]
        flat = [one for token in tokens for one in token]
        chosen = queue.read([routing for _, routing in flat])
        rows: dict[int, list[int]] = {}
        for row, (index, _) in enumerate(flat):
            rows.setdefault(index, []).append(row)
        for index, those in rows.items():
            self._tiers.note_hits(index, chosen[those])

    def close(self) -> None:
        """Count what was queued, and let go of the model."""
        self.count()
        self._tables.clear()
        self._queued.clear()
        del self._decoder, self._embed

    def _decode_experts(self, moe: MoeBlocks, x: Array, routing: Routing) -> Array:
        """Misses are being read while the guess goes out and the first experts are computed."""
        tiers, index = self._tiers, moe.index
        begun = self._queue is not None
        if begun:
            # The device computes the shared expert while the host looks at the routing.
            moe.experts.begin(x, routing)
        acquired = tiers.acquire(index, routing.experts[0])
        try:
            if index + 1 < self._num_moe_layers:
                tiers.guess(index + 1, routing.guess)
            if begun:
                tiers.fill(index)
            experts, slots = acquired.ready()
            if not begun:
                if acquired.complete:
                    return moe.experts(x, routing, experts, slots)
                moe.experts.begin(x, routing)
            while True:
                if len(experts):
                    moe.experts.add(experts, slots)
                if acquired.complete:
                    return moe.experts.finish()
                if begun and (coming := acquired.coming()) is not None:
                    begun = False  # Once is enough.
                    cast("QueuedExpertsBlock", moe.experts).expect(*coming)
                experts, slots = acquired.wait()
        finally:
            acquired.release()

    def prefill(self, ids: Sequence[int], start: int) -> Array:
        """A chunk of at least two tokens at positions start.. to their last hidden states [T, H].

        The tiers must be in prefill (``begin_prefill``).
        """
        self.count()
        x = self._embed(np.asarray(ids, np.int32))
        candidates = self._tiers.candidates
        for layer in self._decoder.layers:
            self._watch()
            x, mlp = layer.attention(x, layer.cache, start), layer.mlp
            if isinstance(mlp, MoeBlocks):
                x = self._prefill_experts(mlp, x, mlp.router(x, candidates))
            else:
                x = mlp(x)
        return x

    def _prefill_experts(self, moe: MoeBlocks, x: Array, routing: Routing) -> Array:
        """A chunk's experts in ascending order, as they come."""
        if self._queue is not None:
            moe.experts.begin(x, routing)
        experts, rows = np.unique(routing.experts, return_counts=True)
        guess = np.sort(routing.guess) if len(routing.guess) else None
        batches = self._tiers.prefill_layer(moe.index, experts, guess, rows.tolist())
        if self._queue is None:
            moe.experts.begin(x, routing)
        for batch, slots in batches:
            moe.experts.add(batch, slots)
        return moe.experts.finish()
