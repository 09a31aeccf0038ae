"""A source checkpoint: a folder with config.json and one or more safetensors files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from aegis.checkpoint.config import ModelConfig, load_config, read_json
from aegis.checkpoint.plainfile import shown, shown_name
from aegis.checkpoint.safetensors import TensorInfo, read_header
from aegis.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Config and tensors of a checkpoint folder; no tensor data has been read.

    It can be given wherever a checkpoint's path can, so that headers are read only once.
    """

    path: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read config and headers, unless ``path`` is a checkpoint that was opened before.

        Raises:
            CheckpointError: something is missing, damaged or contradicts the index.
        """
        if isinstance(path, cls):
            return path
        folder = Path(path)
        if not os.path.isdir(folder):  # Path's raises where a name is too long
            raise CheckpointError(
                f"{folder} is not a folder with a checkpoint or a store; give the path of one:"
                " models are not downloaded by name"
            )
        config = load_config(folder)
        index = folder / INDEX
        weight_map = _weight_map(index) if os.path.lexists(index) else None
        names = _indexed_files(folder, weight_map) if weight_map else _lone_files(folder)
        tensors: dict[str, TensorInfo] = {}
        for name in names:
            for tensor in read_header(folder / name).values():
                if tensor.name in tensors:
                    other = tensors[tensor.name].path.name
                    raise CheckpointError(
                        f"{folder} holds {shown_name(tensor.name)} in {other} and in {name};"
                        " download both again"
                    )
                tensors[tensor.name] = tensor
        if weight_map:
            _check_index(index, weight_map, tensors)
        return cls(folder, config, tensors, tuple(folder / name for name in names))


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    for name, file in weight_map.items():
        if not _is_file_name(file):
            raise CheckpointError(
                f"{index} places {shown_name(name)} in {shown(file)}, which is no file name;"
                " download it again"
            )
    return weight_map


def _is_file_name(file: object) -> bool:
    """A plain name, which no file system refuses and no terminal chokes on."""
    return (
        isinstance(file, str)
        and Path(file).name == file != ".."
        and file.isprintable()
        and len(os.fsencode(file)) <= 255
    )


def _indexed_files(folder: Path, weight_map: dict[str, str]) -> list[str]:
    """The shards that the index names; all must exist, and no further shard may."""
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).exists():
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
        raise CheckpointError(
            f"{folder} holds no model*.safetensors file; give the folder of a model in MLX's"
            " safetensors format (GGUF and PyTorch files are not read)"
        )
    if present == ["model.safetensors"]:
        return present
    shards = [_SHARD.fullmatch(name) for name in present]
    numbers = {int(shard[1]) for shard in shards if shard}
    totals = {int(shard[2]) for shard in shards if shard}
    # Not a set of all numbers: a file name may claim any total.
    complete = totals == {len(present)} and numbers <= set(range(1, len(present) + 1))
    if not all(shards) or not complete or len(numbers) != len(present):
        raise CheckpointError(
            f"{folder} has no {INDEX} and its files ({', '.join(present[:4])}) are not one"
            " complete set of shards; download the missing ones"
        )
    return present


def _check_index(index: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].path.name != file:
            raise CheckpointError(
                f"{index} places {shown_name(name)} in {file}, which does not hold it; download it"
                " again"
            )
    unlisted = next((name for name in tensors if name not in weight_map), None)
    if unlisted is not None:
        file = tensors[unlisted].path.name
        raise CheckpointError(
            f"{index} does not list {shown_name(unlisted)}, which {file} holds; download it again"
        )
