"""A small model of the same layers: everything a kernel sees is as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import FAMILIES
from strategies import Choices, config_of
from synthetic_tools import layout_of

from aegis.checkpoint.layout import StoreLayout
from aegis.models import family
from aegis.predict.cut import cut_config, cut_sizes, kinds_of
from aegis.settings import MIB
from aegis.synthetic.recipe import recipe
from aegis.synthetic.shapes import SHAPES


def cut(whole: StoreLayout, folder: Path, budget_nbytes: int) -> StoreLayout:
    return layout_of(folder, cut_config(whole, cut_sizes(whole, budget_nbytes)))


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_every_family_keeps_each_kind_of_layer_and_every_size_of_one(
    model_type: str, groups: tuple[int, int], tmp_path: Path
) -> None:
    choices = Choices(
        model_type=model_type,
        num_hidden_layers=9,
        num_experts=24,
        num_experts_per_tok=5,
        dense_layers=(0, 1),
        full_attention_interval=4,
        n_group=groups[0],
        topk_group=groups[1],
        vocab_size=512,
    )
    whole = layout_of(tmp_path / "whole", config_of(choices, {}))
    small = cut(whole, tmp_path / "small", 1)
    before, after = (family(one.model_type).shape(one.config) for one in (whole, small))
    assert after.num_hidden_layers < before.num_hidden_layers
    assert before.num_experts_per_tok <= after.num_experts < before.num_experts
    assert set(kinds_of(after)) == set(kinds_of(before))
    assert small.experts == whole.experts
    for name in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"):
        assert getattr(after, name) == getattr(before, name)
    assert (after.latent, after.delta) == (before.latent, before.delta)
    matrices = {tensor.shape for tensor in whole.resident.values()}
    routers = {(before.num_experts, before.hidden_size): (after.num_experts, after.hidden_size)}
    kept = {tensor.shape for name, tensor in small.resident.items() if "mlp" not in name}
    assert kept <= matrices | set(routers.values())


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_for_a_large_shape_is_small(name: str, tmp_path: Path) -> None:
    whole = recipe(f"synthetic:{name}").layout("il16")
    small = cut(whole, tmp_path / "small", cut_budget := 256 * MIB)
    assert small.experts.stride == whole.experts.stride
    assert small.experts_nbytes() <= cut_budget
    assert 128 * MIB < small.nbytes() < 600 * MIB


def test_a_small_model_stays_whole(tmp_path: Path) -> None:
    choices = Choices(num_hidden_layers=7, num_experts=6)
    whole = layout_of(tmp_path / "whole", config_of(choices, {}))
    sizes = cut_sizes(whole)
    assert (sizes.layers, sizes.experts, sizes.words) == (7, 6, 512)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (3, 32), (4, 128)])
def test_experts_keep_their_bits(bits: int, group_size: int, tmp_path: Path) -> None:
    raw = SHAPES["olmoe-1b-7b"] | {"quantization": {"bits": bits, "group_size": group_size}}
    whole = layout_of(tmp_path / "whole", raw)
    assert cut(whole, tmp_path / "small", 1).experts == whole.experts


def test_layers_that_are_listed_one_by_one_are_cut_too(tmp_path: Path) -> None:
    raw = json.loads(json.dumps(SHAPES["qwen3-30b-a3b"]))
    raw["mlp_only_layers"] = [1, 40]
    raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    whole = layout_of(tmp_path / "whole", raw)
    config = cut_config(whole, sizes := cut_sizes(whole))
    assert config["mlp_only_layers"] == [1]
    assert len(config["layer_types"]) == sizes.layers == config["num_hidden_layers"] == 4
