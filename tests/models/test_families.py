"""Every family: its spellings, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from strategies import Choices, config_of, write_checkpoint

from aegis.checkpoint.config import ModelConfig
from aegis.convert.convert import convert
from aegis.errors import CheckpointError
from aegis.models import family, supported


def config(model_type: str, **changes: Any) -> ModelConfig:
    return ModelConfig(config_of(Choices(model_type=model_type), {}) | changes)


def expert_files(folder: Path, **choices: Any) -> list[bytes]:
    source = write_checkpoint(folder / "checkpoint", 3, **choices)
    return [path.read_bytes() for path in convert(source, folder / "store").expert_paths()]


def test_every_family_is_drawn_by_the_properties() -> None:
    assert sorted(FAMILIES) == supported()


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


PARTIAL_ROTARY = {"qwen3_5_moe", "qwen3_next"}


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_keys_that_change_the_maths_are_refused_by_name(model_type: str, key: str) -> None:
    if key == "partial_rotary_factor" and model_type in PARTIAL_ROTARY:
        return
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
