"""Ways to damage a checkpoint or a store, each with the words that refusing it must say."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from stores import edit_header, edit_json, flip_bit

Damage = Callable[[Path], object]

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
SCALES = "model.layers.1.mlp.switch_mlp.up_proj.scales"
DEEP = b'{"a":' * 100_000
HUGE_INTEGER = b"9" * 5000
UNKNOWN = {"SpecialToken": {"id": "unheard of", "type_id": 0}}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


@dataclass(frozen=True)
class Case:
    """One kind of damage: what is done to the folder and what the sentence must match."""

    name: str
    damage: Damage
    words: str


def write(name: str, content: bytes) -> Damage:
    """Replace a file's content."""
    return lambda folder: (folder / name).write_bytes(content)


def remove(name: str) -> Damage:
    """Delete a file."""
    return lambda folder: (folder / name).unlink()


def resize(name: str, change: int) -> Damage:
    """Cut a file's end off, or add zeros to it."""

    def damage(folder: Path) -> None:
        size = (folder / name).stat().st_size
        os.truncate(folder / name, max(0, size + change))

    return damage


def halve(name: str) -> Damage:
    """Cut a file in half."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def directory(name: str) -> Damage:
    """Put a directory where a file is expected."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


def pipe(name: str) -> Damage:
    """Put a pipe, which nobody ever writes to, where a file is expected."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def endless(name: str) -> Damage:
    """Put a device that never ends where a file is expected."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")

    return damage


def sparse(name: str, nbytes: int) -> Damage:
    """Make a file look far larger than it can be."""
    return lambda folder: os.truncate(folder / name, nbytes)


def replace(name: str, old: bytes, new: bytes) -> Damage:
    """Change the first appearance of some bytes."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new, 1))

    return damage


def config(**keys: Any) -> Damage:
    """Set keys of config.json; None removes one."""

    def edit(data: dict[str, Any]) -> None:
        data.update(keys)
        for key in [key for key, value in keys.items() if value is None]:
            del data[key]

    return lambda folder: edit_json(folder / "config.json", edit)


def quantization(**keys: Any) -> Damage:
    """Set keys of both spellings of the quantisation entry."""

    def edit(data: dict[str, Any]) -> None:
        for spelling in ("quantization", "quantization_config"):
            data[spelling].update(keys)

    return lambda folder: edit_json(folder / "config.json", edit)


def header(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the safetensors header and leave the data as it is."""
    return lambda folder: edit_header(folder / MODEL, edit)


def entry(name: str, **keys: Any) -> Damage:
    """Set fields of one tensor's header entry."""
    return header(lambda tensors: tensors[name].update(keys))


def raw_header(text: bytes, length: int | None = None) -> Damage:
    """Replace the header's text; ``length`` is what the file claims where that is a lie."""

    def damage(folder: Path) -> None:
        content = (folder / MODEL).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        size = len(text) if length is None else length
        (folder / MODEL).write_bytes(size.to_bytes(8, "little") + text + content[end:])

    return damage


def header_text(change: Callable[[bytes], bytes]) -> Damage:
    """Change the header as text, where JSON could not say it."""

    def damage(folder: Path) -> None:
        content = (folder / MODEL).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        raw_header(change(content[8:end]))(folder)

    return damage


def values(name: str, raw: int) -> Damage:
    """Set the last number of a bf16 tensor."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / MODEL).read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        tensor = json.loads(content[8:start])[name]
        end = start + tensor["data_offsets"][1]
        content[end - 2 : end] = raw.to_bytes(2, "little")
        (folder / MODEL).write_bytes(content)

    return damage


def without(*names: str) -> Damage:
    """Write the tensors anew, leaving some out: the file itself is whole."""
    return rewritten(lambda tensors: [tensors.pop(name) for name in names])


def rewritten(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Write the tensors anew after an edit of {name: (dtype, shape, data)}; the file is whole."""

    def damage(folder: Path) -> None:
        content = (folder / MODEL).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        tensors = {
            name: (t["dtype"], t["shape"], content[start:][slice(*t["data_offsets"])])
            for name, t in json.loads(content[8:start]).items()
            if name != "__metadata__"
        }
        edit(tensors)
        entries, offset = {}, 0
        for name, (dtype, shape, data) in tensors.items():
            span = [offset, offset + len(data)]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
            offset += len(data)
        text = json.dumps(entries).encode()
        data = b"".join(data for _, _, data in tensors.values())
        (folder / MODEL).write_bytes(len(text).to_bytes(8, "little") + text + data)
        (folder / INDEX).unlink(missing_ok=True)

    return damage


