"""Qwen3-MoE: heads of a given size, each normed before the rotation; no shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.checkpoint.tensor_map import QuantizeRules
from aegis.models import decoder
from aegis.models.decoder import Description
from aegis.models.layers import refuse_unsupported, rope_theta

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.tensor_map import TensorMap
    from aegis.models.base import Decoder, ModelShape, Parts


# A window counts only where use_sliding_window says so, which is refused.
_HANDLED = {"norm_topk_prob", "sliding_window", "mlp_only_layers", "decoder_sparse_step"}


def describe(config: ModelConfig) -> Description:
    """What sets the family apart."""
    refuse_unsupported(config, handled=_HANDLED)
    return Description(
        decoder.read_shape(config, config.int("moe_intermediate_size")),
        rms_norm_eps=config.float("rms_norm_eps"),
        rope_theta=rope_theta(config),
        norm_topk_prob=config.bool("norm_topk_prob", False),
        qk_norm="head",
        quantize=QuantizeRules(eight_bit=("mlp.gate",)),
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
