"""A source checkpoint: a folder with config.json and one or more safetensors files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

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
                f"{folder} is not a folder with a checkpoint or a store; give the path of one, or"
                " ORG/NAME of a model on the Hugging Face hub"
            )
        config, index = load_config(folder), _read_index(folder)
        names = shard_names(folder, index, _present(folder))
        tensors = join(folder, index, {name: read_header(folder / name) for name in names})
        return cls(folder, config, tensors, tuple(folder / name for name in names))


def weight_files(folder: Path) -> list[str]:
    """The names of all files with tensors.

    Raises:
        CheckpointError: one is missing or too many, by the index or by the numbers in the names.
    """
    return shard_names(folder, _read_index(folder), _present(folder))


def _present(folder: Path) -> set[str]:
    """What can be opened: not links that lead nowhere."""
    try:
        return {name for name in os.listdir(folder) if (folder / name).exists()}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror})") from error


def _read_index(folder: Path) -> dict[str, Any] | None:
    index = folder / INDEX
    return read_json(index) if os.path.lexists(index) else None


def shard_names(
    folder: Path, index: Mapping[str, Any] | None, present: Collection[str]
) -> list[str]:
    """Which of the files that are ``present`` in a checkpoint folder hold its tensors.

    ``index``: the content of model.safetensors.index.json, if there is one.

    Raises:
        CheckpointError: one is missing or too many.
    """
    if index is None:
        return _lone_files(folder, present)
    return _indexed_files(folder, _weight_map(folder / INDEX, index), present)


def join(
    folder: Path,
    index: Mapping[str, Any] | None,
    headers: Mapping[str, Mapping[str, TensorInfo]],
) -> dict[str, TensorInfo]:
    """The tensors of all files by name; ``headers`` has those of each file.

    Raises:
        CheckpointError: two files hold the same one, or the index says something else.
    """
    tensors: dict[str, TensorInfo] = {}
    for name, header in headers.items():
        for tensor in header.values():
            if tensor.name in tensors:
                other = tensors[tensor.name].path.name
                raise CheckpointError(
                    f"{folder} holds {shown_name(tensor.name)} in {other} and in {name};"
                    " download both again"
                )
            tensors[tensor.name] = tensor
    if index is not None:
        _check_index(folder / INDEX, _weight_map(folder / INDEX, index), tensors)
    return tensors


def _weight_map(index: Path, content: Mapping[str, Any]) -> dict[str, str]:
    weight_map = content.get("weight_map")
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


def _weights_among(present: Collection[str]) -> list[str]:
    return sorted(name for name in present if fnmatchcase(name, "model*.safetensors"))


def _indexed_files(folder: Path, weight_map: dict[str, str], present: Collection[str]) -> list[str]:
    """The shards that the index names; all must exist, and no further shard may."""
    names = sorted(set(weight_map.values()))
    for name in names:
        if name not in present:
            raise CheckpointError(
                f"{folder / name} is missing, though {INDEX} names it; download it again"
            )
    unlisted = [name for name in _weights_among(present) if name not in names]
    if unlisted:
        raise CheckpointError(
            f"{folder / unlisted[0]} is not listed in {INDEX}; the index or the file is wrong"
        )
    return names


def _lone_files(folder: Path, listed: Collection[str]) -> list[str]:
    """The files of a checkpoint without an index: model.safetensors or all of a set of shards."""
    present = _weights_among(listed)
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
