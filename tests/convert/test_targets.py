"""Which weights are quantised, and how wide, is what mlx_lm.convert chose for the same model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from strategies import write_checkpoint, write_safetensors

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.tensor_map import QuantizeRules
from aegis.convert.layout import layout_of_checkpoint, resolve_checkpoint
from aegis.convert.names import Resolved
from aegis.convert.targets import quantised
from aegis.kernels.base import Format

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = sorted(path.parent.name for path in GOLDENS.glob("*/model.safetensors"))
FOUR = QuantSpec(4, 64)
_MXFP4 = {"U32": np.uint32, "U8": np.uint8}
"""Types of codes and of scales."""


def plain_twin(published: Path, folder: Path) -> Path:
    """A checkpoint of zeros with the shapes of a quantised one before that was quantised. What is
    mxfp4 was it before."""
    checkpoint = Checkpoint.open(published)
    found, quantization = checkpoint.tensors, checkpoint.config.quantization
    tensors = {}
    for name, info in found.items():
        module, _, part = name.rpartition(".")
        shape = info.shape
        if info.dtype in _MXFP4 and f"{module}.biases" not in found:
            tensors[name] = (info.dtype, np.zeros(shape, _MXFP4[info.dtype]))
            continue
        if part in ("scales", "biases"):
            continue
        if part == "weight" and f"{module}.scales" in found:
            assert quantization is not None
            spec = quantization.of(module)
            assert spec is not None
            shape = (*shape[:-1], shape[-1] * 32 // spec.bits)
        tensors[name] = ("BF16", np.zeros(shape, np.uint16))
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((published / "config.json").read_text())
    config = {k: v for k, v in config.items() if not k.startswith("quantization")}
    if any(dtype in _MXFP4 for dtype, _ in tensors.values()):
        config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gets_the_widths_of_the_published_conversion(
    tmp_path: Path, name: str
) -> None:
    published = GOLDENS / name
    plain = plain_twin(published, tmp_path / "m")
    assert layout_of_checkpoint(plain, "row", FOUR) == layout_of_checkpoint(published, "row")


def targets(folder: Path, rules: QuantizeRules, spec: QuantSpec = FOUR) -> Resolved:
    checkpoint, resolved = resolve_checkpoint(Checkpoint.open(folder))
    return quantised(checkpoint, resolved, rules, spec)


def test_rules_name_what_is_wider_and_what_stays_plain(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", dense=True)
    rules = QuantizeRules(eight_bit=("mlp.gate", "experts.down_proj"), plain=("lm_head",))
    found = targets(source, rules, QuantSpec(3, 32))
    assert found.resident["layers.1.mlp.gate"].target == Format("affine", "bf16", 8, 64)
    assert found.resident["layers.1.mlp.shared_expert_gate"].stored.bits == 3
    assert found.resident["lm_head"].target is None
    assert found.resident["norm"].target is None
    assert found.resident["layers.0.self_attn.q_proj.bias"].target is None
    widths = {part: source.weights[0].stored.bits for part, source in found.experts[0].items()}
    assert widths == {"gate_proj": 3, "up_proj": 3, "down_proj": 8}


def test_numbers_keep_their_type_where_the_rules_say_so(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", dense=True)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    found = targets(source, QuantizeRules(own_type=("input_layernorm", "mlp.gate")))
    assert found.resident["norm"].target == Format("dense", "f16")
    assert found.resident["layers.0.input_layernorm"].target is None
    assert found.resident["layers.0.mlp.gate"].target == Format("affine", "bf16", 4, 64)
    assert found.resident["lm_head"].target == Format("affine", "f16", 4, 64)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"torch_dtype": "float16"}, "f16"),
        ({"torch_dtype": None, "text_config": {"dtype": "float32"}}, "f32"),
        ({"torch_dtype": None, "dtype": "float16"}, "bf16"),
        ({"torch_dtype": "float8"}, "bf16"),
    ],
)
def test_the_config_names_the_type_of_scales(
    tmp_path: Path, keys: dict[str, object], dtype: str
) -> None:
    source = write_checkpoint(tmp_path / "m", dense=True)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | keys))
    assert targets(source, QuantizeRules()).resident["lm_head"].stored.dtype == dtype


def test_a_matrix_without_whole_groups_stays_plain(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", dense=True, moe_intermediate_size=192)
    found = targets(source, QuantizeRules(), QuantSpec(4, 128))
    assert found.experts[0]["up_proj"].weights[0].stored == Format("affine", "bf16", 4, 128)
    assert found.experts[0]["down_proj"].weights[0].target is None


def test_planning_knows_the_quantised_sizes_from_headers(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", dense=True)
    quantised_layout = layout_of_checkpoint(source, "il16", FOUR)
    assert quantised_layout.experts_3bit is not None
    plain = layout_of_checkpoint(source, "il16")
    assert plain.resident_file_nbytes > quantised_layout.resident_file_nbytes
