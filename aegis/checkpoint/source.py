"""A source checkpoint: a folder with config.json and one or more safetensors files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from aegis.checkpoint.config import ModelConfig, load_config, read_json
from aegis.checkpoint.safetensors import TensorInfo, read_header
from aegis.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Config and tensors of a checkpoint folder; no tensor data has been read."""

    path: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read config and headers.

        Raises:
            CheckpointError: something is missing, damaged or contradicts the index.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder with a checkpoint or a store")
        config = load_config(folder)
        index = folder / INDEX
        weight_map = _weight_map(index) if index.exists() else None
        names = _indexed_files(folder, weight_map) if weight_map else _lone_files(folder)
        tensors: dict[str, TensorInfo] = {}
        for name in names:
            for tensor in read_header(folder / name).values():
                if tensor.name in tensors:
                    other = tensors[tensor.name].path.name
                    raise CheckpointError(f"{folder} holds {tensor.name} in {other} and in {name}")
                tensors[tensor.name] = tensor
        if weight_map:
            _check_index(index, weight_map, tensors)
        return cls(folder, config, tensors, tuple(folder / name for name in names))


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} places {name} in {file!r}, which is no file name")
    return weight_map


def _indexed_files(folder: Path, weight_map: dict[str, str]) -> list[str]:
    """The shards that the index names; all must exist, and no further shard may."""
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder / name} is missing, though {INDEX} names it; download it again"
            )
    present = {file.name for file in folder.glob("model*.safetensors")}
    unlisted = sorted(present - set(names))
    if unlisted:
        raise CheckpointError(
            f"{folder / unlisted[0]} is not listed in {INDEX}; the index or the file is wrong"
        )
    return names


def _lone_files(folder: Path) -> list[str]:
    """The files of a checkpoint without an index: model.safetensors or all of a set of shards."""
    present = sorted(file.name for file in folder.glob("model*.safetensors"))
    if not present:
        raise CheckpointError(f"{folder} holds no model*.safetensors file")
    if present == ["model.safetensors"]:
        return present
    shards = [_SHARD.fullmatch(name) for name in present]
    numbers = {int(shard[1]) for shard in shards if shard}
    totals = {int(shard[2]) for shard in shards if shard}
    if not all(shards) or len(totals) != 1 or numbers != set(range(1, totals.pop() + 1)):
        raise CheckpointError(
            f"{folder} has no {INDEX} and its files ({', '.join(present[:4])}) are not one"
            " complete set of shards; download the missing ones"
        )
    return present


def _check_index(index: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].path.name != file:
            raise CheckpointError(f"{index} places {name} in {file}, which does not hold it")
    unlisted = next((name for name in tensors if name not in weight_map), None)
    if unlisted is not None:
        file = tensors[unlisted].path.name
        raise CheckpointError(f"{index} does not list {unlisted}, which {file} holds")
