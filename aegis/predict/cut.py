"""A small model that costs per layer what a large one costs: fewer layers, experts and words.

Every size that a layer's kernels see stays as it is. What is left has every kind of layer that the
model has, and experts enough that those of a token come from memory and not from caches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aegis.models import family
from aegis.settings import MIB

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.checkpoint.layout import StoreLayout
    from aegis.models.base import ModelShape
    from aegis.models.decoder import Description

EXPERTS_NBYTES = 256 * MIB
"""What the experts of the small model take, as far as there are enough: more than caches hold."""
MOST_WORDS = 65536
"""Tokens of its vocabulary at most."""
_LEAST_LAYERS = 4
_TABLES = {"embed_tokens", "lm_head"}
_OF_NUMBERS = ("quantization", "quantization_config", "compression_config")
"""What says how the model's own numbers are kept."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


Kind = tuple[bool, bool]
"""Whether a layer has a recurrent state in place of keys and values, and whether it has experts."""


@dataclass(frozen=True)
class Sizes:
    """What is left of a model."""

    layers: int
    experts: int
    words: int


def kinds_of(shape: ModelShape) -> list[Kind]:
    """Of every layer."""
    delta, moe = set(shape.delta_layers), set(shape.moe_layers)
    return [(layer in delta, layer in moe) for layer in range(shape.num_hidden_layers)]


def cut_sizes(layout: StoreLayout, budget_nbytes: int = EXPERTS_NBYTES) -> Sizes:
    """How many layers, experts and words are left.

    Layers are the first ones, as many as have one of every kind; all of them where the model is
    small anyway."""
    model = family(layout.model_type).describe(layout.config)
    shape, stride = model.shape, layout.experts.stride
    kinds = kinds_of(shape)[_surplus_dense(layout.config) :]
    layers = max(_LEAST_LAYERS, 1 + max(kinds.index(kind) for kind in set(kinds)))
    layers = min(layers, len(kinds))
    moe = sum(has_experts for _, has_experts in kinds[:layers])
    experts = min(shape.num_experts, budget_nbytes // (moe * stride))
    experts = max(experts, _fewest_experts(model))
    each = layout.resident_nbytes(_TABLES) // len(kinds) + moe * experts * stride // layers
    if experts >= shape.num_experts:
        whole = budget_nbytes // each // layers * layers
        layers = max(layers, min(len(kinds), whole))
    return Sizes(layers, min(experts, shape.num_experts), min(shape.vocab_size, MOST_WORDS))


def _surplus_dense(config: ModelConfig) -> int:
    """Layers without experts at the beginning, but for one."""
    return max(0, config.int("first_k_dense_replace", 0) - 1)


def _fewest_experts(model: Description) -> int:
    """As many as a token chooses, in groups as the router wants them."""
    groups, chosen = model.n_group, model.shape.num_experts_per_tok
    each = max(1 if groups == 1 else 2, -(-chosen // model.topk_group))
    return groups * each if groups > 1 else chosen


def cut_config(layout: StoreLayout, sizes: Sizes) -> dict[str, Any]:
    """config.json of the small model, quantised as the model's experts are (or to 4 bits, where
    random weights cannot be of that kind)."""
    config = layout.config
    raw: dict[str, Any] = json.loads(json.dumps(config.raw))
    nested = raw.get("text_config")
    sections = [raw, nested] if isinstance(nested, dict) else [raw]
    changed = {
        "num_hidden_layers": sizes.layers,
        "vocab_size": sizes.words,
        "num_nextn_predict_layers": 0,
        **dict.fromkeys(_EXPERTS, sizes.experts),
    }
    surplus = _surplus_dense(config)
    if surplus:
        changed["first_k_dense_replace"] = 1
    for section in sections:
        section |= {key: value for key, value in changed.items() if key in section}
        for key in ("layer_types", "mlp_only_layers"):
            if isinstance(section.get(key), list):
                section[key] = _cut_list(key, section[key], sizes.layers, surplus)
        for key in _OF_NUMBERS:
            section.pop(key, None)
    raw["quantization"] = _quantization(layout)
    return raw


def _cut_list(key: str, value: list[Any], layers: int, surplus: int) -> list[Any]:
    if key == "layer_types":
        return value[surplus:][:layers]
    return [layer - surplus for layer in value if surplus <= layer < surplus + layers]


def _quantization(layout: StoreLayout) -> dict[str, int]:
    found = layout.experts.segments["gate_proj"].format
    if found.kind != "affine" or found.group_size not in (32, 64, 128):
        return {"bits": 4, "group_size": 64}
    return {"bits": found.bits, "group_size": found.group_size}
