"""Every code width and group that a checkpoint may have computes, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_model import needs_native
from stores import source_values
from strategies import write_checkpoint, write_safetensors

from aegis import Engine
from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.source import Checkpoint
from aegis.convert.convert import convert
from aegis.convert.names import SourceWeight
from aegis.errors import BackendError
from aegis.kernels.base import Format
from aegis.kernels.sizes import CODE_BITS, GROUPS

IDS = [7, 300, 41, 5, 5, 120, 9]


def checkpoint(folder: Path, bits: int, group_size: int) -> Path:
    return write_checkpoint(
        folder,
        bits,
        bits=(bits,),
        group_size=group_size,
        num_hidden_layers=1,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )


def widened(source: Path, folder: Path) -> Path:
    """The same model with every quantised weight as plain f32 numbers."""
    quantised = Checkpoint.open(source)
    found, tensors = quantised.tensors, {}
    for name, info in found.items():
        module = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" in found and quantised.config.quantization is not None:
            spec = quantised.config.quantization.of(module) or QuantSpec(0, 0)
            parts = (info, found[f"{module}.scales"], found[f"{module}.biases"])
            *lead, cols = info.shape
            shape = (int(np.prod(lead)), cols * 32 // spec.bits)
            fmt = Format("affine", "bf16", spec.bits, spec.group_size)
            values = source_values(SourceWeight(name, shape, fmt, parts))
            tensors[name] = ("F32", values.reshape(*lead, -1))
        else:
            raw = np.fromfile(info.path, np.uint16, info.nbytes // 2, offset=info.offset)
            tensors[name] = ("BF16", raw.reshape(info.shape))
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "config.json").read_text())
    config = {k: v for k, v in config.items() if not k.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(store: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    with Engine.open(store, cap="600MiB", context=64, backend="reference") as engine:
        return engine.score(IDS, last=None).copy()


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_reference_computes_with_every_width_and_group(
    tmp_path: Path, bits: int, group_size: int
) -> None:
    source = checkpoint(tmp_path / "m", bits, group_size)
    plain = widened(source, tmp_path / "w")
    quantised, dense = (convert(path, tmp_path / f"{path.name}s").path for path in (source, plain))
    assert np.array_equal(logits(quantised), logits(dense))


@needs_native
@pytest.mark.parametrize("group_size", [32, 128])
def test_native_refuses_groups_it_cannot_compute_with_before_it_converts(
    tmp_path: Path, group_size: int
) -> None:
    source = checkpoint(tmp_path / "m", 4, group_size)
    with pytest.raises(BackendError, match=f"groups of {group_size}"):
        Engine.open(source, cap="300MiB", context=64, backend="native")
