"""Every family: its spellings, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from strategies import Choices, config_of, write_checkpoint

from aegis.checkpoint.config import ModelConfig
from aegis.convert.convert import convert
from aegis.errors import CheckpointError
from aegis.kernels.base import KVSpec
from aegis.models import family, supported
from aegis.models.layers import rotary_dim


def config(model_type: str, **changes: Any) -> ModelConfig:
    return ModelConfig(config_of(Choices(model_type=model_type), {}) | changes)


def expert_files(folder: Path, **choices: Any) -> list[bytes]:
    source = write_checkpoint(folder / "checkpoint", 3, **choices)
    return [path.read_bytes() for path in convert(source, folder / "store").expert_paths()]


def test_every_family_is_drawn_by_the_properties() -> None:
    assert sorted(FAMILIES) == supported()


def test_a_family_may_have_another_name() -> None:
    assert family("kimi_k2") is family("deepseek_v3")
    with pytest.raises(CheckpointError, match=r"aegis runs deepseek_v3, .*kimi_k2, .*"):
        family("kimi_k3")


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_separate_experts_give_the_files_of_stacked_ones(tmp_path: Path, model_type: str) -> None:
    stacked, separate = (
        expert_files(tmp_path / str(one), model_type=model_type, separate_experts=one)
        for one in (False, True)
    )
    assert stacked == separate


def test_mixtral_calls_the_matrices_of_an_expert_w1_w3_and_w2(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", model_type="mixtral", separate_experts=True)
    header = (folder / "model.safetensors").read_bytes()
    for word in (b"w1", b"w2", b"w3"):
        assert b"model.layers.1.block_sparse_moe.experts.5." + word + b".weight" in header


@pytest.mark.parametrize("dense", [False, True])
def test_fused_projections_give_the_files_of_stacked_ones(tmp_path: Path, dense: bool) -> None:
    stacked, fused = (
        expert_files(
            tmp_path / str(one),
            model_type="granitemoe",
            expert_bits=4,
            dense=dense,
            fused_experts=one,
        )
        for one in (False, True)
    )
    assert stacked == fused


REFUSED = {
    "hidden_act": "gelu",
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "clip_qkv": 8.0,
    "use_sliding_window": True,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "position_embedding_type": "nope",
    "shared_intermediate_size": 512,
}


HAS_DENSE_LAYERS = {"mlp_only_layers", "decoder_sparse_step"}
IMPLEMENTED = {
    "qwen2_moe": HAS_DENSE_LAYERS,
    "qwen3_moe": HAS_DENSE_LAYERS,
    "glm4_moe": {
        "attention_bias",
        "partial_rotary_factor",
        "routed_scaling_factor",
        "scoring_func",
    },
    "deepseek_v3": {"rope_scaling", "routed_scaling_factor", "scoring_func"},
}
REFUSALS = [
    (model_type, key)
    for model_type in sorted(FAMILIES)
    for key in sorted(REFUSED.keys() - IMPLEMENTED.get(model_type, set()))
]


@pytest.mark.parametrize(("model_type", "key"), REFUSALS)
def test_keys_that_change_the_maths_are_refused_by_name(model_type: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key}.*not\\s+implemented for {model_type}"):
        family(model_type).shape(config(model_type, **{key: REFUSED[key]}))


@pytest.mark.parametrize("model_type", ["granitemoe", "mixtral", "olmoe"])
def test_a_sliding_window_is_refused(model_type: str) -> None:
    with pytest.raises(CheckpointError, match="sliding_window"):
        family(model_type).shape(config(model_type, sliding_window=4096))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_a_window_that_is_switched_off_is_none(model_type: str) -> None:
    family(model_type).shape(config(model_type, sliding_window=4096, use_sliding_window=False))


MULTIPLIERS = ["embedding_multiplier", "residual_multiplier", "logits_scaling"]


@pytest.mark.parametrize("key", MULTIPLIERS)
@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"granitemoe"}))
def test_multipliers_are_refused_where_the_family_has_none(model_type: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        family(model_type).shape(config(model_type, **{key: 2.0}))


@pytest.mark.parametrize("key", [*MULTIPLIERS, "attention_multiplier"])
@pytest.mark.parametrize("value", [0, -1.0, 1e30, "12"])
def test_multipliers_outside_of_reason_are_refused(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"sets {key} to"):
        family("granitemoe").shape(config("granitemoe", **{key: value}))


@pytest.mark.parametrize(
    ("model_type", "keys", "moe_layers"),
    [
        ("qwen2_moe", {"mlp_only_layers": [0, 2]}, (1, 3)),
        ("qwen3_moe", {"decoder_sparse_step": 2}, (1, 3)),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ("glm4_moe", {"first_k_dense_replace": 3}, (3,)),
        ("deepseek_v3", {"first_k_dense_replace": 1}, (1, 2, 3)),
    ],
)
def test_layers_without_experts_are_those_that_the_config_names(
    model_type: str, keys: dict[str, Any], moe_layers: tuple[int, ...]
) -> None:
    found = config(model_type, num_hidden_layers=4, intermediate_size=320, **keys)
    shape = family(model_type).shape(found)
    assert shape.moe_layers == moe_layers
    assert shape.intermediate_size == 320
    wanted = family(model_type).tensor_map(found)
    assert wanted.experts.layers == moe_layers
    shapes = {entry.name: entry.shape for entry in wanted.resident}
    for layer in range(4):
        assert (f"layers.{layer}.mlp.gate" in shapes) == (layer in moe_layers)
        dense = shapes.get(f"layers.{layer}.mlp.up_proj")
        assert dense == (None if layer in moe_layers else (320, 128))


@pytest.mark.parametrize(
    ("model_type", "keys", "named"),
    [
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "no layer with experts"),
        ("qwen2_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("qwen2_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"decoder_sparse_step": 3}, "no layer with experts"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "no layer with experts"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ],
)
def test_layers_without_experts_that_make_no_sense_are_refused(
    model_type: str, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        family(model_type).shape(config(model_type, **keys))


SIGMOID = ["deepseek_v3", "glm4_moe"]


@pytest.mark.parametrize("model_type", SIGMOID)
@pytest.mark.parametrize(
    "keys",
    [
        {"n_group": 4},
        {"n_group": 6},
        {"n_group": 2, "topk_group": 3},
        {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3},
    ],
)
def test_groups_that_do_not_fit_the_experts_are_refused(
    model_type: str, keys: dict[str, int]
) -> None:
    with pytest.raises(CheckpointError, match="sets n_group to"):
        family(model_type).shape(config(model_type, **keys))


@pytest.mark.parametrize("model_type", SIGMOID)
@pytest.mark.parametrize("key", ["scoring_func", "topk_method"])
def test_other_rules_of_a_sigmoid_router_are_refused(model_type: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"sets {key} to 'softmax'"):
        family(model_type).shape(config(model_type, **{key: "softmax"}))


@pytest.mark.parametrize("model_type", SIGMOID)
def test_layers_that_predict_further_tokens_are_ignored(model_type: str) -> None:
    found = config(model_type, num_nextn_predict_layers=2)
    patterns = family(model_type).tensor_map(found).ignored
    names = {
        f"layers.{layer}.eh_proj.weight": any(
            re.fullmatch(p, f"layers.{layer}.eh_proj.weight") for p in patterns
        )
        for layer in range(5)
    }
    assert list(names.values()) == [False, False, True, True, False]


@pytest.mark.parametrize("value", [0.0, 1.5, 0.1])
def test_a_part_of_a_head_that_cannot_be_rotated_is_refused(value: float) -> None:
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        family("glm4_moe").shape(config("glm4_moe", partial_rotary_factor=value))


def test_the_rotated_part_may_stand_with_the_other_rotary_parameters() -> None:
    keys = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    found = config("glm4_moe", rope_parameters=keys)
    assert rotary_dim(found, 32, 0.5) == 8
    assert rotary_dim(config("glm4_moe"), 32, 1.0) == 16


def test_a_position_of_latent_attention_keeps_one_latent_and_one_key() -> None:
    found = config("deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=128)
    for spec in family("deepseek_v3").shape(found).kv_specs(4096):
        assert spec == KVSpec(1, 576, 4096, latent_dim=512)


def test_queries_of_latent_attention_may_come_without_a_low_rank() -> None:
    wanted = family("deepseek_v3").tensor_map(config("deepseek_v3", q_lora_rank=None))
    shapes = {entry.name: entry.shape for entry in wanted.resident}
    assert shapes["layers.0.self_attn.q_proj"] == (4 * (64 + 16), 128)
    assert not any("q_a" in name or "q_b" in name for name in shapes)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_interleave": False}, "rope_interleave to False; expected true"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim to 15"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"attention_bias": True}, "attention_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_latent_attention_of_another_kind_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        family("deepseek_v3").shape(config("deepseek_v3", **keys))
