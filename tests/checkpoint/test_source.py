"""Checkpoint folders: one file or shards, complete or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from stores import edit_json
from strategies import write_checkpoint

from aegis.checkpoint.source import INDEX, Checkpoint
from aegis.errors import CheckpointError

SHARDS = [f"model-{n}-of-00003.safetensors" for n in ("00001", "00002", "00003")]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", 1, shards=3)


def test_shards_hold_what_one_file_holds(sharded: Path, tmp_path: Path) -> None:
    single = Checkpoint.open(write_checkpoint(tmp_path / "one", 1))
    several = Checkpoint.open(sharded)
    assert {n: t.shape for n, t in several.tensors.items()} == {
        n: t.shape for n, t in single.tensors.items()
    }
    assert [file.name for file in several.files] == SHARDS


def test_complete_shards_without_an_index_are_read(sharded: Path) -> None:
    expected = set(Checkpoint.open(sharded).tensors)
    (sharded / INDEX).unlink()
    assert set(Checkpoint.open(sharded).tensors) == expected


@pytest.mark.parametrize("missing", SHARDS)
def test_a_missing_shard_is_refused_with_and_without_an_index(sharded: Path, missing: str) -> None:
    (sharded / missing).unlink()
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        Checkpoint.open(sharded)
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match="complete set of shards"):
        Checkpoint.open(sharded)


def test_a_shard_that_the_index_forgets_is_refused(sharded: Path) -> None:
    def forget(index: dict[str, dict[str, str]]) -> None:
        names = index["weight_map"]
        index["weight_map"] = {n: f for n, f in names.items() if f != SHARDS[1]}

    edit_json(sharded / INDEX, forget)
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]} is not listed"):
        Checkpoint.open(sharded)


def test_an_index_that_covers_only_some_tensors_is_refused(sharded: Path) -> None:
    def keep_layer_0(index: dict[str, dict[str, str]]) -> None:
        names = index["weight_map"]
        index["weight_map"] = {n: f for n, f in names.items() if ".layers.1." not in n}

    edit_json(sharded / INDEX, keep_layer_0)
    with pytest.raises(CheckpointError, match=r"does not list model\.layers\.1"):
        Checkpoint.open(sharded)


def test_an_index_that_names_a_tensor_nobody_holds_is_refused(sharded: Path) -> None:
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update(ghost=SHARDS[0]))
    with pytest.raises(CheckpointError, match="places ghost"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_point_outside_the_folder(sharded: Path, place: object) -> None:
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update(x=place))
    with pytest.raises(CheckpointError, match="no file name"):
        Checkpoint.open(sharded)


def test_an_index_without_a_map_is_refused(sharded: Path) -> None:
    edit_json(sharded / INDEX, lambda index: index.pop("weight_map"))
    with pytest.raises(CheckpointError, match="no weight_map"):
        Checkpoint.open(sharded)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    (sharded / SHARDS[2]).write_bytes((sharded / SHARDS[1]).read_bytes())
    with pytest.raises(CheckpointError, match=r"holds .* in .* and in"):
        Checkpoint.open(sharded)


def test_a_folder_without_weights_or_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a folder .*; give the path of one"):
        Checkpoint.open(tmp_path / "nowhere")
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no model\*\.safetensors file; give"):
        Checkpoint.open(folder)
