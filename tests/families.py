"""What config.json of each family holds besides the keys that all of them share.

A family added to aegis.models needs an entry here, and is then met by every property that draws
models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies import Choices

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.2,
    "mscale_all_dim": 0.8,
}

_STRETCHED = YARN.keys() - {"mscale", "mscale_all_dim"}


def _with_delta(c: Choices) -> dict[str, Any]:
    return {
        "num_experts": c.num_experts,
        "moe_intermediate_size": c.moe_intermediate_size,
        "shared_expert_intermediate_size": c.shared_expert_intermediate_size,
        "linear_num_key_heads": c.linear_num_key_heads,
        "linear_num_value_heads": c.linear_num_value_heads,
        "linear_key_head_dim": c.linear_key_head_dim,
        "linear_value_head_dim": c.linear_value_head_dim,
        "linear_conv_kernel_dim": c.linear_conv_kernel_dim,
        "full_attention_interval": c.full_attention_interval,
        "partial_rotary_factor": 0.25,
    }


def _sigmoid_router(c: Choices) -> dict[str, Any]:
    return {
        "n_routed_experts": c.num_experts,
        "n_shared_experts": c.shared_expert_intermediate_size // 64,
        "moe_intermediate_size": c.moe_intermediate_size,
        "intermediate_size": 128,
        "first_k_dense_replace": len(c.dense_layers),
        "norm_topk_prob": c.norm_topk_prob,
        "n_group": c.n_group,
        "topk_group": c.topk_group,
        "routed_scaling_factor": 2.5,
    }


FAMILIES: dict[str, Callable[[Choices], dict[str, Any]]] = {
    "qwen2_moe": lambda c: {
        "num_experts": c.num_experts,
        "moe_intermediate_size": c.moe_intermediate_size,
        "shared_expert_intermediate_size": c.shared_expert_intermediate_size,
        "norm_topk_prob": c.norm_topk_prob,
        "qkv_bias": c.qkv_bias,
        "intermediate_size": 256,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(c.dense_layers),
        "use_sliding_window": False,
    },
    "qwen3_moe": lambda c: {
        "num_experts": c.num_experts,
        "moe_intermediate_size": c.moe_intermediate_size,
        "norm_topk_prob": c.norm_topk_prob,
        "attention_bias": False,
        "intermediate_size": 192,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(c.dense_layers),
        "rope_scaling": None,
    },
    "mixtral": lambda c: {
        "num_local_experts": c.num_experts,
        "intermediate_size": c.moe_intermediate_size,
        "sliding_window": None,
    },
    "olmoe": lambda c: {
        "num_experts": c.num_experts,
        "intermediate_size": c.moe_intermediate_size,
        "norm_topk_prob": c.norm_topk_prob,
        "clip_qkv": None,
    },
    "granitemoe": lambda c: {
        "num_local_experts": c.num_experts,
        "intermediate_size": c.moe_intermediate_size,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
    },
    "qwen3_next": lambda c: {
        "norm_topk_prob": c.norm_topk_prob,
        "intermediate_size": 192,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(c.dense_layers),
        **_with_delta(c),
    },
    "qwen3_5_moe": lambda c: {**_with_delta(c), "attn_output_gate": True},
    "glm4_moe": lambda c: {
        "attention_bias": c.qkv_bias,
        "use_qk_norm": c.qk_norm,
        "partial_rotary_factor": 0.5,
        **_sigmoid_router(c),
    },
    "gpt_oss": lambda c: {
        "num_local_experts": c.num_experts,
        "intermediate_size": c.moe_intermediate_size,
        "attention_bias": c.qkv_bias,
        "sliding_window": c.sliding_window,
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention"
            for layer in range(c.num_hidden_layers)
        ],
        "swiglu_limit": 1.25,
        "rope_scaling": {key: YARN[key] for key in sorted(_STRETCHED)} | {"truncate": False},
    },
    "deepseek_v3": lambda c: {
        "attention_bias": False,
        "q_lora_rank": 64 if c.qk_norm else None,
        "kv_lora_rank": 64 * c.num_key_value_heads,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": c.head_dim // 2,
        "v_head_dim": c.head_dim,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_scaling": YARN if c.qkv_bias else None,
        **_sigmoid_router(c),
    },
}
