"""GLM-4-MoE: half of each head rotated, a sigmoid router with corrections, dense layers first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.models import decoder
from aegis.models.decoder import Description
from aegis.models.layers import refuse_unsupported, rope_theta, rotary_dim

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.tensor_map import TensorMap
    from aegis.models.base import Decoder, ModelShape, Parts

_HANDLED = {
    "attention_bias",
    "partial_rotary_factor",
    "use_qk_norm",
    "first_k_dense_replace",
    *decoder.SIGMOID_ROUTER,
}


def describe(config: ModelConfig) -> Description:
    """What sets the family apart."""
    refuse_unsupported(config, handled=_HANDLED)
    width = config.int("moe_intermediate_size")
    sizes = decoder.read_shape(config, width, width * config.int("n_shared_experts", 0))
    model = Description(
        sizes,
        rms_norm_eps=config.float("rms_norm_eps"),
        rope_theta=rope_theta(config),
        norm_topk_prob=config.bool("norm_topk_prob", True),
        rotary_dim=rotary_dim(config, sizes.head_dim, 0.5),
        qkv_bias=config.bool("attention_bias", False),
        qk_norm="head" if config.bool("use_qk_norm", False) else "none",
    )
    return decoder.with_sigmoid_router(model, config)


def shape(config: ModelConfig) -> ModelShape:
    """Sizes for planning; refuses what would change the maths."""
    return describe(config).shape


def tensor_map(config: ModelConfig) -> TensorMap:
    """Names and shapes of every tensor of the checkpoint."""
    return decoder.tensor_map(describe(config))


def build(config: ModelConfig, parts: Parts) -> Decoder:
    """The decoder over loaded weights."""
    return decoder.build(describe(config), parts)
