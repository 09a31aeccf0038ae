"""3-bit expert files: derived from the 4-bit ones, added whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damages import manifest
from stores import expert_values, flip_bit
from strategies import write_checkpoint

from aegis.checkpoint.manifest import ROUNDING_3BIT
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import Store
from aegis.convert import three_bit
from aegis.convert.cache import refuse_without_3bit
from aegis.convert.convert import convert
from aegis.convert.layout import resolve_checkpoint
from aegis.convert.three_bit import add_3bit, write_3bit
from aegis.convert.verify import verify
from aegis.errors import StoreError
from aegis.kernels import formats
from aegis.kernels.base import Format, Layout
from aegis.kernels.formats import MlxArrays


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", 1)


@pytest.mark.parametrize("layout", ["il16", "row"])
def test_3bit_experts_are_the_requantised_4bit_ones(
    source: Path, tmp_path: Path, layout: Layout
) -> None:
    store = convert(source, tmp_path / "s", layout=layout, experts3bit=True)
    values = expert_values(store, "3bit")
    _, resolved = resolve_checkpoint(Checkpoint.open(source))
    for layer, parts in resolved.experts.items():
        for part, experts in parts.items():
            weight = experts.weights[0]
            raw = [
                np.fromfile(t.path, np.uint8, t.nbytes, offset=t.offset).view(dtype)
                for t, dtype in zip(weight.tensors, ("<u4", "<u2", "<u2"), strict=True)
            ]
            arrays = MlxArrays(*(data.reshape(weight.shape[0], -1) for data in raw))
            three, fmt = formats.requantize_3bit(arrays, Format("affine", "bf16", 4, 64))
            expected = np.split(formats.dequantize_mlx(three, fmt), store.layout.num_experts)
            for expert, matrix in enumerate(expected):
                assert np.array_equal(values[layer, expert, part], matrix)


def test_requantised_values_stay_within_half_an_old_step(source: Path, tmp_path: Path) -> None:
    store = convert(source, tmp_path / "s", experts3bit=True)
    four, three = expert_values(store), expert_values(store, "3bit")
    for key, before in four.items():
        groups = before.reshape(-1, 64)
        step = (groups.max(axis=1) - groups.min(axis=1)) / 13  # Few have less than 14 codes.
        error = np.sqrt(np.square(three[key].reshape(-1, 64) - groups).mean(axis=1))
        assert (error <= step / 2).all()


@pytest.mark.parametrize("rounding", [None, ROUNDING_3BIT - 1, ROUNDING_3BIT + 1])
def test_experts_that_another_rule_made_are_not_used_and_made_again(
    source: Path, tmp_path: Path, rounding: int | None
) -> None:
    store = convert(source, tmp_path / "s", experts3bit=True)
    content = (store.path / "store.json").read_bytes()
    change = {} if rounding is None else {"rounding": rounding}

    def edit(data: dict[str, Any]) -> None:
        data["experts_3bit"] = {
            name: value for name, value in data["experts_3bit"].items() if name != "rounding"
        } | change

    manifest(edit)(store.path)
    old = store.expert_paths("3bit")[0]
    old.write_bytes(b"of another size")
    outdated = Store.open(store.path)
    assert not outdated.has_3bit
    assert verify(outdated).ok
    for refuse in (
        lambda: outdated.expert_paths("3bit"),
        lambda: refuse_without_3bit(store.path, "il16"),
    ):
        with pytest.raises(StoreError, match=r"rounded in another way; make them .*--experts 3bit"):
            refuse()
    assert verify(add_3bit(store.path)).ok
    assert (store.path / "store.json").read_bytes() == content
    assert old.read_bytes() != b"of another size"


def test_adding_later_gives_what_converting_at_once_gives(source: Path, tmp_path: Path) -> None:
    at_once = convert(source, tmp_path / "a", experts3bit=True)
    later = add_3bit(convert(source, tmp_path / "b").path)
    assert later.has_3bit
    assert (later.path / "store.json").read_bytes() == (at_once.path / "store.json").read_bytes()
    for first, second in zip(at_once.expert_paths("3bit"), later.expert_paths("3bit"), strict=True):
        assert first.read_bytes() == second.read_bytes()
    assert verify(later).ok


def test_adding_twice_writes_once(source: Path, tmp_path: Path) -> None:
    store = convert(source, tmp_path / "s", experts3bit=True)
    calls: list[int] = []
    add_3bit(store.path, lambda done, _: calls.append(done))
    assert convert(source, tmp_path / "s", experts3bit=True).has_3bit
    assert not calls


def test_converting_again_with_3bit_adds_them(source: Path, tmp_path: Path) -> None:
    assert not convert(source, tmp_path / "s").has_3bit
    assert convert(source, tmp_path / "s", experts3bit=True).has_3bit


def test_8bit_matrices_among_4bit_ones_are_kept(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 1, bits=(4, 8), num_hidden_layers=1)
    store = convert(source, tmp_path / "s", experts3bit=True)
    before, after = store.layout.geometry("4bit"), store.layout.geometry("3bit")
    widths = {name: segment.format.bits for name, segment in before.segments.items()}
    assert set(widths.values()) == {4, 8}
    assert {n: s.format.bits for n, s in after.segments.items()} == {
        name: 3 if bits == 4 else bits for name, bits in widths.items()
    }
    four, three = expert_values(store), expert_values(store, "3bit")
    for layer, expert, part in four:
        if widths[part] == 8:
            key = (layer, expert, part)
            assert np.array_equal(four[key], three[key])


def test_a_model_without_4bit_experts_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 4, expert_bits=8)
    out = tmp_path / "out"
    with pytest.raises(StoreError, match="no 4-bit experts"):
        convert(source, out / "s", experts3bit=True)
    assert not out.exists()
    store = convert(source, out / "s")
    with pytest.raises(StoreError, match="no 4-bit experts"):
        add_3bit(store.path)


def test_a_damaged_4bit_expert_is_named_and_the_store_left_as_it_was(
    source: Path, tmp_path: Path
) -> None:
    store = convert(source, tmp_path / "s")
    flip_bit(store.expert_paths()[1], 3 * store.layout.experts.stride + 5)
    before = sorted(store.path.rglob("*"))
    with pytest.raises(StoreError, match="expert 3 of layer 1 is damaged"):
        add_3bit(store.path)
    assert sorted(store.path.rglob("*")) == before
    assert not Store.open(store.path).has_3bit


def test_files_that_an_interrupted_run_left_are_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = convert(source, tmp_path / "s")

    def stop(path: Path, data: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(three_bit, "write_file", stop)
        with pytest.raises(KeyboardInterrupt):
            add_3bit(store.path)
    assert not Store.open(store.path).has_3bit
    (store.path / "experts-3bit" / "layer_000.bin").write_bytes(b"old")
    assert verify(add_3bit(store.path)).ok


@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
def test_experts_that_cannot_be_read_are_named_and_nothing_is_left(
    tmp_path: Path, damage: str
) -> None:
    store = convert(write_checkpoint(tmp_path / "m", 1), tmp_path / "s")
    path = store.expert_paths()[1]
    if damage == "cut":
        os.truncate(path, store.layout.experts.stride)
    elif damage == "gone":
        path.unlink()
    else:
        flip_bit(path, 2 * store.layout.experts.stride + 7)
    with pytest.raises(StoreError, match=r"layer_001\.bin"):
        write_3bit(store)
    assert not (store.path / "experts-3bit").exists()
    assert not [name for name in store.path.iterdir() if "partial" in name.name]
