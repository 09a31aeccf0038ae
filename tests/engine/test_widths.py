"""Every code width and group that a checkpoint may have computes, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mlx_tools import NUMBERS, PLENTY, mlx_options, needs_mlx
from small_model import needs_native
from stores import raw_tensors, rewrite, source_values
from strategies import write_checkpoint

from aegis import Engine
from aegis.checkpoint.source import Checkpoint
from aegis.convert.convert import convert
from aegis.convert.layout import layout_of_checkpoint
from aegis.convert.names import SourceWeight
from aegis.engine import planning
from aegis.engine.numbers import numbers_of
from aegis.errors import CheckpointError
from aegis.kernels.base import Format, Numbers
from aegis.kernels.sizes import CODE_BITS, GROUPS, MXFP4
from aegis.settings import Settings

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
    found, quantization = quantised.tensors, quantised.config.quantization
    assert quantization is not None
    tensors = raw_tensors(source)
    for name in [n for n in tensors if n.endswith(".scales")]:
        module = name.removesuffix(".scales")
        spec = quantization.of(module)
        assert spec is not None
        for part in ("scales", "biases"):
            del tensors[f"{module}.{part}"]
        parts = tuple(found[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
        *lead, cols = parts[0].shape
        shape = (int(np.prod(lead)), cols * 32 // spec.bits)
        fmt = Format("affine", "bf16", spec.bits, spec.group_size)
        values = source_values(SourceWeight(name, shape, fmt, parts)).reshape(*lead, -1)
        tensors[f"{module}.weight"] = ("F32", values.view(np.uint32))
    return rewrite(source, folder, tensors, quantization=None, quantization_config=None)


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


@needs_mlx
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_mlx_computes_with_every_width_and_group(
    tmp_path: Path, bits: int, group_size: int, numbers: Numbers
) -> None:
    source = checkpoint(tmp_path / "m", bits, group_size)
    expected = logits(convert(source, tmp_path / "s").path)
    store = convert(source, tmp_path / "r", layout="row")
    with Engine.open(store.path, cap=PLENTY, **mlx_options(numbers)) as engine:
        difference = np.abs(engine.score(IDS, last=None) - expected) / expected.std()
    if numbers == "f32":
        assert difference.max() < 1e-4
    else:  # Another choice of experts may change one row.
        assert np.median(difference) < 0.1


@needs_native
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_native_computes_with_every_width_and_group_and_widens_nothing(
    tmp_path: Path, bits: int, group_size: int
) -> None:
    store = convert(checkpoint(tmp_path / "m", bits, group_size), tmp_path / "s")
    stored = {s.format for s in store.layout.experts.segments.values()}
    assert stored == {Format("affine", "bf16", bits, group_size)}
    with Engine.open(store.path, cap="600MiB", context=64, backend="native") as engine:
        found = engine.score(IDS, last=None)
        assert np.abs(found - (expected := logits(store.path))).max() < 1e-4 * expected.std()


def test_inputs_that_are_no_multiple_of_64_are_refused_by_name(tmp_path: Path) -> None:
    """Only in groups of 32 can a checkpoint have such, and only il16 minds."""
    source = write_checkpoint(tmp_path / "m", group_size=32, moe_intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"down_proj.*96 input features.*multiple of 64"):
        convert(source, tmp_path / "s")
    assert convert(source, tmp_path / "r", layout="row").layout.layout == "row"


def test_the_plan_counts_the_scales_of_smaller_groups(tmp_path: Path) -> None:
    """They are widened where MLX computes in float32, and twice as many in groups of 32."""
    needed = {}
    for size in (32, 64):
        source = checkpoint(tmp_path / f"{size}", 4, size)
        layout = layout_of_checkpoint(source, "row")
        needed[size] = planning._num_resident_groups(layout)
    assert needed[32] == 2 * needed[64] > 0


def test_activations_on_a_gpu_are_the_embeddings_numbers_where_scales_are_powers_of_two(
    tmp_path: Path,
) -> None:
    source = write_checkpoint(tmp_path / "m", 1, model_type="gpt_oss", mxfp4=True)
    layout = layout_of_checkpoint(source, "row")
    assert layout.experts.segments["gate_proj"].format == MXFP4
    assert numbers_of(Settings(cap_nbytes=1 << 30), "cuda", layout) == "bf16"
    assert numbers_of(Settings(cap_nbytes=1 << 30), "cpu", layout) == "f32"
