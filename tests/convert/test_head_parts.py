"""Keys and values of all heads in one matrix, as publishers and older conversions have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import raw_tensors, rewrite
from strategies import write_checkpoint

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.store import Store
from aegis.convert.convert import convert
from aegis.errors import CheckpointError
from aegis.kernels.base import Layout

HEADS, RANK, KEYS, VALUES = 4, 128, 64, 32
LAYOUTS: list[Layout] = ["il16", "row"]


def checkpoint(folder: Path, **choices: Any) -> Path:
    return write_checkpoint(folder, 4, model_type="deepseek_v3", **choices)


def joined(source: Path, folder: Path) -> Path:
    """The same plain checkpoint with kv_b_proj in place of embed_q and unembed_out."""
    tensors = raw_tensors(source)
    for name in [name for name in tensors if name.endswith("embed_q.weight")]:
        other = name.replace("embed_q", "unembed_out")
        keys, values = tensors.pop(name)[1].swapaxes(1, 2), tensors.pop(other)[1]
        assert keys.shape == (HEADS, KEYS, RANK)
        both = np.concatenate([keys, values], axis=1).reshape(-1, RANK)
        tensors[name.replace("embed_q", "kv_b_proj")] = ("BF16", both)
    return rewrite(source, folder, tensors)


def check_same(first: Store, second: Store) -> None:
    assert first.layout == second.layout
    for path in sorted(first.path.rglob("*.bin")):
        other = second.path / path.relative_to(first.path)
        assert path.read_bytes() == other.read_bytes(), path.name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quantize", [None, QuantSpec(4, 64), QuantSpec(6, 32)])
def test_a_plain_matrix_gives_the_store_of_its_parts(
    tmp_path: Path, layout: Layout, quantize: QuantSpec | None
) -> None:
    source = checkpoint(tmp_path / "m", dense=True)
    stores = [
        convert(
            path, tmp_path / f"s{n}", layout=layout, quantize=quantize, piece_nbytes=1 << (13 + n)
        )
        for n, path in enumerate((source, joined(source, tmp_path / "j")))
    ]
    check_same(*stores)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (3, 64), (8, 32)])
def test_a_quantised_matrix_gives_what_mlx_lm_makes_of_it(
    tmp_path: Path, layout: Layout, bits: int, group_size: int
) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX, whose quantiser is the truth, is missing")
    mx.set_default_device(mx.cpu)
    plain = checkpoint(tmp_path / "m", dense=True)
    published = checkpoint(tmp_path / "p", bits=(bits,), group_size=group_size)
    joint, apart = raw_tensors(published), raw_tensors(published)
    kv_b = {n: t for n, t in raw_tensors(joined(plain, tmp_path / "j")).items() if "kv_b" in n}
    for name in [name for name in joint if "embed_q" in name or "unembed_out" in name]:
        del joint[name], apart[name]

    def add(tensors: dict[str, Any], name: str, numbers: Any) -> Any:
        words, scales, biases = mx.quantize(numbers, group_size=group_size, bits=bits)
        tensors[f"{name}.weight"] = ("U32", np.array(words))
        for suffix, params in (("scales", scales), ("biases", biases)):
            tensors[f"{name}.{suffix}"] = ("BF16", np.array(params.view(mx.uint16)))
        return mx.dequantize(words, scales, biases, group_size=group_size, bits=bits)

    for name, (_, raw) in kv_b.items():
        module = name.removesuffix(".weight")
        numbers = add(joint, module, mx.array(raw).view(mx.bfloat16))
        heads = numbers.reshape(HEADS, KEYS + VALUES, RANK)
        keys = mx.contiguous(heads[:, :KEYS].swapaxes(-1, -2))
        add(apart, module.replace("kv_b_proj", "embed_q"), keys)
        values = mx.contiguous(heads[:, KEYS:])
        add(apart, module.replace("kv_b_proj", "unembed_out"), values)
    stores = [
        convert(rewrite(published, tmp_path / f"c{n}", tensors), tmp_path / f"s{n}", layout=layout)
        for n, tensors in enumerate((joint, apart))
    ]
    check_same(*stores)


def test_a_matrix_for_other_heads_is_refused(tmp_path: Path) -> None:
    source = joined(checkpoint(tmp_path / "m", dense=True), tmp_path / "j")
    tensors = raw_tensors(source)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    tensors[name] = ("BF16", tensors[name][1][:-1])
    with pytest.raises(CheckpointError, match=r"kv_b_proj.weight has the shape \[383, 128\]"):
        convert(rewrite(source, tmp_path / "c", tensors), tmp_path / "s")


def test_parts_and_the_whole_together_are_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "m", dense=True)
    both = raw_tensors(source) | raw_tensors(joined(source, tmp_path / "j"))
    with pytest.raises(CheckpointError, match=r"kv_b_proj\.weight, which a model of this family"):
        convert(rewrite(source, tmp_path / "c", both), tmp_path / "s")


def test_without_either_the_missing_tensor_is_named(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "m", dense=True)
    tensors = {n: t for n, t in raw_tensors(source).items() if "embed_q" not in n}
    with pytest.raises(CheckpointError, match=r"lacks the tensor layers\.0\.self_attn\.embed_q"):
        convert(rewrite(source, tmp_path / "c", tensors), tmp_path / "s")
