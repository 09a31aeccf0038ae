"""Every family: its spellings, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES
from stores import raw_tensors, resident_values, rewrite
from strategies import Choices, config_of, write_checkpoint

from aegis.checkpoint.config import ModelConfig
from aegis.convert.convert import convert
from aegis.errors import CheckpointError
from aegis.kernels.base import Format, KVSpec, Layout
from aegis.kernels.formats import MlxArrays, dequantize_mlx
from aegis.models import family, gpt_oss, supported
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
    "swiglu_limit": 7.0,
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
    "gpt_oss": {"attention_bias", "rope_scaling", "swiglu_limit"},
    "qwen3_5_moe": {"partial_rotary_factor"},
    "qwen3_next": {"partial_rotary_factor", *HAS_DENSE_LAYERS},
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
    assert family("deepseek_v3").shape(found).kv_spec(4096) == KVSpec(1, 576, 4096, latent_dim=512)


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


DELTA = ["qwen3_5_moe", "qwen3_next"]


@pytest.mark.parametrize("model_type", DELTA)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["linear_attention"]),
        ("layer_types", ["linear_attention", "sliding_attention"]),
        ("layer_types", "full_attention"),
        ("linear_num_value_heads", 3),
        ("linear_num_value_heads", None),
        ("linear_conv_kernel_dim", 0),
        ("linear_key_head_dim", "32"),
        ("partial_rotary_factor", 2),
        ("partial_rotary_factor", 0.05),
        ("full_attention_interval", 0),
        ("attn_output_gate", False),
    ],
)
def test_layers_that_cannot_be_are_refused_by_name(model_type: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key.removeprefix("linear_num_").split("_")[0]):
        family(model_type).shape(config(model_type, **{key: value}))


@pytest.mark.parametrize("model_type", DELTA)
def test_layers_are_of_the_kinds_that_the_config_names(model_type: str) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    three = config(model_type, num_hidden_layers=3)
    assert family(model_type).shape(three).delta_layers == (0, 2), "every other one is of the tests"
    named = config(model_type, num_hidden_layers=3, layer_types=kinds)
    assert family(model_type).shape(named).delta_layers == (1, 2)
    usual = config(model_type, num_hidden_layers=8, full_attention_interval=None)
    assert family(model_type).shape(usual).delta_layers == (0, 1, 2, 4, 5, 6)


@pytest.mark.parametrize("layout", ["il16", "row"])
@pytest.mark.parametrize("dense", [False, True])
def test_fused_projections_of_linear_attention_are_taken_apart(
    tmp_path: Path, dense: bool, layout: Layout
) -> None:
    """Also where a piece of what is written comes from several places of what is read."""
    choices = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16}
    source = write_checkpoint(
        tmp_path / "m",
        7,
        model_type="qwen3_next",
        num_hidden_layers=1,
        dense=dense,
        **choices,
    )
    made = convert(source, tmp_path / "s", layout=layout, piece_nbytes=1 << 13)
    store = resident_values(made)
    fused = {
        name: fused_values(source, f"linear_attn.{name}") for name in ("in_proj_qkvz", "in_proj_ba")
    }
    heads = fused["in_proj_qkvz"].reshape(2, -1, 128)
    q, k, v, z = np.split(heads, [16, 32, 32 + 3 * 32], axis=1)
    qkv = np.concatenate([part.reshape(-1, 128) for part in (q, k, v)])
    b, a = np.split(fused["in_proj_ba"].reshape(2, -1, 128), 2, axis=1)
    expected = {
        "qkv": qkv,
        "z": z.reshape(-1, 128),
        "b": b.reshape(-1, 128),
        "a": a.reshape(-1, 128),
    }
    for name, values in expected.items():
        assert np.array_equal(store[f"layers.0.linear_attn.in_proj_{name}"], values), name


def fused_values(source: Path, name: str) -> Any:
    """A matrix of the checkpoint as float32."""
    parts = [
        raw_tensors(source).get(f"model.layers.0.{name}.{suffix}")
        for suffix in ("weight", "scales", "biases")
    ]
    arrays = MlxArrays(*(None if part is None else part[1] for part in parts))
    fmt = Format("dense", "bf16") if parts[1] is None else Format("affine", "bf16", 4, 64)
    return dequantize_mlx(arrays, fmt)


def test_what_other_modalities_need_is_left_out_by_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", model_type="qwen3_5_moe", num_hidden_layers=1)
    tensors = raw_tensors(source)
    extra = ("BF16", np.zeros((2, 2), np.uint16))
    known = ["visual.blocks.0.attn.qkv.weight", "model.visual.pos_embed.weight", "mtp.fc.weight"]
    convert(rewrite(source, tmp_path / "k", tensors | dict.fromkeys(known, extra)), tmp_path / "s")
    other = rewrite(source, tmp_path / "o", tensors | {"model.audio.fc.weight": extra})
    with pytest.raises(CheckpointError, match="audio"):
        convert(other, tmp_path / "t")


def test_a_convolution_of_another_shape_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", model_type="qwen3_next", num_hidden_layers=1)
    tensors = raw_tensors(source)
    name = "model.layers.0.linear_attn.conv1d.weight"
    dtype, raw = tensors[name]
    tensors[name] = (dtype, raw[:, :2])
    with pytest.raises(CheckpointError, match=r"conv1d\.weight has the shape \[256, 2, 1\]"):
        convert(rewrite(source, tmp_path / "o", tensors), tmp_path / "s")


def without(key: str) -> ModelConfig:
    raw = config_of(Choices(model_type="gpt_oss", num_hidden_layers=3), {})
    return ModelConfig({name: value for name, value in raw.items() if name != key})


def test_every_other_layer_has_a_window_where_the_config_does_not_say() -> None:
    assert gpt_oss.describe(without("layer_types")).windows == (16, None, 16)


@pytest.mark.parametrize("key", ["rope_scaling", "sliding_window"])
def test_what_gpt_oss_needs_and_has_no_default_is_asked_for(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"lacks {key}"):
        family("gpt_oss").shape(without(key))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("layer_types", ["full_attention"], "2 times sliding_attention or full_attention"),
        ("layer_types", ["full_attention", "linear_attention"], "sets layer_types to"),
        ("layer_types", "full_attention", "sets layer_types to"),
        ("layer_types", [["full_attention"], {}], "sets layer_types to"),
        ("sliding_window", 0, "sets sliding_window to 0"),
        ("swiglu_limit", -7.0, "sets swiglu_limit to"),
        ("swiglu_alpha", "1.7", "sets swiglu_alpha to"),
        ("attention_bias", 1, "sets attention_bias to"),
        ("rope_scaling", {"rope_type": "longrope"}, "longrope.*not implemented for gpt_oss"),
        ("num_experts_per_tok", 9, "only 6 experts"),
    ],
)
def test_a_gpt_oss_config_that_cannot_be_is_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("gpt_oss").shape(config("gpt_oss", **{key: value}))


def test_the_rotary_base_of_gpt_oss_is_its_own_where_the_config_does_not_say() -> None:
    found, other = gpt_oss.describe(without("rope_theta")), gpt_oss.describe(config("gpt_oss"))
    given = gpt_oss.describe(config("gpt_oss", rope_theta=150000.0))
    assert found.rotary == given.rotary != other.rotary


def test_a_full_layer_needs_no_window() -> None:
    full = ["full_attention", "full_attention"]
    found = gpt_oss.describe(config("gpt_oss", layer_types=full, sliding_window=None))
    assert found.windows == (None, None)
