"""Pieces that several families share."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING

from aegis.errors import CheckpointError
from aegis.models.base import submodule

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.kernels.base import Weight


def rotary_frequencies(theta: float, dim: int) -> tuple[float, ...]:
    """``theta ** (-2i / dim)`` for i < dim / 2, each rounded once to float32.

    Decimal arithmetic, because pow of the C library differs between systems in the last bit.
    """
    with localcontext() as context:
        context.prec = 30
        base = Decimal(theta)
        exact = [base ** (Decimal(-2 * i) / Decimal(dim)) for i in range(dim // 2)]
    return tuple(struct.unpack("f", struct.pack("f", float(value)))[0] for value in exact)


def attention_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """Norm, projections and biases of a layer's self attention."""
    names = {"norm": "input_layernorm"}
    for p in ("q", "k", "v", "o"):
        names[f"{p}_proj"] = f"self_attn.{p}_proj"
        names[f"{p}_bias"] = f"self_attn.{p}_proj.bias"
    return submodule(weights, f"layers.{layer}.", names)


def router_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """Post-attention norm and gate of a layer."""
    names = {"norm": "post_attention_layernorm", "gate": "mlp.gate"}
    return submodule(weights, f"layers.{layer}.", names)


def shared_expert_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """The shared expert's matrices and its gate, as far as the layer has them."""
    names = {f"{p}_proj": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")}
    names["shared_expert_gate"] = "mlp.shared_expert_gate"
    return submodule(weights, f"layers.{layer}.", names)


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1, None),
    "use_sliding_window": (False, None),
    "sliding_window_pattern": (None,),
    "layer_types": (None,),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
    "moe_layer_freq": (1, None),
    "first_k_dense_replace": (0, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (False, None),
    "norm_topk_prob": (False, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
    "routed_scaling_factor": (1, None),
    "scoring_func": ("softmax", None),
    "n_group": (1, None),
    "topk_group": (1, None),
    "linear_num_value_heads": (None,),
    "kv_lora_rank": (None,),
    "q_lora_rank": (None,),
    "attention_sinks": (False, None),
}
"""Keys that change the maths when they hold anything but these values."""


def refuse_unsupported(config: ModelConfig, handled: set[str]) -> None:
    """Refuse config keys that change the maths and that the family does not implement.

    Raises:
        CheckpointError: naming the key and its value.
    """
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if key in handled or value is None or value in neutral:
            continue
        if key == "layer_types" and set(value) == {"full_attention"}:
            continue
        raise CheckpointError(
            f"config.json sets {key} to {value!r}, which changes the computation and is not"
            f" implemented for {config.model_type}; use a checkpoint without it"
        )


def rope_theta(config: ModelConfig) -> float:
    """The rotary base, from ``rope_theta`` or from transformers 5's ``rope_parameters``.

    Raises:
        CheckpointError: for a scaled rotary embedding.
    """
    parameters = config.get("rope_parameters") or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise CheckpointError(
            f"config.json sets rope_parameters.rope_type to {kind!r}, which is not implemented"
            f" for {config.model_type}; use a checkpoint with plain rotary positions"
        )
    theta = parameters.get("rope_theta")
    return float(theta) if theta is not None else config.float("rope_theta", 10000.0)
