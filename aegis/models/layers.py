"""Pieces that several families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aegis.checkpoint.plainfile import shown
from aegis.errors import CheckpointError
from aegis.models.base import submodule

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.kernels.base import Weight
    from aegis.models.base import ModelShape


def attention_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """Norms, projections and biases of a layer's self attention."""
    names = {"norm": "input_layernorm"}
    for p in ("q", "k"):
        names[f"{p}_norm"] = f"self_attn.{p}_norm"
    for p in ("q", "k", "v", "o"):
        names[f"{p}_proj"] = f"self_attn.{p}_proj"
        names[f"{p}_bias"] = f"self_attn.{p}_proj.bias"
    names["sinks"] = "self_attn.sinks"
    return submodule(weights, f"layers.{layer}.", names)


def router_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """Post-attention norm and gate of a layer, and its bias and corrections, if it has them."""
    names = {"norm": "post_attention_layernorm", "gate": "mlp.gate", "bias": "mlp.gate.bias"}
    names["correction"] = "mlp.gate.e_score_correction_bias"
    return submodule(weights, f"layers.{layer}.", names)


def mlp_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """Post-attention norm and matrices of a layer without experts."""
    names = {f"{p}_proj": f"mlp.{p}_proj" for p in ("gate", "up", "down")}
    names["norm"] = "post_attention_layernorm"
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
    "sliding_window": (None,),
    "sliding_window_pattern": (None,),
    "layer_types": (None,),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
    "moe_layer_freq": (1, None),
    "first_k_dense_replace": (0, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (False, None),
    "use_bias": (False, None),
    "position_embedding_type": ("rope", None),
    "rope_interleave": (False, None),
    "shared_intermediate_size": (0, None),
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
    "topk_method": (None,),
    "n_group": (1, None),
    "topk_group": (1, None),
    "linear_num_value_heads": (None,),
    "attn_output_gate": (False, None),
    "kv_lora_rank": (None,),
    "q_lora_rank": (None,),
    "attention_sinks": (False, None),
    "swiglu_limit": (None,),
    "swiglu_alpha": (None,),
}
"""Keys that change the maths when they hold anything but these values."""


_PLAIN = {"full_attention"}


def refuse_unsupported(config: ModelConfig, handled: set[str]) -> None:
    """Refuse config keys that change the maths and that the family does not implement.

    Raises:
        CheckpointError: naming the key and its value.
    """
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if key in handled or value is None or value in neutral:
            continue
        if key == "layer_types" and isinstance(value, list) and set(map(str, value)) == _PLAIN:
            continue
        raise CheckpointError(
            f"{config.where} sets {key} to {shown(value)}, which changes the computation and is not"
            f" implemented for {config.model_type}; use a checkpoint without it"
        )


def rope_theta(config: ModelConfig, default: float = 10000.0) -> float:
    """The rotary base, from ``rope_theta`` or from transformers 5's ``rope_parameters``.

    Raises:
        CheckpointError: for a scaled rotary embedding.
    """
    parameters = config.section("rope_parameters")
    if parameters is None:
        return config.float("rope_theta", default)
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise CheckpointError(
            f"{parameters.where} sets rope_type to {shown(kind)}, which is not implemented for"
            f" {config.model_type}; use a checkpoint with plain rotary positions"
        )
    if parameters.get("rope_theta") is None:
        return config.float("rope_theta", default)
    return parameters.float("rope_theta")


def rotary_dim(config: ModelConfig, head_dim: int, default: float) -> int:
    """Channels of a head that are rotated, from ``partial_rotary_factor``, wherever it stands.

    Raises:
        CheckpointError: it is mistyped, or makes an odd number of channels.
    """
    parameters = config.section("rope_parameters")
    inside = parameters is not None and parameters.get("partial_rotary_factor") is not None
    where = parameters if parameters is not None and inside else config
    factor = where.float("partial_rotary_factor", default)
    channels = int(head_dim * factor)
    if channels % 2 or not channels:
        raise where.mistyped("partial_rotary_factor", factor, f"an even part of {head_dim}")
    return channels


def moe_layers(config: ModelConfig) -> tuple[int, ...]:
    """Layers with routed experts: every ``decoder_sparse_step``-th behind the
    ``first_k_dense_replace`` first, but those in ``mlp_only_layers``.

    Raises:
        CheckpointError: one of these is mistyped, or no layer is left.
    """
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise config.mistyped("mlp_only_layers", dense, "a list of layer numbers")
    step = config.int("decoder_sparse_step", 1)
    behind = range(config.int("first_k_dense_replace", 0), config.int("num_hidden_layers"))
    found = tuple(n for n in behind if (n + 1) % step == 0 and n not in dense)
    if not found:
        raise CheckpointError(
            f"{config.where} leaves no layer with experts (see first_k_dense_replace,"
            " mlp_only_layers, decoder_sparse_step); aegis runs mixture-of-experts models"
        )
    return found


def refuse_inconsistent(config: ModelConfig, shape: ModelShape) -> None:
    """Refuse sizes that are plausible each by itself but not together.

    Raises:
        CheckpointError: naming the two that contradict each other.
    """
    if shape.num_experts_per_tok > shape.num_experts:
        raise CheckpointError(
            f"{config.where} sets num_experts_per_tok to {shape.num_experts_per_tok}, but there are"
            f" only {shape.num_experts} experts; use the config.json of this checkpoint"
        )
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise CheckpointError(
            f"{config.where} has {shape.num_attention_heads} attention heads for"
            f" {shape.num_key_value_heads} key and value heads; expected a multiple"
        )
    if shape.head_dim % 2 and shape.latent is None:
        raise config.mistyped("head_dim", shape.head_dim, "an even number")
