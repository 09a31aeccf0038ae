"""Every tensor is used or ignorable; anything else is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damages import rewritten, without
from stores import (
    check_same_store,
    checkpoint_values,
    edit_header,
    edit_json,
    raw_tensors,
    rewrite,
)
from strategies import write_checkpoint, write_safetensors

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.tensor_map import ResidentName
from aegis.convert.convert import convert
from aegis.convert.layout import layout_of_checkpoint
from aegis.convert.names import resolve
from aegis.convert.source_data import Streams
from aegis.errors import CheckpointError
from aegis.kernels.base import Format, Layout
from aegis.models import family


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("names") / "m", 1, bits=(4, 8))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "m"))


def header(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_header(folder / "model.safetensors", lambda h: edit(h))


def config(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda c: edit(c))


def rename(old: str, new: str) -> Callable[[Path], None]:
    return header(lambda h: h.update({new: h.pop(old)}))


def reshape(name: str, shape: list[int]) -> Callable[[Path], None]:
    return header(lambda h: h[name].update(shape=shape))


def retype(name: str, dtype: str) -> Callable[[Path], None]:
    return header(lambda h: h[name].update(dtype=dtype))


def quantization(**keys: Any) -> Callable[[Path], None]:
    return config(lambda c: c["quantization"].update(keys))


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("model.norm.weight"), r"lacks the tensor norm\.weight"),
        (without("lm_head.scales"), r"lm_head\.weight should be quantised.*lacks its scales"),
        (without("lm_head.biases"), r"lacks the tensor lm_head\.biases"),
        (
            without(LAYER + "mlp.switch_mlp.up_proj.weight"),
            r"lacks the experts of layer 1: neither layers\.1\.mlp\.switch_mlp\.up_proj",
        ),
        (
            without(LAYER + "self_attn.q_proj.bias"),
            r"lacks the tensor layers\.1\.self_attn\.q_proj\.bias",
        ),
        (
            rename(LAYER + "mlp.shared_expert_gate.weight", LAYER + "mlp.shared_gate.weight"),
            r"lacks the tensor layers\.1\.mlp\.shared_expert_gate",
        ),
        (config(lambda c: c.update(num_hidden_layers=1)), r"holds model\.layers\.1\..*not use"),
        (config(lambda c: c.update(qkv_bias=False)), r"holds model\.layers\.0\.self_attn\..*bias"),
        (config(lambda c: c.update(shared_expert_intermediate_size=0)), "shared_expert"),
        (config(lambda c: c.update(hidden_size=192)), r"embed_tokens\.weight has the shape"),
        (config(lambda c: c.update(num_experts=5)), r"mlp\.gate\.weight has the shape"),
        (config(lambda c: c.update(vocab_size=511)), r"embed_tokens\.weight has the shape"),
        (reshape("model.norm.weight", [64, 2]), r"norm\.weight has the shape \[64, 2\]"),
        (retype("model.norm.weight", "I16"), r"norm\.weight is stored as I16"),
        (retype("lm_head.scales", "U16"), r"lm_head\.scales is stored as U16"),
        (retype("lm_head.scales", "F16"), r"lm_head\.biases is BF16, but its scales are F16"),
        (retype("lm_head.weight", "I32"), r"lm_head\.weight is stored as I32"),
        (config(lambda c: c.pop("quantization") and c.pop("quantization_config")), "no quantiz"),
        (quantization(lm_head=False), r"lm_head\.weight is quantised, but"),
        (quantization(bits=7), "7-bit"),
        (quantization(group_size=16), "groups of 16"),
        (
            quantization(group_size=32),
            r"scales has the shape \[512, 2\]; the config says \[512, 4\]",
        ),
        (config(lambda c: c.update(model_type="unheard_of")), "'unheard_of' is not supported"),
    ],
)
def test_what_is_missing_surplus_or_wrong_is_refused_by_name(
    folder: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        layout_of_checkpoint(folder)


def test_a_router_stored_at_8_bits_cannot_be_read_as_4(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", 2, bits=(4, 8))
    entries = Checkpoint.open(folder).config.get("quantization")
    wide = next(name for name, entry in entries.items() if isinstance(entry, dict))
    quantization_of = config(lambda c: c["quantization"].pop(wide))
    quantization_of(folder)
    with pytest.raises(CheckpointError, match=f"{wide}.weight has the shape .* 4-bit codes"):
        layout_of_checkpoint(folder)


def test_inputs_that_are_no_multiple_of_the_group_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", 2, dense=True, moe_intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"down_proj.*96 input features are not a multiple"):
        layout_of_checkpoint(folder)


def test_ignorable_tensors_are_ignored(folder: Path) -> None:
    expected = layout_of_checkpoint(folder).resident
    path = folder / "model.safetensors"
    info = Checkpoint.open(folder).tensors
    tensors = {
        name: (t.dtype, np.fromfile(path, np.uint8, t.nbytes, offset=t.offset).view(_raw(t.dtype)))
        for name, t in info.items()
    }
    shaped = {name: (d, data.reshape(info[name].shape)) for name, (d, data) in tensors.items()}
    shaped["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", np.zeros(16, np.float32))
    write_safetensors(path, shaped)
    assert layout_of_checkpoint(folder).resident == expected


def _raw(dtype: str) -> str:
    return {"BF16": "u2", "U32": "u4"}[dtype]


def test_a_spare_head_beside_a_tied_embedding_is_ignored(folder: Path) -> None:
    config(lambda c: c.update(tie_word_embeddings=True))(folder)
    assert "lm_head" not in layout_of_checkpoint(folder).resident


def test_names_with_another_prefix_mean_the_same(folder: Path) -> None:
    before, _ = checkpoint_values(folder)

    def prefix(names: dict[str, Any]) -> None:
        for name in [n for n in names if n != "__metadata__"]:
            names[f"language_model.{name}"] = names.pop(name)

    header(prefix)(folder)
    config(
        lambda c: c["quantization"].update(
            {f"language_model.{n}": e for n, e in c["quantization"].items() if isinstance(e, dict)}
        )
    )(folder)
    after, _ = checkpoint_values(folder)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_two_spellings_of_one_tensor_are_refused(folder: Path) -> None:
    header(lambda h: h.update({"norm.weight": {**h["model.norm.weight"]}}))(folder)
    with pytest.raises(CheckpointError, match="over another tensor"):
        layout_of_checkpoint(folder)
    header(
        lambda h: h.update({"norm.weight": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}})
    )(folder)
    with pytest.raises(CheckpointError, match="which are the same tensor"):
        layout_of_checkpoint(folder)


def test_experts_of_two_kinds_in_one_matrix_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", 1, dense=True, separate_experts=True)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def widen(tensors: dict[str, Any]) -> None:
        _, shape, data = tensors[name]
        tensors[name] = ("F32", shape, np.zeros(len(data) // 2, np.float32).tobytes())

    rewritten(widen)(folder)
    with pytest.raises(CheckpointError, match="up_proj is dense bf16 in one place and dense f32"):
        layout_of_checkpoint(folder)


def test_a_tensor_that_a_family_can_do_without_may_be_missing(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    wanted = family("qwen2_moe").tensor_map(checkpoint.config)
    spare = ResidentName("spare", (8,), optional=True)
    found = resolve(checkpoint, replace(wanted, resident=(*wanted.resident, spare)))
    assert "spare" not in found.resident
    with pytest.raises(CheckpointError, match="lacks the tensor spare"):
        resolve(
            checkpoint, replace(wanted, resident=(*wanted.resident, ResidentName("spare", (8,))))
        )


@pytest.mark.parametrize("module", ["switch_mlp", "switch_glu"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["il16", "row"])
def test_every_spelling_of_stacked_experts_gives_the_same_files(
    tmp_path: Path, module: str, fused: bool, layout: Layout
) -> None:
    source = write_checkpoint(tmp_path / "m", 1)
    tensors = raw_tensors(source)
    for name in [name for name in tensors if fused and "switch_mlp.up_proj" in name]:
        gate, up = (tensors.pop(name.replace("up_proj", p)) for p in ("gate_proj", "up_proj"))
        both = np.concatenate([gate[1], up[1]], axis=1)
        tensors[name.replace("up_proj", "gate_up_proj")] = (gate[0], both)
    renamed = {name.replace("switch_mlp", module): tensor for name, tensor in tensors.items()}
    other = rewrite(source, tmp_path / "o", renamed)
    stores = [convert(p, tmp_path / f"{p.name}s", layout=layout) for p in (source, other)]
    first, second = ([path.read_bytes() for path in store.expert_paths()] for store in stores)
    assert first == second


OSS: dict[str, Any] = {"model_type": "gpt_oss", "mxfp4": True}
EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("oss") / "m", 1, **OSS)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "m"
    return write_checkpoint(folder, 1, **OSS, blocks=True, dense=True)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with plain experts, each matrix transposed."""
    folder = tmp_path_factory.mktemp("twin") / "m"
    return write_checkpoint(folder, 1, model_type="gpt_oss", blocks=True, dense=True)


