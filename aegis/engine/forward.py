"""One pass over the layers: decode for a single row, prefill for a chunk of rows.

Nothing here can change a result: routing comes from the model's own router, the guess only says
what to read early, and the blocks sum in an order that does not depend on arrival.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from aegis.kernels.base import Array, Routing
    from aegis.models.base import Decoder, DecoderLayer
    from aegis.tiers.facade import ExpertTiers


class Embed(Protocol):
    """Token ids to the first residual stream, wherever the table lies."""

    def __call__(self, ids: NDArray[np.int32]) -> Array:
        """ids [T] to [T, H]."""


class Forward:
    """Runs a decoder over expert tiers."""

    def __init__(
        self, decoder: Decoder, tiers: ExpertTiers, embed: Embed, watch: Callable[[], None]
    ) -> None:
        """watch: called before every layer, while no slot is in use."""
        self._decoder, self._tiers, self._embed, self._watch = decoder, tiers, embed, watch

    def decode(self, token: int, position: int) -> Array:
        """One token at ``position`` to its last hidden state [1, H]."""
        x = self._embed(np.array([token], np.int32))
        candidates = self._tiers.candidates
        for layer in self._decoder.layers:
            self._watch()
            x = layer.attention(x, layer.cache, position)
            routing = layer.router(x, candidates)
            x = self._decode_experts(layer, x, routing)
        return x

    def _decode_experts(self, layer: DecoderLayer, x: Array, routing: Routing) -> Array:
        """Misses are being read while the guess goes out and the first experts are computed."""
        tiers, index = self._tiers, layer.moe_index
        acquired = tiers.acquire(index, routing.experts[0])
        try:
            if index + 1 < len(self._decoder.layers):
                tiers.guess(index + 1, routing.guess)
            experts, slots = acquired.ready()
            if acquired.complete:
                return layer.experts(x, routing, experts, slots)
            layer.experts.begin(x, routing)
            while True:
                if len(experts):
                    layer.experts.add(experts, slots)
                if acquired.complete:
                    return layer.experts.finish()
                experts, slots = acquired.wait()
        finally:
            acquired.release()

    def prefill(self, ids: Sequence[int], start: int) -> Array:
        """A chunk of tokens at positions start.. to their last hidden states [T, H].

        The tiers must be in prefill (``begin_prefill``).
        """
        x = self._embed(np.asarray(ids, np.int32))
        candidates = self._tiers.candidates
        for layer in self._decoder.layers:
            self._watch()
            x = layer.attention(x, layer.cache, start)
            routing = layer.router(x, candidates)
            experts, rows = np.unique(routing.experts, return_counts=True)
            guess = np.sort(routing.guess) if len(routing.guess) else None
            batches = self._tiers.prefill_layer(layer.moe_index, experts, guess, rows.tolist())
            layer.experts.begin(x, routing)
            for batch, slots in batches:
                layer.experts.add(batch, slots)
            x = layer.experts.finish()
        return x
