"""Mixtral: few large experts, mixed by a softmax over the chosen logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.models import decoder
from aegis.models.decoder import Description, MoeNames
from aegis.models.layers import refuse_unsupported, rope_theta

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.tensor_map import TensorMap
    from aegis.models.base import Decoder, ModelShape, Parts


_NAMES = MoeNames(
    gate="block_sparse_moe.gate",
    stacked="block_sparse_moe.switch_mlp.{part}",
    separate="block_sparse_moe.experts.{expert}.{part}",
    separate_parts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)


def describe(config: ModelConfig) -> Description:
    """What sets the family apart."""
    refuse_unsupported(config, handled=set())
    return Description(
        decoder.read_shape(config, config.int("intermediate_size")),
        rms_norm_eps=config.float("rms_norm_eps"),
        rope_theta=rope_theta(config, default=1e6),
        norm_topk_prob=True,
        names=_NAMES,
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
