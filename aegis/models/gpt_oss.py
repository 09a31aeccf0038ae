"""gpt-oss: windows in every other layer, sinks, biases everywhere, experts in mxfp4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.checkpoint.tensor_map import QuantizeRules
from aegis.errors import CheckpointError
from aegis.kernels.base import SwigluClamp
from aegis.models import decoder
from aegis.models.decoder import Description, MoeNames
from aegis.models.layers import refuse_unsupported
from aegis.models.rotary import Rotary, read_rotary

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.tensor_map import TensorMap
    from aegis.models.base import Decoder, ModelShape, Parts

_HANDLED = {
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "attention_bias",
    "swiglu_limit",
    "swiglu_alpha",
}
_NAMES = MoeNames(
    gate="mlp.router",
    stacked="mlp.experts.{part}",
    fused=None,
    blocks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def describe(config: ModelConfig) -> Description:
    """What sets the family apart."""
    refuse_unsupported(config, handled=_HANDLED)
    sizes = decoder.read_shape(config, config.int("intermediate_size"))
    bias = config.bool("attention_bias", True)
    return Description(
        sizes,
        rms_norm_eps=config.float("rms_norm_eps"),
        norm_topk_prob=True,
        rotary=_rotary(config, sizes.head_dim),
        windows=_windows(config),
        sinks=True,
        qkv_bias=bias,
        o_bias=bias,
        moe_bias=True,
        clamp=SwigluClamp(config.float("swiglu_limit", 7.0), config.float("swiglu_alpha", 1.702)),
        names=_NAMES,
        quantize=QuantizeRules(eight_bit=("mlp.gate",)),
    )


def _rotary(config: ModelConfig, head_dim: int) -> Rotary:
    if config.section("rope_parameters") is None and config.section("rope_scaling") is None:
        raise CheckpointError(
            f"{config.where} lacks rope_scaling, without which libraries disagree about positions;"
            " use a complete config.json"
        )
    return read_rotary(config, head_dim, default_theta=150000.0)


def _windows(config: ModelConfig) -> tuple[int | None, ...]:
    """How many positions each layer's attention sees; None: all."""
    layers, kinds = config.int("num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        kinds = [_FULL if layer % 2 else _WINDOWED for layer in range(layers)]
    known = isinstance(kinds, list) and all(kind in (_WINDOWED, _FULL) for kind in kinds)
    if not known or len(kinds) != layers:
        expected = f"{layers} times {_WINDOWED} or {_FULL}"
        raise config.mistyped("layer_types", kinds, expected)
    width = config.int("sliding_window") if _WINDOWED in kinds else None
    return tuple(width if kind == _WINDOWED else None for kind in kinds)


def shape(config: ModelConfig) -> ModelShape:
    """Sizes for planning; refuses what would change the maths."""
    return describe(config).shape


def tensor_map(config: ModelConfig) -> TensorMap:
    """Names and shapes of every tensor of the checkpoint."""
    return decoder.tensor_map(describe(config))


def build(config: ModelConfig, parts: Parts) -> Decoder:
    """The decoder over loaded weights."""
    return decoder.build(describe(config), parts)
