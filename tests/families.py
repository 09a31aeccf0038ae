"""What config.json of each family holds besides the keys that all of them share.

A family added to aegis.models needs an entry here, and is then met by every property that draws
models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies import Choices


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
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
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
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "qwen3_moe": lambda c: {
        "num_experts": c.num_experts,
        "moe_intermediate_size": c.moe_intermediate_size,
        "norm_topk_prob": c.norm_topk_prob,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
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
    "qwen3_next": lambda c: {**_with_delta(c), "norm_topk_prob": c.norm_topk_prob},
    "qwen3_5_moe": lambda c: {**_with_delta(c), "attn_output_gate": True},
}
