"""config.json: typed, named in errors, in every spelling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from aegis.checkpoint.config import ModelConfig, QuantSpec, load_config
from aegis.checkpoint.vocabulary import tokenizer_nbytes
from aegis.errors import CheckpointError, TokenizerError


def config(**keys: Any) -> ModelConfig:
    return ModelConfig({"model_type": "qwen2_moe", **keys})


def test_values_come_with_their_type() -> None:
    c = config(hidden_size=64, rms_norm_eps=1e-6, rope_theta=10000, tied=True, act="silu")
    assert c.int("hidden_size") == 64
    assert c.float("rms_norm_eps") == 1e-6
    assert c.float("rope_theta") == 10000.0
    assert c.bool("tied") is True
    assert c.str("act") == "silu"


def test_a_missing_key_is_named_unless_there_is_a_default() -> None:
    with pytest.raises(CheckpointError, match="lacks hidden_size"):
        config().int("hidden_size")
    with pytest.raises(CheckpointError, match="lacks head_dim"):
        config(head_dim=None).int("head_dim")
    assert config(head_dim=None).int("head_dim", 32) == 32


@pytest.mark.parametrize("value", ["64", 64.0, True, [64]])
def test_a_mistyped_key_is_named_with_its_value(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"sets hidden_size to .*expected a whole number"):
        config(hidden_size=value).int("hidden_size")


def test_other_mistyped_values_are_refused() -> None:
    with pytest.raises(CheckpointError, match="expected a number"):
        config(eps=True).float("eps")
    with pytest.raises(CheckpointError, match="expected true or false"):
        config(tied=1).bool("tied")
    with pytest.raises(CheckpointError, match="expected a string"):
        config(act=1).str("act")


def test_a_nested_text_config_takes_precedence() -> None:
    c = config(
        text_config={"hidden_size": 128, "model_type": "qwen2_moe_text"}, hidden_size=1, eps=2
    )
    assert (c.int("hidden_size"), c.int("eps"), c.model_type) == (128, 2, "qwen2_moe")


def test_other_spellings_are_normalised() -> None:
    assert config(num_local_experts=8).int("num_experts") == 8
    assert config(n_routed_experts=8).int("num_experts") == 8


def test_a_config_without_model_type_is_refused() -> None:
    with pytest.raises(CheckpointError, match="lacks model_type"):
        ModelConfig({})
    with pytest.raises(CheckpointError, match="model_type to 7; expected a string"):
        ModelConfig({"model_type": 7})


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_quantisation_has_a_default_and_exceptions(key: str) -> None:
    entry = {"group_size": 64, "bits": 4, "mode": "affine"}
    entry |= {"a.gate": {"group_size": 64, "bits": 8}, "a.b": False, "a.c": {"bits": 3}}
    quantization = config(**{key: entry}).quantization
    assert quantization is not None
    assert quantization.of("a.q_proj") == QuantSpec(4, 64)
    assert quantization.of("a.gate") == QuantSpec(8, 64)
    assert quantization.of("a.c") == QuantSpec(3, 64)
    assert quantization.of("a.b") is None


def test_an_entry_without_a_mode_is_affine_whatever_the_default() -> None:
    entries = {"a": {"bits": 8, "group_size": 64}, "b": {"mode": "mxfp4"}}
    found = config(quantization={"mode": "mxfp4", "bits": 4, "group_size": 32, **entries})
    assert found.quantization is not None
    assert found.quantization.of("a") == QuantSpec(8, 64)
    assert found.quantization.of("b") == found.quantization.of("c") == QuantSpec(4, 32, "mxfp4")


def test_what_a_publisher_says_of_mxfp4_is_read() -> None:
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
    found = config(quantization_config=entry).quantization
    assert found is not None
    assert found.default == QuantSpec(4, 32, "mxfp4")


def test_no_entry_means_unquantised() -> None:
    assert config().quantization is None
    assert config().fp8 is None


def test_fp8_is_no_affine_quantisation_and_names_what_is_plain() -> None:
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert config(quantization_config=entry).quantization is None
    assert config(quantization_config=entry).fp8 == frozenset()
    named = config(quantization_config=entry | {"ignored_layers": ["a.b"]})
    assert named.fp8 == {"a.b"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "mxfp8"}, "'mxfp8'"),
        ({"mode": "mxfp8", "bits": 8, "group_size": 32}, "'mxfp8'"),
        ({"bits": 4}, "group_size"),
        ({"bits": "4", "group_size": 64}, "bits"),
        ({"bits": 4, "group_size": 64, "m": {"mode": "nvfp4", "bits": 4}}, "'nvfp4'"),
        ("4bit", "expected an object"),
        ({"bits": 0, "group_size": 64}, "bits to 0; expected a whole number from 1 to 32"),
        ({"bits": 4, "group_size": 64, "zero_point": True, "kind": "x"}, "kind to 'x'"),
        ({"bits": 4, "group_size": 64, "a.b": 8}, r"a\.b to 8, which aegis does not know"),
    ],
)
def test_quantisation_that_cannot_be_read_is_refused(entry: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        assert config(quantization=entry).quantization


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"a": ' * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("hidden_size", 10**12),
        ("num_hidden_layers", 1025),
        ("num_experts", 10**400),
        ("shared_expert_intermediate_size", -1),
        ("max_position_embeddings", 2**31),
        ("unheard_of", 10**30),
    ],
)
def test_a_whole_number_out_of_range_is_named_with_the_range(key: str, value: int) -> None:
    with pytest.raises(CheckpointError, match=rf"sets {key} to .*expected a whole number from"):
        config(**{key: value}).int(key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 10**400),
        ("rope_theta", 0),
        ("rope_theta", float("inf")),
        ("unheard_of", float("inf")),
        ("unheard_of", -(10**400)),
    ],
)
def test_a_number_that_is_not_finite_or_out_of_range_is_refused(key: str, value: float) -> None:
    with pytest.raises(CheckpointError, match=rf"sets {key} to .*expected a number"):
        config(**{key: value}).float(key)


def test_a_section_has_the_same_access_and_names_itself() -> None:
    c = config(rope_parameters={"rope_theta": 1e6, "factor": "x"}, other=[1])
    section = c.section("rope_parameters")
    assert section is not None
    assert section.float("rope_theta") == 1e6
    with pytest.raises(
        CheckpointError, match=r"config\.json in rope_parameters sets factor to 'x'"
    ):
        section.float("factor")
    assert c.section("nothing") is None
    with pytest.raises(CheckpointError, match="expected an object"):
        c.section("other")


def test_an_entry_that_is_true_means_the_default() -> None:
    quantization = config(quantization={"bits": 4, "group_size": 64, "a.b": True}).quantization
    assert quantization is not None
    assert quantization.of("a.b") == QuantSpec(4, 64)


@pytest.mark.parametrize("size", [None, -1, 257 << 20])
def test_a_tokenizer_that_cannot_be_one_is_refused_by_its_size(
    tmp_path: Path, size: int | None
) -> None:
    path = tmp_path / "tokenizer.json"
    words = "is missing"
    if size == -1:
        path.mkdir()
        words = "is a directory"
    elif size is not None:
        path.touch()
        os.truncate(path, size)
        words = "is implausibly large"
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json {words}"):
        tokenizer_nbytes(tmp_path)
