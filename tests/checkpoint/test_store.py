"""Stores: sizes known beforehand, damage found at open or while loading."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from damages import directory, manifest, pipe
from numpy.typing import NDArray
from stores import edit_json, flip_bit
from strategies import write_checkpoint

from aegis.checkpoint.layout import ExpertBits
from aegis.checkpoint.manifest import decode, encode
from aegis.checkpoint.store import Store, is_store
from aegis.convert.convert import convert
from aegis.convert.layout import layout_of_checkpoint
from aegis.errors import StoreError
from aegis.kernels.base import Layout
from aegis.models import check_layout


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    source = write_checkpoint(folder / "m", 3, bits=(4, 8, 3))
    return convert(source, folder / "s", experts3bit=False).path


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "s"))


def resident_buffer(store: Store, skip: tuple[str, ...] = ()) -> NDArray[np.uint8]:
    return np.empty(store.layout.resident_nbytes(skip), np.uint8)


def test_a_store_is_told_from_a_checkpoint(pristine: Path) -> None:
    assert is_store(pristine)
    assert not is_store(pristine.parent / "m")


def test_store_json_round_trips(pristine: Path) -> None:
    data = (pristine / "store.json").read_bytes()
    assert encode(decode(data, "store.json")) == data


def test_planning_sizes_need_neither_data_nor_an_array_library(pristine: Path) -> None:
    code = (
        "import sys; from aegis.checkpoint.store import Store;"
        "from aegis.convert.layout import layout_of_checkpoint;"
        f"a = layout_of_checkpoint({str(pristine.parent / 'm')!r});"
        f"b = Store.open({str(pristine)!r}).layout;"
        "assert a.resident == b.resident and a.experts == b.experts;"
        "assert a.resident_nbytes() == b.resident_nbytes();"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=pristine)


@pytest.mark.parametrize("layout", ["il16", "row"])
def test_files_have_exactly_the_sizes_computed_from_headers(tmp_path: Path, layout: Layout) -> None:
    source = write_checkpoint(tmp_path / "m", 5, bits=(4, 3))
    plan = layout_of_checkpoint(source, layout)
    store = convert(source, tmp_path / "s", layout=layout, experts3bit=True)
    assert store.resident_path.stat().st_size == plan.resident_file_nbytes
    kinds: list[ExpertBits] = ["4bit", "3bit"]
    for bits in kinds:
        sizes = [path.stat().st_size for path in store.expert_paths(bits)]
        assert sum(sizes) == plan.experts_nbytes(bits)
        assert set(sizes) == {plan.num_experts * plan.geometry(bits).stride}


def test_records_follow_the_alignment_rules(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 5)
    cases: list[tuple[Layout, int]] = [("il16", 64), ("row", 4096)]
    for layout, align in cases:
        geometry = layout_of_checkpoint(source, layout).experts
        assert list(geometry.segments) == ["gate_proj", "up_proj", "down_proj"]
        end = 0
        for segment in geometry.segments.values():
            assert segment.offset >= end
            assert segment.offset % align == 0
            end = segment.offset + segment.nbytes
        assert geometry.record_nbytes == end
        assert geometry.stride % 4096 == 0
        assert geometry.stride >= end + 64


def test_every_resident_tensor_starts_on_a_page_of_the_file(pristine: Path) -> None:
    layout = Store.open(pristine).layout
    assert all(tensor.offset % 4096 == 0 for tensor in layout.resident.values())


def test_an_embedding_range_holds_the_row_of_its_token(pristine: Path) -> None:
    store = Store.open(pristine)
    weights = store.load_resident(resident_buffer(store))
    span, table = store.layout.embedding_range, store.layout.embedding
    assert span is not None
    whole = weights["embed_tokens"].data
    for token in (0, 17, 511):
        start = token // span.rows * span.nbytes
        data = np.fromfile(store.resident_path, np.uint8, span.nbytes, offset=table.offset + start)
        assert np.array_equal(data, whole[start : start + span.nbytes])


def test_skipped_tensors_take_no_memory_and_the_rest_is_the_same(pristine: Path) -> None:
    store = Store.open(pristine)
    whole = store.load_resident(resident_buffer(store))
    skip = ("embed_tokens",)
    partial = store.load_resident(resident_buffer(store, skip), skip)
    assert set(whole) - set(partial) == set(skip)
    assert all(np.array_equal(whole[n].data, w.data) for n, w in partial.items())
    saved = store.layout.resident_nbytes() - store.layout.resident_nbytes(skip)
    assert saved >= store.layout.embedding.nbytes
    with pytest.raises(ValueError, match="smaller"):
        store.load_resident(resident_buffer(store, skip))


def test_a_damaged_resident_tensor_is_named_when_it_is_loaded(folder: Path) -> None:
    tensor = Store.open(folder).layout.resident["layers.1.self_attn.k_proj"]
    flip_bit(folder / "resident.bin", tensor.offset + tensor.nbytes - 1)
    store = Store.open(folder)
    with pytest.raises(StoreError, match=r"layers\.1\.self_attn\.k_proj is damaged"):
        store.load_resident(resident_buffer(store))
    unchecked = Store.open(folder, verify_resident=False)
    unchecked.load_resident(resident_buffer(unchecked))


def truncate(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate((folder / name).stat().st_size - 1)

    return damage


def unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def set_key(**keys: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "store.json", lambda data: data.update(keys))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate("resident.bin"), "resident.bin has .* bytes, but"),
        (truncate("experts/layer_001.bin"), "layer_001.bin has .* bytes, but"),
        (truncate("tokenizer.json"), "tokenizer.json has .* bytes, but"),
        (truncate("store.json"), "store.json is damaged"),
        (unlink("experts/layer_000.bin"), "layer_000.bin is missing"),
        (unlink("resident.bin"), "resident.bin is missing"),
        (unlink("store.json"), "is not a store"),
        (directory("resident.bin"), "resident.bin is a directory"),
        (pipe("experts/layer_000.bin"), "layer_000.bin is not a regular file"),
        (directory("store.json"), "store.json is a directory"),
        (manifest(lambda d: d.update(format_version=99)), "version 99"),
        (set_key(format="x"), "not describe"),
        (set_key(num_experts=5), "checksum"),
        (lambda f: (f / "store.json").write_text("[]"), "is damaged"),
    ],
)
def test_a_damaged_store_is_refused_at_open(
    folder: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(folder)
    with pytest.raises(StoreError, match=words):
        Store.open(folder)


def test_any_flipped_bit_of_store_json_is_noticed(folder: Path) -> None:
    data = (folder / "store.json").read_bytes()
    rng = np.random.default_rng(0)
    for offset in rng.integers(0, len(data), 60):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << int(rng.integers(0, 8))
        with pytest.raises(StoreError):
            decode(bytes(damaged), "store.json")


def test_missing_3bit_files_name_the_command_that_makes_them(pristine: Path) -> None:
    with pytest.raises(StoreError, match="aegis convert --experts 3bit"):
        Store.open(pristine).expert_paths("3bit")


def edit_experts(**keys: object) -> Callable[[Path], object]:
    return manifest(lambda data: data["experts"].update(keys))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (manifest(lambda d: d.pop("layout")), "no 'layout'"),
        (manifest(lambda d: d.update(layout="x")), "where one of il16, row belongs"),
        (manifest(lambda d: d.update(resident={})), "where a list belongs"),
        (manifest(lambda d: d["resident"].append(d["resident"][0])), "do not follow"),
        (manifest(lambda d: d["files"].update({"tokenizer.json": [1]})), "is damaged"),
        (manifest(lambda d: d["files"].update({"x.bin": [1, 2]})), "is damaged"),
        (manifest(lambda d: d["config"].pop("model_type")), "lacks model_type"),
        (manifest(lambda d: d.update(moe_layers=[1, 0])), "not in order"),
        (edit_experts(crc32=[[1]]), "lacks checksums"),
        (
            manifest(lambda d: (d.update(moe_layers=[]), d["experts"].update(crc32=[]))),
            "not in order",
        ),
        (edit_experts(stride=4096), "do not follow"),
        (
            manifest(lambda d: d["experts"]["segments"]["up_proj"].update(shape=[2, 64, 64])),
            r"up_proj has the shape \[2, 64, 64\]",
        ),
        (
            manifest(lambda d: d["experts"]["segments"]["up_proj"]["format"].update(kind="mxfp4")),
            "mxfp4 is codes of 4 bits in groups of 32",
        ),
        (
            manifest(lambda d: d["experts"]["segments"]["up_proj"]["format"].update(dtype="e8m0")),
            "mxfp4 is codes of 4 bits in groups of 32",
        ),
        (
            manifest(lambda d: d["resident"][0]["format"].update(kind="dense")),
            "where 0 to 0 belongs",
        ),
        (
            manifest(lambda d: d["resident"][1]["format"].update(dtype="bf16")),
            "a vector that is not plain f32",
        ),
        (
            lambda f: (f / "store.json").write_text('{"format":"aegis store","format_version":2}'),
            "no checksum",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    folder: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(folder)
    with pytest.raises(StoreError, match=words):
        Store.open(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (manifest(lambda d: d["config"].update(num_hidden_layers=1)), "which its model lacks"),
        (
            manifest(lambda d: d["config"].update(num_hidden_layers=3)),
            r"lacks the tensor layers\.2",
        ),
        (manifest(lambda d: d["config"].update(vocab_size=600)), "embed_tokens with the shape"),
        (manifest(lambda d: d["config"].update(moe_intermediate_size=128)), "other experts"),
    ],
)
def test_a_store_that_its_config_does_not_describe_is_refused(
    folder: Path, damage: Callable[[Path], object], words: str
) -> None:
    check_layout(Store.open(folder).layout)
    damage(folder)
    with pytest.raises(StoreError, match=words):
        check_layout(Store.open(folder).layout)


def test_copied_files_are_compared_when_asked(folder: Path) -> None:
    store = Store.open(folder)
    store.check_copied()
    flip_bit(folder / "tokenizer.json", 50)
    with pytest.raises(StoreError, match=r"tokenizer\.json is damaged"):
        store.check_copied()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StoreError, match=r"tokenizer\.json is damaged"):
        store.check_copied()


def test_a_skipped_tensor_is_checked_though_it_takes_no_memory(folder: Path) -> None:
    store = Store.open(folder)
    table = store.layout.embedding
    for at in (0, table.nbytes - 1):
        flip_bit(store.resident_path, table.offset + at)
        with pytest.raises(StoreError, match="embed_tokens is damaged"):
            store.load_resident(resident_buffer(store, ("embed_tokens",)), ("embed_tokens",))
        flip_bit(store.resident_path, table.offset + at)
    unchecked = Store.open(folder, verify_resident=False)
    unchecked.load_resident(resident_buffer(store, ("embed_tokens",)), ("embed_tokens",))


def test_a_tensor_larger_than_what_passes_at_once_is_checked_whole(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 1, vocab_size=2000, num_hidden_layers=1)
    store = convert(source, tmp_path / "s")
    table, skip = store.layout.embedding, ("embed_tokens",)
    assert table.nbytes > 2 * (64 << 10)
    store.load_resident(resident_buffer(store, skip), skip)
    for at in (70 << 10, 130 << 10, table.nbytes - 1):
        flip_bit(store.resident_path, table.offset + at)
        with pytest.raises(StoreError, match="embed_tokens is damaged"):
            store.load_resident(resident_buffer(store, skip), skip)
        flip_bit(store.resident_path, table.offset + at)


@pytest.mark.parametrize("change", [lambda p: p.unlink(), lambda p: os.truncate(p, 5000)])
def test_resident_weights_that_vanish_after_opening_are_an_error_in_a_sentence(
    folder: Path, change: Callable[[Path], object]
) -> None:
    store = Store.open(folder)
    change(store.resident_path)
    with pytest.raises(StoreError, match=r"resident\.bin.* cannot be read"):
        store.load_resident(resident_buffer(store))


def test_what_one_row_of_a_table_takes_is_known_for_every_layout(tmp_path: Path) -> None:
    quantised = write_checkpoint(tmp_path / "q", 1)
    assert layout_of_checkpoint(quantised, "row").embedding_range is None
    dense = write_checkpoint(tmp_path / "d", 1, dense=True)
    span = layout_of_checkpoint(dense, "row").embedding_range
    assert span is not None
    assert (span.rows, span.nbytes) == (1, 128 * 2)
