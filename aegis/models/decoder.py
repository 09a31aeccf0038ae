"""The decoder that many families are: softmax attention and a softmax router in every layer.

A family file describes what sets it apart as a ``Description``; names, shapes and blocks follow
from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aegis.checkpoint.tensor_map import ExpertNames, QuantizeRules, ResidentName, TensorMap
from aegis.kernels.base import AttentionSpec, ExpertsSpec, HeadSpec, QKNorm, RouterSpec
from aegis.models.base import Decoder, DecoderLayer, ModelShape, Parts
from aegis.models.delta import delta_names, delta_weights
from aegis.models.layers import (
    attention_weights,
    refuse_inconsistent,
    rotary_frequencies,
    router_weights,
    shared_expert_weights,
)

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.kernels.base import AttentionBlock


@dataclass(frozen=True)
class MoeNames:
    """What a layer calls its router and experts; see ``ExpertNames`` for the last three."""

    gate: str = "mlp.gate"
    stacked: str = "mlp.switch_mlp.{part}"
    separate: str = "mlp.experts.{expert}.{part}"
    separate_parts: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[str, str] | None = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class Description:
    """Sizes of a model, and what of its maths is not the same in every family."""

    shape: ModelShape
    rms_norm_eps: float
    rope_theta: float
    norm_topk_prob: bool
    qkv_bias: bool = False
    qk_norm: QKNorm = "none"
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    names: MoeNames = MoeNames()
    quantize: QuantizeRules = field(default_factory=QuantizeRules)
    rotary_dim: int | None = None
    """Channels of a head that positions turn; None: all."""
    fused_delta: bool = False
    """Gated DeltaNet's projections as ``delta_names`` unfuses them."""
    zero_centred: bool = False
    """Published norms are less by 1."""
    prefixes: tuple[str, ...] = TensorMap.prefixes
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that only other modalities or another decoder would need."""


def read_shape(
    config: ModelConfig, moe_intermediate_size: int, shared_expert_intermediate_size: int = 0
) -> ModelShape:
    """Sizes for planning; families name those of experts differently.

    Raises:
        CheckpointError: a size is missing, mistyped or contradicts another.
    """
    heads, hidden = config.int("num_attention_heads"), config.int("hidden_size")
    layers = config.int("num_hidden_layers")
    sizes = ModelShape(
        hidden_size=hidden,
        vocab_size=config.int("vocab_size"),
        num_hidden_layers=layers,
        moe_layers=tuple(range(layers)),
        num_experts=config.int("num_experts"),
        num_experts_per_tok=config.int("num_experts_per_tok"),
        moe_intermediate_size=moe_intermediate_size,
        shared_expert_intermediate_size=shared_expert_intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=config.int("num_key_value_heads", heads),
        head_dim=config.int("head_dim", hidden // heads),
        max_position_embeddings=config.int("max_position_embeddings"),
        tie_word_embeddings=config.bool("tie_word_embeddings", False),
    )
    refuse_inconsistent(config, sizes)
    return sizes


def tensor_map(model: Description) -> TensorMap:
    """Names and shapes of every tensor of the checkpoint."""
    sizes, names = model.shape, model.names
    hidden, width = sizes.hidden_size, sizes.moe_intermediate_size
    resident = [ResidentName("embed_tokens", (sizes.vocab_size, hidden))]
    for layer in range(sizes.num_hidden_layers):
        resident += _layer_names(layer, model)
    resident.append(ResidentName("norm", (hidden,), zero_centred=model.zero_centred))
    if not sizes.tie_word_embeddings:
        resident.append(ResidentName("lm_head", (sizes.vocab_size, hidden)))
    tied = (r"lm_head\..*",) if sizes.tie_word_embeddings else ()
    prefix = "layers.{layer}."
    experts = ExpertNames(
        layers=sizes.moe_layers,
        num_experts=sizes.num_experts,
        shapes={
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
        },
        stacked=prefix + names.stacked,
        separate=prefix + names.separate,
        separate_parts=names.separate_parts,
        fused=(prefix + names.fused[0], prefix + names.fused[1]) if names.fused else None,
    )
    ignored = (*TensorMap.ignored, *tied, *model.ignored)
    return TensorMap(tuple(resident), experts, model.prefixes, ignored, model.quantize)


def _layer_names(layer: int, model: Description) -> list[ResidentName]:
    """Resident tensors of one layer, in the order they are used."""
    sizes, gate = model.shape, model.names.gate
    hidden, shared = sizes.hidden_size, sizes.shared_expert_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,)}
    own: dict[str, ResidentName] = {}
    if layer in sizes.delta_layers:
        assert sizes.delta is not None
        own = delta_names(sizes.delta, model.fused_delta)
        shapes |= {name: entry.shape for name, entry in own.items()}
    else:
        shapes |= _attention_shapes(model)
    shapes["post_attention_layernorm"] = (hidden,)
    shapes["mlp.gate"] = (sizes.num_experts, hidden)
    if shared:
        shapes["mlp.shared_expert.gate_proj"] = (shared, hidden)
        shapes["mlp.shared_expert.up_proj"] = (shared, hidden)
        shapes["mlp.shared_expert.down_proj"] = (hidden, shared)
        shapes["mlp.shared_expert_gate"] = (1, hidden)
    if gate != "mlp.gate":
        own["mlp.gate"] = ResidentName("mlp.gate", shapes["mlp.gate"], gate)
    if model.zero_centred:
        norms = (name for name in shapes if name.endswith(_ZERO_CENTRED))
        own |= {name: ResidentName(name, shapes[name], zero_centred=True) for name in norms}
    prefix = f"layers.{layer}."
    entries = (own.get(name, ResidentName(name, shape)) for name, shape in shapes.items())
    return [
        replace(entry, name=prefix + entry.name, source=entry.source and prefix + entry.source)
        for entry in entries
    ]


_ZERO_CENTRED = ("layernorm", ".q_norm", ".k_norm")


def _attention_shapes(model: Description) -> dict[str, tuple[int, ...]]:
    sizes, shapes = model.shape, dict[str, tuple[int, ...]]()
    heads = {"q": sizes.num_attention_heads}
    heads["k"] = heads["v"] = sizes.num_key_value_heads
    for p, count in heads.items():
        rows = count * sizes.head_dim * (2 if p == "q" and sizes.output_gate else 1)
        shapes[f"self_attn.{p}_proj"] = (rows, sizes.hidden_size)
        if model.qkv_bias:
            shapes[f"self_attn.{p}_proj.bias"] = (rows,)
        if model.qk_norm != "none" and p != "v":
            channels = rows if model.qk_norm == "all" else sizes.head_dim
            shapes[f"self_attn.{p}_norm"] = (channels,)
    shapes["self_attn.o_proj"] = (sizes.hidden_size, heads["q"] * sizes.head_dim)
    return shapes


def build(model: Description, parts: Parts) -> Decoder:
    """The decoder over loaded weights."""
    sizes, weights, backend = model.shape, parts.weights, parts.backend
    table = weights["embed_tokens"] if sizes.tie_word_embeddings else weights["lm_head"]
    head = HeadSpec(sizes.hidden_size, sizes.vocab_size, model.rms_norm_eps, model.logits_scaling)
    return Decoder(
        embedding=backend.embedding(
            *parts.embedding_source, parts.embedding, model.embedding_multiplier
        ),
        layers=_layers(model, parts),
        head=backend.head(head, {"norm": weights["norm"], "lm_head": table}),
    )


def _layers(model: Description, parts: Parts) -> list[DecoderLayer]:
    sizes, weights, backend = model.shape, parts.weights, parts.backend
    router, experts = _router(model), _experts(model, parts)
    layers = []
    for layer in range(sizes.num_hidden_layers):
        last = layer + 1 == sizes.num_hidden_layers
        following = None if last else router_weights(weights, layer + 1)
        layers.append(
            DecoderLayer(
                attention=_mixer(model, parts, layer),
                cache=parts.caches[layer],
                router=backend.router(
                    router, router_weights(weights, layer), None if last else router, following
                ),
                experts=backend.experts(experts, shared_expert_weights(weights, layer)),
                moe_index=layer,
            )
        )
    return layers


def _mixer(model: Description, parts: Parts, layer: int) -> AttentionBlock:
    """Attention, or Gated DeltaNet."""
    delta = model.shape.delta
    if delta is not None and layer in model.shape.delta_layers:
        return parts.backend.delta(delta, delta_weights(parts.weights, layer))
    return parts.backend.attention(_attention(model), attention_weights(parts.weights, layer))


def _attention(model: Description) -> AttentionSpec:
    sizes = model.shape
    return AttentionSpec(
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        inv_freq=rotary_frequencies(model.rope_theta, model.rotary_dim or sizes.head_dim),
        qk_norm=model.qk_norm,
        scale=model.attention_scale,
        residual_multiplier=model.residual_multiplier,
        output_gate=sizes.output_gate,
    )


def _router(model: Description) -> RouterSpec:
    sizes = model.shape
    return RouterSpec(
        hidden_size=sizes.hidden_size,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_experts_per_tok,
        norm_topk_prob=model.norm_topk_prob,
        rms_norm_eps=model.rms_norm_eps,
    )


def _experts(model: Description, parts: Parts) -> ExpertsSpec:
    sizes = model.shape
    return ExpertsSpec(
        hidden_size=sizes.hidden_size,
        moe_intermediate_size=sizes.moe_intermediate_size,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_experts_per_tok,
        shared_expert_intermediate_size=sizes.shared_expert_intermediate_size,
        layout=parts.layout,
        segments=parts.segments,
        residual_multiplier=model.residual_multiplier,
    )
