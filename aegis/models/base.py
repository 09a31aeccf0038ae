"""What every family offers to planning, conversion and the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.tensor_map import TensorMap
    from aegis.kernels.base import (
        AttentionBlock,
        Backend,
        DeltaSpec,
        EmbeddingBlock,
        ExpertsBlock,
        HeadBlock,
        KVCache,
        KVSpec,
        LatentSizes,
        Layout,
        MlpBlock,
        RouterBlock,
        Segment,
        Weight,
    )
    from aegis.models.decoder import Description


@dataclass(frozen=True)
class ModelShape:
    """The sizes that planning needs, in Hugging Face's names."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    intermediate_size: int = 0
    """Of layers without experts; 0: there are none."""
    latent: LatentSizes | None = None
    """Of latent attention; there is then one head of keys, of its ``key_dim``."""
    output_gate: bool = False
    """Queries bring gates for what attention gives."""
    delta: DeltaSpec | None = None
    """Sizes of the layers with Gated DeltaNet, where there are any."""
    delta_layers: tuple[int, ...] = ()

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention."""
        return self.num_hidden_layers - len(self.delta_layers)

    def kv_spec(self, context: int) -> KVSpec:
        """The key/value cache of a layer with attention."""
        from aegis.kernels.base import KVSpec

        latent = self.latent.kv_lora_rank if self.latent else 0
        return KVSpec(self.num_key_value_heads, self.head_dim, context, latent_dim=latent)


@dataclass(frozen=True)
class MoeBlocks:
    """Routed experts behind a layer's attention."""

    router: RouterBlock
    experts: ExpertsBlock
    index: int
    """Among the MoE layers, not among all: the first part of an expert key."""


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: attention over its cache, or what takes its place; then routed experts or one
    MLP."""

    attention: AttentionBlock
    cache: KVCache
    mlp: MoeBlocks | MlpBlock


@dataclass(frozen=True)
class Decoder:
    """A whole model on one backend."""

    embedding: EmbeddingBlock
    layers: Sequence[DecoderLayer]
    head: HeadBlock

    @property
    def moe(self) -> list[MoeBlocks]:
        """The routed experts, by their index."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeBlocks)]


@dataclass(frozen=True)
class Parts:
    """What the engine hands a family to build its decoder from."""

    backend: Backend
    weights: Mapping[str, Weight]
    """Resident tensors by store name; the embedding table is absent when it stays on disk."""
    embedding: Weight | None
    embedding_source: tuple[tuple[int, int], Any, Layout]
    """Shape, format and layout of the table, wherever it lies."""
    caches: Sequence[KVCache]
    segments: Mapping[str, Segment]
    layout: Layout


class Family(Protocol):
    """The interface of a module in aegis.models."""

    def describe(self, config: ModelConfig) -> Description:
        """Sizes, and what of the maths is not the same in every family."""

    def tensor_map(self, config: ModelConfig) -> TensorMap:
        """Names and shapes of every tensor the checkpoint must hold."""

    def shape(self, config: ModelConfig) -> ModelShape:
        """Sizes for planning; refuses config keys that change the maths and aren't supported."""

    def build(self, config: ModelConfig, parts: Parts) -> Decoder:
        """The decoder over loaded weights."""


def submodule(
    weights: Mapping[str, Weight], prefix: str, names: Mapping[str, str]
) -> dict[str, Weight]:
    """Pick ``prefix + names[key]`` for every key whose tensor exists."""
    picked = {key: weights.get(prefix + name) for key, name in names.items()}
    return {key: weight for key, weight in picked.items() if weight is not None}
