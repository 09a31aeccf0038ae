"""The reference backend: numpy, slow, obvious; the truth that tests compare others with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aegis.kernels import formats
from aegis.kernels.base import Weight
from aegis.kernels.reference import sizes
from aegis.kernels.reference.attention import ReferenceAttention, ReferenceKVCache
from aegis.kernels.reference.delta import ReferenceDelta, ReferenceRecurrentState
from aegis.kernels.reference.latent import ReferenceLatentAttention
from aegis.kernels.reference.linear import F32, rms_norm, widen
from aegis.kernels.reference.moe import Clock, ReferenceExperts, ReferenceMlp, ReferenceRouter

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from aegis.kernels.base import (
        AttentionBlock,
        AttentionSpec,
        DeltaSpec,
        ExpertsSpec,
        Format,
        HeadSpec,
        KVCache,
        KVSpec,
        LatentAttentionSpec,
        Layout,
        MlpSpec,
        OwnMemory,
        RouterSpec,
        SlotMemory,
        WorkspaceSpec,
    )
    from aegis.kernels.queued import Queue


class _Clocked:
    """Attention that also tells the other blocks where the rows are."""

    def __init__(self, block: AttentionBlock, clock: Clock) -> None:
        self._block, self._clock = block, clock

    def __call__(self, x: NDArray[np.float32], cache: KVCache, start: int) -> NDArray[np.float32]:
        self._clock.start = start
        out: NDArray[np.float32] = self._block(x, cache, start)
        return out


class ReferenceEmbedding:
    """EmbeddingBlock in numpy."""

    def __init__(
        self,
        shape: tuple[int, int],
        fmt: Format,
        layout: Layout,
        table: Weight | None,
        multiplier: float = 1.0,
    ) -> None:
        self._shape, self._format, self._layout = shape, fmt, layout
        self._table, self._multiplier = table, F32(multiplier)
        self._block_rows = 16 if layout == "il16" else 1
        self.row_nbytes = formats.nbytes((self._block_rows, shape[1]), fmt, layout)

    def row_offset(self, token_id: int) -> int:
        """Start of the row block that holds this id."""
        return token_id // self._block_rows * self.row_nbytes

    def __call__(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Rows of the table in memory."""
        assert self._table is not None, "the table is on disk: use from_rows"
        if self._layout == "row":
            return widen(self._table)[ids] * self._multiplier
        blocks = self._table.data.reshape(-1, self.row_nbytes)
        return self.from_rows(ids, blocks[ids // self._block_rows])

    def from_rows(self, ids: NDArray[np.int32], rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Rows of blocks read from disk, uint8 [T, row_nbytes]."""
        shape = (self._block_rows, self._shape[1])
        blocks = (widen(Weight(shape, self._format, self._layout, row)) for row in rows)
        picked = zip(ids.tolist(), blocks, strict=True)
        out = np.array([block[i % self._block_rows] for i, block in picked], F32)
        return out * self._multiplier


class ReferenceHead:
    """HeadBlock in numpy."""

    def __init__(self, spec: HeadSpec, weights: Mapping[str, Weight]) -> None:
        self._spec = spec
        self._norm, self._head = widen(weights["norm"]), widen(weights["lm_head"])

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """x [T, H] to logits [T, vocab_size]; every row alone, so grouping can't matter."""
        normed = rms_norm(x, self._norm, self._spec.rms_norm_eps)
        logits = np.stack([self._head @ row for row in normed])
        return np.asarray(logits / F32(self._spec.logits_scaling), F32)


class ReferenceBackend:
    """Backend protocol on numpy."""

    name = "reference"
    layouts: tuple[Layout, ...] = ("il16", "row")
    owned: Collection[str] = ("workspace", "logits")
    memory: OwnMemory | None = None
    queue: Queue | None = None

    def __init__(self, threads: int | None = None) -> None:
        self._clock = Clock()
        self._slots: SlotMemory | None = None

    def describe(self) -> str:
        """One line for people."""
        return f"reference (numpy {np.__version__}, for checking, slow)"

    def workspace_nbytes(self, spec: WorkspaceSpec) -> int:
        """Temporaries and the widened resident weights; numpy allocates them itself."""
        return sizes.workspace_nbytes(spec)

    def kv_nbytes(self, spec: KVSpec) -> int:
        """Bytes of one layer's cache."""
        return sizes.kv_nbytes(spec)

    def recurrent_nbytes(self, spec: DeltaSpec) -> int:
        """Bytes of one layer's recurrent state and its copy."""
        return sizes.recurrent_nbytes(spec)

    def open_workspace(self, spec: WorkspaceSpec, buffer: NDArray[np.uint8]) -> None:
        """Nothing to bind: temporaries are numpy's own."""

    def kv_cache(self, spec: KVSpec, buffer: NDArray[np.uint8]) -> ReferenceKVCache:
        """A cache over ``buffer``."""
        return ReferenceKVCache(spec, buffer)

    def recurrent_state(
        self, spec: DeltaSpec, buffer: NDArray[np.uint8]
    ) -> ReferenceRecurrentState:
        """A state over ``buffer``."""
        return ReferenceRecurrentState(spec, buffer)

    def bind_slots(self, slots: SlotMemory) -> None:
        """Remember where slots lie."""
        self._slots = slots

    def attention(self, spec: AttentionSpec, weights: Mapping[str, Weight]) -> AttentionBlock:
        """An attention block."""
        return _Clocked(ReferenceAttention(spec, weights), self._clock)

    def latent_attention(
        self, spec: LatentAttentionSpec, weights: Mapping[str, Weight]
    ) -> AttentionBlock:
        """A block of latent attention."""
        return _Clocked(ReferenceLatentAttention(spec, weights), self._clock)

    def delta(self, spec: DeltaSpec, weights: Mapping[str, Weight]) -> AttentionBlock:
        """A Gated DeltaNet block."""
        return _Clocked(ReferenceDelta(spec, weights), self._clock)

    def router(
        self,
        spec: RouterSpec,
        weights: Mapping[str, Weight],
        next_spec: RouterSpec | None,
        next_weights: Mapping[str, Weight] | None,
    ) -> ReferenceRouter:
        """A router block."""
        return ReferenceRouter(spec, weights, next_spec, next_weights, self._clock)

    def mlp(self, spec: MlpSpec, weights: Mapping[str, Weight]) -> ReferenceMlp:
        """An MLP block."""
        return ReferenceMlp(spec, weights, self._clock)

    def experts(self, spec: ExpertsSpec, weights: Mapping[str, Weight]) -> ReferenceExperts:
        """An experts block over the bound slots."""
        assert self._slots is not None, "bind_slots comes first"
        return ReferenceExperts(spec, weights, self._slots, self._clock)

    def embedding(
        self,
        shape: tuple[int, int],
        fmt: Format,
        layout: Layout,
        table: Weight | None,
        multiplier: float = 1.0,
    ) -> ReferenceEmbedding:
        """An embedding block."""
        return ReferenceEmbedding(shape, fmt, layout, table, multiplier)

    def head(self, spec: HeadSpec, weights: Mapping[str, Weight]) -> ReferenceHead:
        """A head block."""
        return ReferenceHead(spec, weights)

    def close(self) -> None:
        """Nothing runs in the background."""
