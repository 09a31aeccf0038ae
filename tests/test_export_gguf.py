"""What tools/export_gguf.py writes is the store's weights, where llama.cpp looks for them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf_reader
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from synthetic_tools import SMALL, write_shape

from aegis.checkpoint.store import Store
from aegis.convert.convert import convert
from aegis.errors import AegisError
from aegis.kernels.base import Weight
from aegis.kernels.formats import bf16_to_f32, dequantize
from aegis.synthetic.recipe import recipe
from aegis.synthetic.write import make

TOOLS = Path(__file__).parents[1] / "tools"
GOLDENS = Path(__file__).parent / "goldens"
F32 = NDArray[np.float32]


def _tool(name: str) -> ModuleType:
    """A file of tools/, which is not installed."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


blocks = _tool("gguf_blocks")
_tool("gguf_file")
tool = _tool("export_gguf")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return convert(GOLDENS / "qwen3_5_moe", tmp_path_factory.mktemp("gguf") / "store")


def _exported(store: Store, path: Path, kind: str) -> tuple[Any, gguf_reader.Gguf]:
    done = tool.export(store, path, kind, quiet=True)
    return done, gguf_reader.read(path.read_bytes())


def _stored(store: Store) -> dict[str, F32]:
    """Every matrix and vector of a store; experts as layers.N.PART [experts, out, in]."""
    data = store.resident_path.read_bytes()
    found = {}
    for name, entry in store.layout.resident.items():
        raw = np.frombuffer(data[entry.offset : entry.offset + entry.nbytes], np.uint8)
        found[name] = dequantize(Weight(entry.shape, entry.format, "il16", raw))
    for layer, path in zip(store.layout.moe_layers, store.expert_paths(), strict=True):
        records = np.fromfile(path, np.uint8).reshape(-1, store.layout.experts.stride)
        for part, at in store.layout.experts.segments.items():
            found[f"layers.{layer}.{part}"] = np.stack(
                [
                    dequantize(Weight(at.shape, at.format, "il16", r[at.offset :][: at.nbytes]))
                    for r in records
                ]
            )
    return found


def _delta_rows(values: F32, first: int, width: int) -> F32:
    """Two key heads with two value heads each: the file has 0, 2, 1, 3 in the place of 0 to 3."""
    heads = [values[first + width * head : first + width * (head + 1)] for head in (0, 2, 1, 3)]
    return np.concatenate([values[:first], *heads])


@pytest.mark.parametrize("kind", ["q4_1", "f32"])
def test_every_weight_is_the_stores_in_llama_cpps_place(
    golden: Store, tmp_path: Path, kind: str
) -> None:
    done, found = _exported(golden, tmp_path / "m.gguf", kind)
    stored = _stored(golden)
    assert done.off == {"experts": 0.0, "other matrices": 0.0}
    same = {"token_embd.weight": "embed_tokens", "output.weight": "lm_head"}
    same |= {f"blk.{n}.ffn_gate_inp.weight": f"layers.{n}.mlp.gate" for n in range(4)}
    same |= {f"blk.{n}.attn_norm.weight": f"layers.{n}.input_layernorm" for n in range(4)}
    for part in ("gate", "up", "down"):
        same |= {f"blk.{n}.ffn_{part}_exps.weight": f"layers.{n}.{part}_proj" for n in range(4)}
        shared = f"mlp.shared_expert.{part}_proj"
        same |= {f"blk.{n}.ffn_{part}_shexp.weight": f"layers.{n}.{shared}" for n in range(4)}
    for part in "qkv":
        same[f"blk.3.attn_{part}.weight"] = f"layers.3.self_attn.{part}_proj"
    for name, other in same.items():
        np.testing.assert_array_equal(found.values(name), stored[other], err_msg=name)
    inner = "layers.1.linear_attn."
    layer = {n.removeprefix(inner): v for n, v in stored.items() if n.startswith(inner)}
    expected = {
        "attn_qkv.weight": _delta_rows(layer["in_proj_qkv"], 128, 32),
        "attn_gate.weight": _delta_rows(layer["in_proj_z"], 0, 32),
        "ssm_alpha.weight": _delta_rows(layer["in_proj_a"], 0, 1),
        "ssm_beta.weight": _delta_rows(layer["in_proj_b"], 0, 1),
        "ssm_out.weight": _delta_rows(layer["out_proj"].T, 0, 32).T,
        "ssm_conv1d.weight": _delta_rows(layer["conv1d"].reshape(4, -1).T, 128, 32),
        "ssm_a": -np.exp(_delta_rows(layer["A_log"], 0, 1)),
        "ssm_dt.bias": _delta_rows(layer["dt_bias"], 0, 1),
        "ssm_norm.weight": layer["norm"],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(found.values(f"blk.1.{name}"), values, err_msg=name)
    norms = 2 * 4 + 1 + 2  # Of layers, of the output, of queries and keys.
    assert len(found.places) == 4 * (3 + 5) + 3 * len(expected) + 4 + 2 + norms


def test_what_the_file_says_of_the_model_is_true(golden: Store, tmp_path: Path) -> None:
    _, found = _exported(golden, tmp_path / "m.gguf", "q4_1")
    said = {k.removeprefix("qwen35moe."): v for k, v in found.keys.items()}
    assert said["general.architecture"] == "qwen35moe"
    assert said["expert_count"] == 8
    assert said["expert_used_count"] == 3
    assert said["attention.recurrent_layers"] == [True, True, True, False]
    assert said["rope.dimension_count"] == 16
    assert said["rope.dimension_sections"] == [4, 2, 2, 0]
    assert said["ssm.inner_size"] == 128
    assert said["vocab_size"] == found.places["token_embd.weight"][0][0]


def test_experts_of_random_weights_are_exact_in_the_bytes_that_the_store_takes(
    tmp_path: Path,
) -> None:
    text = {**SMALL["text_config"], "moe_intermediate_size": 256, "num_experts": 4}
    text |= {"num_hidden_layers": 4, "vocab_size": 512}
    made = recipe(write_shape(tmp_path, {**SMALL, "text_config": text}))
    store = make(made, tmp_path / "store", "il16")
    done, found = _exported(store, tmp_path / "m.gguf", "q4_k")
    assert done.off["experts"] == 0
    assert 0 < done.off["other matrices"] < 0.2
    assert done.expert_nbytes == store.layout.experts.record_nbytes
    stored = _stored(store)
    for part in ("gate", "up", "down"):
        name = f"blk.2.ffn_{part}_exps.weight"
        assert found.places[name][1] == 12
        np.testing.assert_array_equal(found.values(name), stored[f"layers.2.{part}_proj"])


def _groups(draw: st.DrawFn, count: int, signed: bool) -> tuple[F32, F32]:
    """Scales and biases of groups, as bfloat16 holds them."""
    seed = draw(st.integers(0, 1 << 32))
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.002, 0.02, count) * (rng.choice([-1, 1], count) if signed else 1)
    biases = -scales * rng.uniform(-1 if signed else 5, 10, count)
    rounded = (np.asarray(x, np.float32).view(np.uint32) >> 16 for x in (scales, biases))
    first, second = map(bf16_to_f32, rounded)
    return first, second


