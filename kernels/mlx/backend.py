"""The mlx backend: the Backend protocol on MLX operations.

Bits depend on the shapes of calls and on nothing else: not on slots, hits or the order in which
experts arrive. Calls queue; the host waits where it must know what a router chose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import (
    AttentionSpec,
    DeltaSpec,
    ExpertsSpec,
    Format,
    HeadSpec,
    KVSpec,
    LatentAttentionSpec,
    Layout,
    MlpSpec,
    Numbers,
    RouterSpec,
    SlotMemory,
    Weight,
    WorkspaceSpec,
)
from aegis.kernels.mlx import device, sizes
from aegis.kernels.mlx.attention import MlxAttention, MlxKVCache, Positions
from aegis.kernels.mlx.delta import MlxDelta, MlxRecurrentState
from aegis.kernels.mlx.embedding import MlxEmbedding
from aegis.kernels.mlx.experts import MlxExperts
from aegis.kernels.mlx.head import MlxHead
from aegis.kernels.mlx.latent import MlxLatentAttention
from aegis.kernels.mlx.memory import MlxMemory
from aegis.kernels.mlx.mlp import MlxMlp
from aegis.kernels.mlx.queue import MlxQueue
from aegis.kernels.mlx.router import MlxRouter


class MlxBackend:
    """Backend on MLX's device; see aegis.kernels.base.Backend."""

    name = "mlx"
    layouts: Sequence[Layout] = ("row",)
    owned: Collection[str] = (
        "resident_weights",
        "embedding_table",
        "kv_cache",
        "recurrent_state",
        "workspace",
        "logits",
        "staging",
        "hot_tier",
    )

    def __init__(self, numbers: Numbers = "f32") -> None:
        """Raises BackendUnavailableError where MLX finds no device or cannot use it."""
        self._traits = device.open_device(numbers, sizes.CACHE_NBYTES)
        self.memory = MlxMemory(self._traits)
        self.queue = MlxQueue(self._traits.clock)
        self._positions = Positions()

    def describe(self) -> str:
        """Version, device and numbers."""
        return device.describe(self._traits)

    def workspace_nbytes(self, spec: WorkspaceSpec) -> int:
        """What calls take at most, the logits rows included."""
        return sizes.workspace_nbytes(spec)

    def kv_nbytes(self, spec: KVSpec) -> int:
        """Bytes of one layer's cache."""
        return sizes.kv_nbytes(spec)

    def recurrent_nbytes(self, spec: DeltaSpec) -> int:
        """Bytes of one layer's recurrent states."""
        return sizes.recurrent_nbytes(spec)

    def open_workspace(self, spec: WorkspaceSpec, buffer: NDArray[np.uint8]) -> None:
        """Nothing to bind: MLX allocates as it computes."""

    def kv_cache(self, spec: KVSpec, buffer: NDArray[np.uint8]) -> MlxKVCache:
        """A cache of its own."""
        cache = MlxKVCache(spec, self._traits)
        self.memory.kv_nbytes += cache.nbytes
        return cache

    def recurrent_state(self, spec: DeltaSpec, buffer: NDArray[np.uint8]) -> MlxRecurrentState:
        """A state of its own."""
        state = MlxRecurrentState(spec)
        self.memory.recurrent_nbytes += state.nbytes
        return state

    def bind_slots(self, slots: SlotMemory) -> None:
        """All large memory has been allocated: keep it from being paged out."""
        held = self.memory.measured()
        device.wire(self._traits, sum(held.values()) - held["workspace"])

    def attention(self, spec: AttentionSpec, weights: Mapping[str, Weight]) -> MlxAttention:
        """An attention block."""
        return MlxAttention(self.memory, self._traits, self._positions, spec, weights)

    def delta(self, spec: DeltaSpec, weights: Mapping[str, Weight]) -> MlxDelta:
        """A Gated DeltaNet block."""
        return MlxDelta(self.memory, self._traits, spec, weights)

    def latent_attention(
        self, spec: LatentAttentionSpec, weights: Mapping[str, Weight]
    ) -> MlxLatentAttention:
        """A block of latent attention."""
        return MlxLatentAttention(self.memory, self._traits, self._positions, spec, weights)

    def router(
        self,
        spec: RouterSpec,
        weights: Mapping[str, Weight],
        next_spec: RouterSpec | None,
        next_weights: Mapping[str, Weight] | None,
    ) -> MlxRouter:
        """A router block."""
        return MlxRouter(self.memory, self._traits, spec, weights, next_spec, next_weights)

    def mlp(self, spec: MlpSpec, weights: Mapping[str, Weight]) -> MlxMlp:
        """An MLP block."""
        return MlxMlp(self.memory, self._traits, spec, weights)

    def experts(self, spec: ExpertsSpec, weights: Mapping[str, Weight]) -> MlxExperts:
        """An experts block over the slots."""
        return MlxExperts(self.memory, self._traits, self.queue, spec, weights)

    def embedding(
        self,
        shape: tuple[int, int],
        fmt: Format,
        layout: Layout,
        table: Weight | None,
        multiplier: float = 1.0,
    ) -> MlxEmbedding:
        """An embedding block."""
        return MlxEmbedding(self.memory, self._traits, shape, fmt, layout, table, multiplier)

    def head(self, spec: HeadSpec, weights: Mapping[str, Weight]) -> MlxHead:
        """A head block."""
        return MlxHead(self.memory, self._traits, spec, weights)

    def close(self) -> None:
        """Wait for what is queued, then drop every array and what MLX keeps of them."""
        self.queue.settle()
        self.memory.close()
        device.clear_cache()
