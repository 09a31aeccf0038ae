"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aegis.checkpoint.tensor_map import QuantizeRules
from aegis.models import decoder
from aegis.models.decoder import Description
from aegis.models.delta import HANDLED, delta_layers, delta_spec
from aegis.models.layers import refuse_unsupported, rope_theta, rotary_dim

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.tensor_map import TensorMap
    from aegis.models.base import Decoder, ModelShape, Parts


def describe(config: ModelConfig) -> Description:
    """What sets the family apart."""
    refuse_unsupported(config, handled={*HANDLED, "mlp_only_layers", "decoder_sparse_step"})
    if not config.bool("attn_output_gate", True):
        raise config.mistyped("attn_output_gate", False, "true, as every such model has")
    sizes = decoder.read_shape(
        config,
        config.int("moe_intermediate_size"),
        config.int("shared_expert_intermediate_size"),
    )
    return Description(
        replace(
            sizes,
            output_gate=True,
            delta=delta_spec(config),
            delta_layers=delta_layers(config),
        ),
        rms_norm_eps=config.float("rms_norm_eps"),
        rope_theta=rope_theta(config),
        norm_topk_prob=config.bool("norm_topk_prob", True),
        qk_norm="head",
        quantize=QuantizeRules(eight_bit=("mlp.gate", "mlp.shared_expert_gate")),
        rotary_dim=rotary_dim(config, sizes.head_dim, 0.25),
        fused_delta=True,
        zero_centred=True,
        ignored=(r"mtp\..*",),
    )


def shape(config: ModelConfig) -> ModelShape:
    """Sizes for planning; refuses what would change the maths."""
    return describe(config).shape


def tensor_map(config: ModelConfig) -> TensorMap:
    """Names and shapes of every tensor of the checkpoint."""
    return decoder.tensor_map(describe(config))


def build(config: ModelConfig, parts: Parts) -> Decoder:
    """The decoder over loaded weights."""
    return decoder.build(describe(config), parts)