@pytest.mark.parametrize("layout", ["il16", "row"])
def test_experts_as_published_give_the_files_of_stacked_ones(
    oss: Path, published: Path, tmp_path: Path, layout: Layout
) -> None:
    names = set(Checkpoint.open(published).tensors)
    assert {EXPERTS + "gate_up_proj_blocks", EXPERTS + "down_proj_bias"} <= names
    stores = [
        convert(source, tmp_path / str(number), layout=layout, piece_nbytes=1 << 12)
        for number, source in enumerate((oss, published))
    ]
    first, second = ([path.read_bytes() for path in store.expert_paths()] for store in stores)
    assert first == second


@pytest.mark.parametrize("layout", ["il16", "row"])
@pytest.mark.parametrize("quantize", [None, QuantSpec(4, 64), QuantSpec(5, 32)])
def test_transposed_experts_give_the_store_of_others(
    twin: Path, tmp_path: Path, layout: Layout, quantize: QuantSpec | None
) -> None:
    names = set(Checkpoint.open(twin).tensors)
    assert {EXPERTS + "gate_up_proj", EXPERTS + "gate_up_proj_bias"} <= names
    usual = write_checkpoint(tmp_path / "u", 1, model_type="gpt_oss", dense=True)
    three = quantize is not None and quantize.bits == 4
    stores = [
        convert(
            source,
            tmp_path / source.name[0] / "s",
            layout=layout,
            quantize=quantize,
            experts3bit=three,
            piece_nbytes=1 << 12,
        )
        for source in (usual, twin)
    ]
    check_same_store(*stores)


