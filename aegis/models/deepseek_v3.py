"""DeepSeek-V3: latent attention, a grouped sigmoid router with corrections, dense layers first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.models import decoder
from aegis.models.decoder import Description
from aegis.models.latent import read_latent_attention
from aegis.models.layers import refuse_unsupported

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.tensor_map import TensorMap
    from aegis.models.base import Decoder, ModelShape, Parts

_HANDLED = {
    "rope_scaling",
    "rope_interleave",
    "kv_lora_rank",
    "q_lora_rank",
    "first_k_dense_replace",
    *decoder.SIGMOID_ROUTER,
}


def describe(config: ModelConfig) -> Description:
    """What sets the family apart. A position keeps one latent for all heads."""
    refuse_unsupported(config, handled=_HANDLED)
    width, attention = config.int("moe_intermediate_size"), read_latent_attention(config)
    shared = width * config.int("n_shared_experts", 0)
    model = Description(
        decoder.read_shape(config, width, shared, attention.sizes),
        rms_norm_eps=attention.rms_norm_eps,
        norm_topk_prob=config.bool("norm_topk_prob", True),
        latent=attention,
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
