"""Rotary frequencies: plain ones, and those that YaRN stretches, as other libraries have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aegis.checkpoint.config import ModelConfig
from aegis.errors import CheckpointError
from aegis.models.rotary import Rotary, read_rotary, rotary_frequencies, score_scale

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "goldens" / "yarn.json").read_text()
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def config(**keys: Any) -> ModelConfig:
    return ModelConfig({"model_type": "m", "max_position_embeddings": 4096, **keys})


def read(**keys: Any) -> Rotary:
    return read_rotary(config(**keys), 64)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_frequencies_are_the_golden_ones(case: dict[str, Any], key: str) -> None:
    keys = {"rope_theta": case["rope_theta"], key: case["rope_scaling"]}
    if key == "rope_parameters":
        keys = {key: case["rope_scaling"] | {"rope_theta": case["rope_theta"]}}
    found = read_rotary(config(**keys), case["dim"])
    np.testing.assert_allclose(found.inv_freq, 1 / np.array(case["periods"]), rtol=2e-6)
    assert found.scale == pytest.approx(case["scale"])
    assert all(float(np.float32(f)) == f for f in found.inv_freq)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default"}},
    ],
)
def test_what_is_not_stretched_is_plain(keys: dict[str, Any]) -> None:
    assert read(rope_theta=1e6, **keys) == Rotary(rotary_frequencies(1e6, 64))


def test_frequencies_between_the_corrections_are_mixed() -> None:
    plain = np.array(rotary_frequencies(10000.0, 64))
    found = np.array(read(rope_scaling=YARN).inv_freq)
    share = (plain - found) / (plain - plain / 4)
    assert share[0] == 0
    assert share[-1] == pytest.approx(1)
    assert (np.diff(share) >= -1e-6).all()
    assert ((share > 0.01) & (share < 0.99)).sum() > 5


def test_corrections_need_not_be_whole_channels() -> None:
    """The fractional channels of 32 and of 1 rotation: 64 ln(1024 / (n 2 pi)) / (2 ln 10000)."""
    low, high = (64 * np.log(1024 / (n * 2 * np.pi)) / (2 * np.log(1e4)) for n in (32, 1))
    plain = np.array(rotary_frequencies(10000.0, 64))
    for truncate, ends in ((False, (low, high)), (True, (np.floor(low), np.ceil(high)))):
        ramp = np.clip((np.arange(32) - ends[0]) / (ends[1] - ends[0]), 0, 1)
        found = read(rope_scaling=YARN | {"truncate": truncate})
        np.testing.assert_allclose(found.inv_freq, plain / 4 * ramp + plain * (1 - ramp), rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "scale", "stretch"),
    [
        ({}, 0.1 * np.log(4) + 1, 1),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1, 0.0707 * np.log(4) + 1),
        ({"mscale": 2.0}, 0.1 * np.log(4) + 1, 1),
        ({"mscale_all_dim": 1.0}, 0.1 * np.log(4) + 1, 0.1 * np.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5, 1),
        ({"factor": 0.5}, 1, 1),
        ({"factor": None}, 0.1 * np.log(4) + 1, 1),
    ],
)
def test_scales_follow_from_the_factor(keys: dict[str, Any], scale: float, stretch: float) -> None:
    found = read(rope_scaling=YARN | keys)
    assert found.scale == pytest.approx(scale)
    assert found.stretch == pytest.approx(stretch)
    assert score_scale(found, 192) == pytest.approx(stretch**2 * 192**-0.5)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"rope_type": "llama3"}, "sets rope_type to 'llama3'"),
        ({"type": "linear", "factor": 2.0}, "sets rope_type to 'linear'"),
        (YARN | {"finetuned": True}, "sets finetuned beside yarn"),
        (YARN | {"factor": "x"}, "factor to 'x'"),
        ({"rope_type": "yarn", "factor": 2.0}, "lacks original_max_position_embeddings"),
        (YARN | {"beta_fast": 0}, "beta_fast"),
        (YARN | {"truncate": 1}, "truncate"),
    ],
)
def test_other_kinds_are_refused_by_name(section: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(rope_scaling=section)


def test_a_base_of_one_cannot_be_stretched() -> None:
    with pytest.raises(CheckpointError, match="rope_theta"):
        read(rope_scaling=YARN, rope_theta=1)