@pytest.mark.parametrize("layout", ["il16", "row"])
@pytest.mark.parametrize("name", ["published", "twin"])
def test_rows_in_turn_are_read_once_for_both_matrices(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: Path = request.getfixturevalue(name)
    ranges, read = list[tuple[int, int]](), Streams.read

    def noted(
        streams: Streams, stream: str, path: Path, offset: int, nbytes: int, left: int = 0
    ) -> Any:
        ranges.append((offset, nbytes))
        return read(streams, stream, path, offset, nbytes, left)

    monkeypatch.setattr(Streams, "read", noted)
    monkeypatch.setattr(Streams, "borrow", noted)
    convert(published, tmp_path / "s", layout=layout, piece_nbytes=1 << 12)
    assert len(ranges) == len(set(ranges))
    tensors = Checkpoint.open(published).tensors.values()
    assert sum(nbytes for _, nbytes in ranges) == sum(tensor.nbytes for tensor in tensors)


def test_quantising_what_is_published_leaves_its_experts_as_they_are(
    published: Path, tmp_path: Path
) -> None:
    plain = convert(published, tmp_path / "plain")
    four = convert(published, tmp_path / "four", quantize=QuantSpec(4, 64))
    assert plain.layout.experts == four.layout.experts
    formats = {name: tensor.format for name, tensor in four.layout.resident.items()}
    assert formats["layers.0.mlp.gate"] == Format("affine", "bf16", 8, 64)
    assert formats["lm_head"] == Format("affine", "bf16", 4, 64)
    first, second = ([p.read_bytes() for p in store.expert_paths()] for store in (plain, four))
    assert first == second


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without(EXPERTS + "up_proj.scales"), r"up_proj\.weight should be quantised.*lacks its"),
        (without(EXPERTS + "up_proj.bias"), r"neither layers\.1\.mlp\.experts\.up_proj\.bias nor"),
        (without(LAYER + "self_attn.sinks"), r"lacks the tensor layers\.1\.self_attn\.sinks"),
        (without(LAYER + "mlp.router.bias"), r"lacks the tensor layers\.1\.mlp\.router\.bias"),
        (retype(EXPERTS + "up_proj.scales", "I8"), r"up_proj\.scales is stored as I8"),
        (retype(EXPERTS + "up_proj.bias", "I16"), r"up_proj\.bias is stored as I16"),
        (reshape(EXPERTS + "up_proj.bias", [3, 128]), r"up_proj\.bias has the shape \[3, 128\]"),
        (
            config(lambda c: c["quantization"].pop(EXPERTS + "up_proj")),
            r"experts\.up_proj\.biases",
        ),
        (
            config(lambda c: c["quantization"][EXPERTS + "up_proj"].update(group_size=64)),
            r"up_proj\.weight cannot be read: mxfp4 is codes of 4 bits in groups of 32",
        ),
    ],
)
def test_experts_of_mxfp4_that_are_damaged_are_refused_by_name(
    oss: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = Path(shutil.copytree(oss, tmp_path / "m"))
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        layout_of_checkpoint(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without(EXPERTS + "gate_up_proj_scales"), "lacks the tensor .*gate_up_proj_scales"),
        (without(EXPERTS + "gate_up_proj_bias"), "lacks the tensor .*gate_up_proj_bias"),
        (without(EXPERTS + "down_proj_blocks"), "lacks the tensor .*down_proj_blocks"),
        (retype(EXPERTS + "down_proj_blocks", "I8"), "down_proj_blocks is stored as I8"),
        (reshape(EXPERTS + "down_proj_scales", [6, 64, 4]), "down_proj_scales has the shape"),
    ],
)
def test_experts_as_published_that_are_damaged_are_refused_by_name(
    published: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "m"))
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        layout_of_checkpoint(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without(EXPERTS + "gate_up_proj"), "lacks the experts of layer 1"),
        (without(EXPERTS + "gate_up_proj_bias"), "lacks the tensor .*gate_up_proj_bias"),
        (without(EXPERTS + "down_proj"), r"lacks the tensor .*experts\.down_proj;"),
        (retype(EXPERTS + "down_proj", "I16"), "down_proj is stored as I16"),
        (reshape(EXPERTS + "down_proj", [6, 128, 64]), r"down_proj has the shape \[6, 128, 64\]"),
        (reshape(EXPERTS + "gate_up_proj", [768, 128]), r"gate_up_proj has the shape \[768, 128"),
        (
            config(
                lambda c: c.update(
                    quantization={"group_size": 64, "bits": 4, EXPERTS + "down_proj": {"bits": 8}}
                )
            ),
            "down_proj should be quantised, since config.json says so",
        ),
    ],
)
def test_transposed_experts_that_are_damaged_are_refused_by_name(
    twin: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = Path(shutil.copytree(twin, tmp_path / "m"))
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        layout_of_checkpoint(folder)


def test_a_transposed_number_that_is_not_finite_is_refused_by_name(
    twin: Path, tmp_path: Path
) -> None:
    tensors = raw_tensors(twin)
    tensors[EXPERTS + "gate_up_proj"][1][5, 127, 0] = 0x7F80
    folder = rewrite(twin, tmp_path / "m", tensors)
    for quantize in (None, QuantSpec(4, 64)):
        with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj in .* not finite"):
            convert(folder, tmp_path / "s", quantize=quantize)


@pytest.mark.parametrize("scale", [253, 255])
def test_scales_of_mxfp4_that_make_no_finite_number_are_refused(
    oss: Path, tmp_path: Path, scale: int
) -> None:
    tensors = raw_tensors(oss)
    tensors[EXPERTS + "up_proj.scales"][1].flat[-1] = scale
    folder = rewrite(oss, tmp_path / "m", tensors)
    with pytest.raises(CheckpointError, match=r"up_proj\.scales in .* not finite"):
        convert(folder, tmp_path / "s")


def test_a_part_of_a_matrix_in_mxfp4_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 1, model_type="deepseek_v3")
    tensors = raw_tensors(source)
    entry = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    for layer in range(2):
        module = f"model.layers.{layer}.self_attn."
        for name in ("embed_q", "unembed_out"):
            for part in ("weight", "scales", "biases"):
                tensors.pop(f"{module}{name}.{part}")
        tensors[module + "kv_b_proj.weight"] = ("U32", np.zeros((4 * (64 + 32), 16), np.uint32))
        tensors[module + "kv_b_proj.scales"] = ("U8", np.full((4 * (64 + 32), 4), 127, np.uint8))
    old = Checkpoint.open(source).config.raw["quantization"]
    entries = {f"model.layers.{layer}.self_attn.kv_b_proj": entry for layer in range(2)}
    folder = rewrite(source, tmp_path / "o", tensors, quantization=old | entries)
    with pytest.raises(CheckpointError, match=r"kv_b_proj\.weight is quantised as mxfp4"):
        layout_of_checkpoint(folder)
