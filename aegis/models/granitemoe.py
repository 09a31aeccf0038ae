"""GraniteMoE: multipliers on embedding, scores, residual stream and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.checkpoint.tensor_map import QuantizeRules
from aegis.models import decoder
from aegis.models.decoder import Description, MoeNames
from aegis.models.layers import refuse_unsupported, rope_theta

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.tensor_map import TensorMap
    from aegis.models.base import Decoder, ModelShape, Parts


_NAMES = MoeNames(
    gate="block_sparse_moe.router.layer",
    stacked="block_sparse_moe.switch_mlp.{part}",
    separate="block_sparse_moe.experts.{expert}.{part}",
    fused=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
)
_RULES = QuantizeRules(
    eight_bit=("self_attn.o_proj", "experts.down_proj", "mlp.gate", "lm_head"),
)
_MULTIPLIERS = {
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
}


def describe(config: ModelConfig) -> Description:
    """What sets the family apart. Its weights of experts are a softmax over the chosen logits."""
    refuse_unsupported(config, handled=_MULTIPLIERS)
    return Description(
        decoder.read_shape(config, config.int("intermediate_size")),
        rms_norm_eps=config.float("rms_norm_eps"),
        rope_theta=rope_theta(config),
        norm_topk_prob=True,
        attention_scale=config.float("attention_multiplier", 1.0),
        embedding_multiplier=config.float("embedding_multiplier", 1.0),
        residual_multiplier=config.float("residual_multiplier", 1.0),
        logits_scaling=config.float("logits_scaling", 1.0),
        names=_NAMES,
        quantize=_RULES,
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
