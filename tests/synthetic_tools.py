"""Shapes of synthetic models that are written in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strategies import Choices, config_of

from aegis.checkpoint.layout import StoreLayout
from aegis.synthetic.recipe import recipe

SMALL: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 32,
        "hidden_size": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 8,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "shared_expert_intermediate_size": 64,
        "vocab_size": 2048,
    },
}
"""Like the 35B shape, but for its sizes."""


def write_shape(folder: Path, config: dict[str, Any] | None = None) -> str:
    """The name of a synthetic model whose config.json is written to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config or SMALL))
    return f"synthetic:{path}"


def shape_of(folder: Path, choices: Choices) -> str:
    """The same for the sizes of a drawn model."""
    return write_shape(folder, config_of(choices, {}))


def layout_of(folder: Path, config: dict[str, Any]) -> StoreLayout:
    """Sizes of the store that a shape would have."""
    return recipe(write_shape(folder, config)).layout("il16")
