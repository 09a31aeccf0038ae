"""Gated DeltaNet layers, as far as families share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aegis.checkpoint.plainfile import shown
from aegis.checkpoint.tensor_map import ResidentName
from aegis.errors import CheckpointError
from aegis.kernels.base import DeltaSpec
from aegis.models.base import submodule

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.kernels.base import Weight

HANDLED = {
    "linear_num_value_heads",
    "layer_types",
    "partial_rotary_factor",
    "attn_output_gate",
    "norm_topk_prob",
}
"""Keys that a family with such layers implements."""

_MODULE = "linear_attn."
_LINEAR, _FULL = "linear_attention", "full_attention"


def delta_spec(config: ModelConfig) -> DeltaSpec:
    """Sizes of the layers.

    Raises:
        CheckpointError: a size is missing, mistyped or contradicts another.
    """
    spec = DeltaSpec(
        hidden_size=config.int("hidden_size"),
        num_key_heads=config.int("linear_num_key_heads"),
        num_value_heads=config.int("linear_num_value_heads"),
        key_head_dim=config.int("linear_key_head_dim"),
        value_head_dim=config.int("linear_value_head_dim"),
        conv_kernel_dim=config.int("linear_conv_kernel_dim"),
        rms_norm_eps=config.float("rms_norm_eps"),
    )
    if spec.num_value_heads % spec.num_key_heads:
        raise CheckpointError(
            f"{config.where} has {spec.num_value_heads} linear value heads for"
            f" {spec.num_key_heads} linear key heads; expected a multiple"
        )
    return spec


def delta_layers(config: ModelConfig) -> tuple[int, ...]:
    """Which layers have Gated DeltaNet in place of attention.

    Raises:
        CheckpointError: a layer is said to be of some other kind.
    """
    count = config.int("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.int("full_attention_interval", 4)
        return tuple(layer for layer in range(count) if (layer + 1) % interval)
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {_LINEAR, _FULL}:
        raise CheckpointError(
            f"{config.where} sets layer_types to {shown(kinds)}; expected {_LINEAR} or {_FULL} for"
            f" each of the {count} layers"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)


def delta_names(spec: DeltaSpec, fused: bool) -> dict[str, ResidentName]:
    """A layer's tensors, by name without the layer's prefix.

    fused: a checkpoint has q, k, v and z in one tensor, and b and a, each key head's together.
    """
    hidden, heads = spec.hidden_size, spec.num_value_heads
    rows = {"qkv": spec.conv_dim, "z": spec.value_dim, "b": heads, "a": heads}
    names = {
        f"in_proj_{part}": ResidentName(f"{_MODULE}in_proj_{part}", (count, hidden))
        for part, count in rows.items()
    }
    if fused:
        names = _unfused(spec, names)
    for name, size in (("dt_bias", heads), ("A_log", heads), ("norm", spec.value_head_dim)):
        names[name] = ResidentName(_MODULE + name, (size,))
    taps = spec.conv_kernel_dim
    names["conv1d"] = ResidentName(_MODULE + "conv1d", (taps * spec.conv_dim,), taps=taps)
    names["out_proj"] = ResidentName(_MODULE + "out_proj", (hidden, spec.value_dim))
    return {entry.name: entry for entry in names.values()}


def _unfused(spec: DeltaSpec, names: Mapping[str, ResidentName]) -> dict[str, ResidentName]:
    """Where in the two fused tensors the rows lie: for every key head its q, its k, the v of its
    value heads, their z; and their b, their a."""
    shared = spec.num_value_heads // spec.num_key_heads
    key, value = spec.key_head_dim, shared * spec.value_head_dim
    width = 2 * (key + value)
    places = {
        "in_proj_qkv": ("in_proj_qkvz", width, ((0, key), (key, key), (2 * key, value))),
        "in_proj_z": ("in_proj_qkvz", width, ((2 * key + value, value),)),
        "in_proj_b": ("in_proj_ba", 2 * shared, ((0, shared),)),
        "in_proj_a": ("in_proj_ba", 2 * shared, ((shared, shared),)),
    }
    found = {}
    for name, (source, stride, parts) in places.items():
        rows = tuple(
            (head * stride + first, head * stride + first + count)
            for first, count in parts
            for head in range(spec.num_key_heads)
        )
        found[name] = ResidentName(
            names[name].name,
            names[name].shape,
            _MODULE + source,
            rows=rows,
            source_rows=spec.num_key_heads * stride,
        )
    return found


def delta_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """A layer's weights as a backend calls them."""
    names = {"norm": "input_layernorm", "conv": _MODULE + "conv1d", "out_norm": _MODULE + "norm"}
    own = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "A_log", "dt_bias")
    names |= {name: _MODULE + name for name in own}
    return submodule(weights, f"layers.{layer}.", names)