def _pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    joined: NDArray[np.uint8] = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return joined


@given(st.data(), st.sampled_from(["q4_1", "q4_k"]), st.booleans())
def test_no_weight_is_farther_off_than_is_said(data: st.DataObject, kind: str, equal: bool) -> None:
    count = 16
    scales, biases = data.draw(st.composite(_groups)(count, not equal))
    if equal:  # One scale and one bias for a row: what synthetic experts have.
        scales, biases = (np.full(count, x[0], np.float32) for x in (scales, biases))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    codes = rng.integers(0, 16, (2, 32 * count // 2), np.uint8)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    rows = scales.reshape(2, -1), biases.reshape(2, -1)
    written, off = blocks.blocks(kind, _pairs(codes), *rows)
    size, decode = (20, gguf_reader.q4_1) if kind == "q4_1" else (144, gguf_reader.q4_k)
    found = np.array(
        [decode(written.tobytes()[i : i + size]) for i in range(0, written.size, size)]
    )
    step = np.repeat(np.abs(scales), 32).astype(np.float64)
    wide = np.repeat(scales, 32).astype(np.float64) * codes.reshape(-1)
    missed = np.abs(found.reshape(-1) - wide - np.repeat(biases, 32)) / step
    assert missed.max() <= off * (1 + 1e-9) + 1e-9
    if kind == "q4_1" or equal:
        assert off == 0


def test_codes_of_a_negative_scale_are_turned_round() -> None:
    codes = np.arange(256, dtype=np.uint8)[None] % 16
    scales, biases = np.full((1, 8), -0.5, np.float32), np.full((1, 8), 3.5, np.float32)
    written, off = blocks.blocks("q4_k", _pairs(codes), scales, biases)
    assert off == 0
    np.testing.assert_array_equal(gguf_reader.q4_k(written.tobytes()), 3.5 - 0.5 * codes[0])


def test_another_family_is_refused(tmp_path: Path) -> None:
    store = convert(GOLDENS / "olmoe", tmp_path / "store")
    with pytest.raises(AegisError, match="olmoe in layout il16; only qwen3_5_moe"):
        tool.export(store, tmp_path / "m.gguf", "q4_1", quiet=True)


def test_without_room_nothing_is_written(
    golden: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "free_nbytes", lambda folder: 1000)
    with pytest.raises(AegisError, match="1000 B are free there"):
        tool.export(golden, tmp_path / "m.gguf", "q4_1", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(
    golden: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, *given: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(tool.Export, "_encoded", fails)
    with pytest.raises(OSError, match="no space"):
        tool.export(golden, tmp_path / "m.gguf", "q4_1", quiet=True)
    assert list(tmp_path.iterdir()) == []
