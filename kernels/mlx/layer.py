"""A layer whose experts all lie in slots, for one row: as few calls and operations as possible.

Decode is bound by the time that queueing takes, some 5 us for every operation, so attention's end,
the router and the experts are one compiled piece. Its operations are the blocks' own: the bits are
those that the blocks compute one by one.
"""

from __future__ import annotations

import mlx.core as mx

from aegis.kernels.base import KVCache
from aegis.kernels.mlx import device
from aegis.kernels.mlx.attention import MlxAttention
from aegis.kernels.mlx.delta import MlxDelta
from aegis.kernels.mlx.experts import MlxExperts
from aegis.kernels.mlx.latent import MlxLatentAttention
from aegis.kernels.mlx.router import MlxRouter, MlxRouting


class MlxLayer:
    """QueuedLayer on MLX."""

    def __init__(
        self,
        attention: MlxAttention | MlxDelta | MlxLatentAttention,
        router: MlxRouter,
        experts: MlxExperts,
    ) -> None:
        self._attention, self._router, self._experts = attention, router, experts
        self._behind_heads = device.compiled(self._compute)

    def __call__(
        self, x: mx.array, cache: KVCache, start: int, table: mx.array
    ) -> tuple[mx.array, MlxRouting]:
        """See QueuedLayer."""
        parts = self._attention.attend(x, cache, start)
        out, chosen = self._behind_heads(x, table, *parts)
        self._experts.queued(out)
        return out, MlxRouting(chosen, None, self._router.spec, self._router.clock)

    def _compute(self, x: mx.array, table: mx.array, *parts: mx.array) -> tuple[mx.array, mx.array]:
        """The residual stream behind the layer [1, H], and the ids of the chosen [1, K]."""
        x = self._attention.leave(x, *parts)
        normed, weights, chosen = self._router.route(x)
        shared = self._experts.shared_expert(normed)
        return self._experts.one_row(x, normed, weights, table[chosen.reshape(-1)], *shared), chosen
