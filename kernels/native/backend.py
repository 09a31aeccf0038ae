"""The native backend: C++ kernels for the CPU, numpy arrays in and out.

Sums have one fixed order, so no result depends on rows per call, threads or instruction set.
"""

from __future__ import annotations

import os
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
    OwnMemory,
    RouterSpec,
    SlotMemory,
    Weight,
    WorkspaceSpec,
)
from aegis.kernels.native import _native, sizes
from aegis.kernels.native.attention import NativeAttention, NativeKVCache
from aegis.kernels.native.delta import NativeDelta, NativeRecurrentState
from aegis.kernels.native.embedding import NativeEmbedding
from aegis.kernels.native.head import NativeHead
from aegis.kernels.native.latent import NativeLatentAttention
from aegis.kernels.native.mlp import NativeMlp
from aegis.kernels.native.moe import NativeExperts
from aegis.kernels.native.router import NativeRouter
from aegis.kernels.native.workspace import Workspace
from aegis.kernels.queued import Queue
from aegis.kernels.threads import default_threads


class NativeBackend:
    """Backend on the processor's vector units; see aegis.kernels.base.Backend."""

    name = "native"
    owned: Collection[str] = ()
    memory: OwnMemory | None = None
    queue: Queue | None = None
    layouts: Sequence[Layout] = ("il16",)

    def __init__(self, threads: int | None = None) -> None:
        wanted = os.environ.get("AEGIS_ISA")
        if wanted and wanted not in _native.isas():
            raise ValueError(
                f"AEGIS_ISA={wanted} is not available here: use one of {', '.join(_native.isas())}"
            )
        self._pool = _native.Pool(threads or default_threads())
        self._workspace: Workspace | None = None
        self._slots: SlotMemory | None = None

    def describe(self) -> str:
        """Instruction set and threads."""
        count = self._pool.threads
        return f"native ({_native.isa()}, {count} thread{'s' if count > 1 else ''})"

    def workspace_nbytes(self, spec: WorkspaceSpec) -> int:
        """Scratch bytes that ``open_workspace`` needs, the logits rows included."""
        return sizes.workspace_nbytes(spec)

    def kv_nbytes(self, spec: KVSpec) -> int:
        """Bytes of one layer's cache."""
        return sizes.kv_nbytes(spec)

    def recurrent_nbytes(self, spec: DeltaSpec) -> int:
        """Bytes of one layer's recurrent state and its copy."""
        return sizes.recurrent_nbytes(spec)

    def open_workspace(self, spec: WorkspaceSpec, buffer: NDArray[np.uint8]) -> None:
        """Bind the scratch memory."""
        self._workspace = Workspace(spec, buffer)

    def kv_cache(self, spec: KVSpec, buffer: NDArray[np.uint8]) -> NativeKVCache:
        """A cache over ``buffer``."""
        return NativeKVCache(spec, buffer)

    def recurrent_state(self, spec: DeltaSpec, buffer: NDArray[np.uint8]) -> NativeRecurrentState:
        """A state over ``buffer``."""
        return NativeRecurrentState(spec, buffer)

    def bind_slots(self, slots: SlotMemory) -> None:
        """Remember where slots lie."""
        self._slots = slots

    def attention(self, spec: AttentionSpec, weights: Mapping[str, Weight]) -> NativeAttention:
        """Attention block."""
        return NativeAttention(self._pool, self._bound(), spec, weights)

    def delta(self, spec: DeltaSpec, weights: Mapping[str, Weight]) -> NativeDelta:
        """Gated DeltaNet block."""
        return NativeDelta(self._pool, self._bound(), spec, weights)

    def latent_attention(
        self, spec: LatentAttentionSpec, weights: Mapping[str, Weight]
    ) -> NativeLatentAttention:
        """Block of latent attention."""
        return NativeLatentAttention(self._pool, self._bound(), spec, weights)

    def router(
        self,
        spec: RouterSpec,
        weights: Mapping[str, Weight],
        next_spec: RouterSpec | None,
        next_weights: Mapping[str, Weight] | None,
    ) -> NativeRouter:
        """Router block."""
        workspace = self._bound()
        return NativeRouter(self._pool, workspace, spec, weights, next_spec, next_weights)

    def mlp(self, spec: MlpSpec, weights: Mapping[str, Weight]) -> NativeMlp:
        """MLP block."""
        return NativeMlp(self._pool, self._bound(), spec, weights)

    def experts(self, spec: ExpertsSpec, weights: Mapping[str, Weight]) -> NativeExperts:
        """Experts block."""
        if self._slots is None:
            raise ValueError("bind_slots must come before an experts block is made")
        return NativeExperts(self._pool, self._bound(), self._slots, spec, weights)

    def embedding(
        self,
        shape: tuple[int, int],
        fmt: Format,
        layout: Layout,
        table: Weight | None,
        multiplier: float = 1.0,
    ) -> NativeEmbedding:
        """Embedding block."""
        return NativeEmbedding(self._bound(), shape, fmt, layout, table, multiplier)

    def head(self, spec: HeadSpec, weights: Mapping[str, Weight]) -> NativeHead:
        """Final norm and logits."""
        return NativeHead(self._pool, self._bound(), spec, weights)

    def close(self) -> None:
        """Stop worker threads."""
        self._pool.set_threads(1)

    def _bound(self) -> Workspace:
        if self._workspace is None:
            raise ValueError("open_workspace must come before a block is made")
        return self._workspace