def retyped(name: str, dtype: str) -> Damage:
    """Store a tensor of numbers as another type, consistently."""

    def edit(tensors: dict[str, Any]) -> None:
        _, shape, data = tensors[name]
        raw = np.frombuffer(data, np.uint16).astype({"I16": np.int16, "F64": np.float64}[dtype])
        tensors[name] = (dtype, shape, raw.tobytes())

    return rewritten(edit)


def reshaped(name: str, shape: Callable[[list[int]], list[int]]) -> Damage:
    """Give a tensor another shape of as many elements."""

    def edit(tensors: dict[str, Any]) -> None:
        dtype, old, data = tensors[name]
        tensors[name] = (dtype, shape(old), data)

    return rewritten(edit)


def surplus(name: str) -> Damage:
    """Add a tensor that nobody needs."""
    return rewritten(lambda tensors: tensors.update({name: ("F32", [4], bytes(16))}))


def index(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the index of a sharded checkpoint."""
    return lambda folder: edit_json(folder / INDEX, edit)


def added(file: str, *names: str) -> Damage:
    """More tensors at the end of a shard; the file itself is whole."""

    def damage(folder: Path) -> None:
        def edit(tensors: dict[str, Any]) -> None:
            end = max(t["data_offsets"][1] for n, t in tensors.items() if n != "__metadata__")
            spans = ([end + 16 * n, end + 16 * (n + 1)] for n in range(len(names)))
            for name, span in zip(names, spans, strict=True):
                tensors[name] = {"dtype": "F32", "shape": [4], "data_offsets": span}

        edit_header(folder / file, edit)
        with (folder / file).open("ab") as data:
            data.write(bytes(16 * len(names)))

    return damage


def also(*damages: Damage) -> Damage:
    """One after the other."""
    return lambda folder: [damage(folder) for damage in damages]


def tokenizer(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Change tokenizer.json."""
    return lambda folder: edit_json(folder / "tokenizer.json", edit)


def placed(name: str, file: Any) -> Damage:
    """Let the index say that a tensor lies elsewhere."""
    return index(lambda data: data["weight_map"].update({name: file}))


def manifest(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Change store.json as a program would that also corrects its checksum."""

    def damage(folder: Path) -> None:
        path = folder / "store.json"
        data = json.loads(path.read_text())
        del data["crc32"]
        edit(data)
        path.write_bytes(sealed(json.dumps(data, separators=(",", ":")).encode()))

    return damage


def sealed(body: bytes) -> bytes:
    """store.json with a checksum that fits, from the object's text."""
    return b'{"crc32":"%08x",' % zlib.crc32(body[1:]) + body[1:]


def flipped(name: str, offset: int = -1) -> Damage:
    """Flip one bit; negative offsets count from the end."""

    def damage(folder: Path) -> None:
        size = (folder / name).stat().st_size
        flip_bit(folder / name, offset % size)

    return damage


def misnumbered(folder: Path) -> None:
    """Shards that claim to be a few of a thousand million."""
    (folder / INDEX).unlink()
    for number, name in enumerate(SHARDS, 1):
        (folder / name).rename(folder / f"model-{number}-of-{10**9}.safetensors")


def swapped_shards(folder: Path) -> None:
    """Two shards under each other's name."""
    first, second = folder / SHARDS[0], folder / SHARDS[1]
    shutil.move(first, folder / "t")
    shutil.move(second, first)
    shutil.move(folder / "t", second)


def duplicated_shard(folder: Path) -> None:
    """One shard in the place of another."""
    shutil.copyfile(folder / SHARDS[0], folder / SHARDS[1])


def overlapping(tensors: dict[str, Any]) -> None:
    """Two tensors of one size share their bytes."""
    low = tensors["model.layers.0.input_layernorm.weight"]
    high = tensors["model.layers.1.input_layernorm.weight"]
    high["data_offsets"] = low["data_offsets"]


def twice(text: bytes) -> bytes:
    first = text.index(b'"lm_head.biases"')
    end = text.index(b"}", first) + 1
    return b"{" + text[first:end] + b"," + text[1:]
