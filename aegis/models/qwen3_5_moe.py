"""Qwen3.5-MoE (and 3.6): as Qwen3-Next, in the text part of a vision-language checkpoint.

For text all three positions of its rotary embedding are equal, which makes it a plain one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aegis.models import decoder, qwen3_next
from aegis.models.delta import HANDLED
from aegis.models.layers import refuse_unsupported

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.tensor_map import TensorMap
    from aegis.models.base import Decoder, ModelShape, Parts
    from aegis.models.decoder import Description


def describe(config: ModelConfig) -> Description:
    """What sets the family apart: names, and weights of experts that always add up to 1."""
    refuse_unsupported(config, handled=HANDLED)
    model = qwen3_next.describe(config)
    return replace(
        model,
        norm_topk_prob=True,
        fused_delta=False,
        prefixes=("model.", "language_model.", "model."),
        ignored=(r"mtp\..*",),
        vision=(r"visual\..*", r"vision_tower\..*"),
        quantize=replace(model.quantize, own_type=("A_log",)),
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
