"""Qwen2-MoE: attention with biases, softmax-routed experts and a gated shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.checkpoint.tensor_map import ExpertNames, ResidentName, TensorMap
from aegis.kernels.base import AttentionSpec, ExpertsSpec, HeadSpec, RouterSpec
from aegis.models.base import Decoder, DecoderLayer, ModelShape, Parts
from aegis.models.layers import (
    attention_weights,
    refuse_inconsistent,
    refuse_unsupported,
    rope_theta,
    rotary_frequencies,
    router_weights,
    shared_expert_weights,
)

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig


def shape(config: ModelConfig) -> ModelShape:
    """Sizes for planning; refuses what would change the maths."""
    refuse_unsupported(config, handled={"qkv_bias", "norm_topk_prob"})
    heads, hidden = config.int("num_attention_heads"), config.int("hidden_size")
    layers = config.int("num_hidden_layers")
    sizes = ModelShape(
        hidden_size=hidden,
        vocab_size=config.int("vocab_size"),
        num_hidden_layers=layers,
        moe_layers=tuple(range(layers)),
        num_experts=config.int("num_experts"),
        num_experts_per_tok=config.int("num_experts_per_tok"),
        moe_intermediate_size=config.int("moe_intermediate_size"),
        shared_expert_intermediate_size=config.int("shared_expert_intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=config.int("num_key_value_heads", heads),
        head_dim=config.int("head_dim", hidden // heads),
        max_position_embeddings=config.int("max_position_embeddings"),
        tie_word_embeddings=config.bool("tie_word_embeddings", False),
    )
    refuse_inconsistent(config, sizes)
    # What only the decoder uses is read here too: a bad value is refused before anything is done.
    for read in (_qkv_bias, _norm_topk_prob, _rms_norm_eps, rope_theta):
        read(config)
    return sizes


def _rms_norm_eps(config: ModelConfig) -> float:
    return config.float("rms_norm_eps")


def _qkv_bias(config: ModelConfig) -> bool:
    return config.bool("qkv_bias", True)


def _norm_topk_prob(config: ModelConfig) -> bool:
    return config.bool("norm_topk_prob", False)


def tensor_map(config: ModelConfig) -> TensorMap:
    """Names and shapes of every tensor of the checkpoint."""
    sizes = shape(config)
    hidden, width = sizes.hidden_size, sizes.moe_intermediate_size
    resident = [ResidentName("embed_tokens", (sizes.vocab_size, hidden))]
    for layer in range(sizes.num_hidden_layers):
        resident += _layer_names(f"layers.{layer}.", sizes, _qkv_bias(config))
    resident.append(ResidentName("norm", (hidden,)))
    if not sizes.tie_word_embeddings:
        resident.append(ResidentName("lm_head", (sizes.vocab_size, hidden)))
    tied = (r"lm_head\..*",) if sizes.tie_word_embeddings else ()
    experts = ExpertNames(
        layers=sizes.moe_layers,
        num_experts=sizes.num_experts,
        shapes={
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
        },
        stacked="layers.{layer}.mlp.switch_mlp.{part}",
        separate="layers.{layer}.mlp.experts.{expert}.{part}",
    )
    return TensorMap(tuple(resident), experts, ignored=(*TensorMap.ignored, *tied))


def _layer_names(prefix: str, sizes: ModelShape, qkv_bias: bool) -> list[ResidentName]:
    """Resident tensors of one layer, in the order they are used."""
    hidden, shared = sizes.hidden_size, sizes.shared_expert_intermediate_size
    heads = {
        "q": sizes.num_attention_heads * sizes.head_dim,
        "k": sizes.num_key_value_heads * sizes.head_dim,
        "v": sizes.num_key_value_heads * sizes.head_dim,
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,)}
    for p, rows in heads.items():
        shapes[f"self_attn.{p}_proj"] = (rows, hidden)
        if qkv_bias:
            shapes[f"self_attn.{p}_proj.bias"] = (rows,)
    shapes["self_attn.o_proj"] = (hidden, heads["q"])
    shapes["post_attention_layernorm"] = (hidden,)
    shapes["mlp.gate"] = (sizes.num_experts, hidden)
    if shared:
        shapes["mlp.shared_expert.gate_proj"] = (shared, hidden)
        shapes["mlp.shared_expert.up_proj"] = (shared, hidden)
        shapes["mlp.shared_expert.down_proj"] = (hidden, shared)
        shapes["mlp.shared_expert_gate"] = (1, hidden)
    return [ResidentName(prefix + name, shape) for name, shape in shapes.items()]


def build(config: ModelConfig, parts: Parts) -> Decoder:
    """The decoder over loaded weights."""
    sizes = shape(config)
    backend, weights, eps = parts.backend, parts.weights, _rms_norm_eps(config)
    attention = AttentionSpec(
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=eps,
        inv_freq=rotary_frequencies(rope_theta(config), sizes.head_dim),
    )
    router = RouterSpec(
        hidden_size=sizes.hidden_size,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_experts_per_tok,
        norm_topk_prob=_norm_topk_prob(config),
        rms_norm_eps=eps,
    )
    experts = ExpertsSpec(
        hidden_size=sizes.hidden_size,
        moe_intermediate_size=sizes.moe_intermediate_size,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_experts_per_tok,
        shared_expert_intermediate_size=sizes.shared_expert_intermediate_size,
        layout=parts.layout,
        segments=parts.segments,
    )
    layers = []
    for layer in range(sizes.num_hidden_layers):
        last = layer + 1 == sizes.num_hidden_layers
        following = None if last else router_weights(weights, layer + 1)
        layers.append(
            DecoderLayer(
                attention=backend.attention(attention, attention_weights(weights, layer)),
                cache=parts.caches[layer],
                router=backend.router(
                    router,
                    router_weights(weights, layer),
                    None if last else router,
                    following,
                ),
                experts=backend.experts(experts, shared_expert_weights(weights, layer)),
                moe_index=layer,
            )
        )
    table = weights["embed_tokens"] if sizes.tie_word_embeddings else weights["lm_head"]
    head = HeadSpec(sizes.hidden_size, sizes.vocab_size, eps)
    return Decoder(
        embedding=backend.embedding(*parts.embedding_source, parts.embedding),
        layers=layers,
        head=backend.head(head, {"norm": weights["norm"], "lm_head": table}),
    )
