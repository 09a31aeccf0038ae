"""Re-read a whole store and compare every checksum."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.fileio import PIECE_NBYTES, UncachedReader, aligned_buffer
from aegis.checkpoint.layout import ExpertBits
from aegis.checkpoint.plainfile import FileDamageError, regular_nbytes
from aegis.checkpoint.store import Store

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Damage:
    """One thing whose bytes are not those that were written."""

    file: Path
    what: str
    """For people: ``expert 3 of layer 7``, ``tensor lm_head``, ``the contents``."""
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None
    unreadable: bool = False
    """Nothing in the file could be compared."""


@dataclass(frozen=True)
class VerifyReport:
    """The result of reading everything."""

    checked: int
    """Records, tensors and files compared."""
    checked_nbytes: int
    damaged: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damaged


@dataclass(frozen=True)
class _Item:
    offset: int
    nbytes: int
    crc32: int | None
    """None: zeros, which conversion puts between what it writes."""
    damage: Damage


def verify(store: Store, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Read every byte of the store's files but store.json's, in small pieces.

    What opening refuses (a file that is missing or has another length) is damage like any other
    here: pass a store opened with ``check_sizes=False`` to be told all of it.
    """
    sizes = store.file_sizes()
    batches = list(_batches(store))
    total = sum(item.nbytes for batch in batches for item in batch)
    damaged, done, checked = [], 0, 0
    buffer = aligned_buffer(PIECE_NBYTES)
    for batch in batches:
        file = batch[0].damage.file
        wrong = _wrong_length(file, sizes[file])
        damaged += wrong
        if not any(damage.unreadable for damage in wrong):
            damaged += _damaged(file, batch, buffer)
        checked += sum(item.crc32 is not None for item in batch)
        done += sum(item.nbytes for item in batch)
        if progress:
            progress(done, total)
    return VerifyReport(checked, done, tuple(damaged))


def _wrong_length(file: Path, expected: int) -> list[Damage]:
    try:
        actual = regular_nbytes(file)
    except FileNotFoundError:
        return [Damage(file, "the whole file (missing)", unreadable=True)]
    except FileDamageError as error:
        return [Damage(file, f"the whole file ({error})", unreadable=True)]
    if actual == expected:
        return []
    return [Damage(file, f"the length ({actual} bytes instead of {expected})")]


def _damaged(file: Path, batch: list[_Item], buffer: U8) -> list[Damage]:
    try:
        with UncachedReader(file) as reader:
            return [item.damage for item in batch if not _matches(reader, item, buffer)]
    except OSError as error:
        return [Damage(file, f"the whole file (cannot be read: {error.strerror})", unreadable=True)]


def _matches(reader: UncachedReader, item: _Item, buffer: U8) -> bool:
    crc, zeros = 0, True
    try:
        for start in range(0, item.nbytes, buffer.size):
            piece = buffer[: min(buffer.size, item.nbytes - start)]
            reader.read_into(item.offset + start, piece)
            if item.crc32 is None:
                zeros = zeros and not piece.any()
            else:
                crc = zlib.crc32(piece.data, crc)
    except (OSError, EOFError):
        return False
    return zeros if item.crc32 is None else crc == item.crc32


def _batches(store: Store) -> Iterator[list[_Item]]:
    """What to compare, one list per file."""
    manifest, layout = store.manifest, store.layout
    for name, (size, crc) in manifest.files.items():
        yield [_Item(0, size, crc, Damage(store.path / name, "the contents"))]
    yield list(_resident_items(store))
    if layout.vision_nbytes:
        damage = Damage(store.vision_path, "the contents")
        yield [_Item(0, layout.vision_nbytes, manifest.vision_crc32, damage)]
    kinds: dict[ExpertBits, tuple[tuple[int, ...], ...] | None] = {
        "4bit": manifest.experts_crc32,
        "3bit": manifest.experts_3bit_crc32,
    }
    for kind, checksums in kinds.items():
        if checksums is None:
            continue
        stride = layout.geometry(kind).stride
        files = store.expert_paths(kind)
        for layer, file, layer_checksums in zip(layout.moe_layers, files, checksums, strict=True):
            yield [
                _Item(
                    expert * stride,
                    stride,
                    crc,
                    Damage(file, f"expert {expert} of layer {layer}", layer=layer, expert=expert),
                )
                for expert, crc in enumerate(layer_checksums)
            ]


def _resident_items(store: Store) -> Iterator[_Item]:
    """Every tensor, and the padding behind it."""
    file = store.resident_path
    tensors = list(store.layout.resident.items())
    ends = [tensor.offset for _, tensor in tensors[1:]] + [store.layout.resident_file_nbytes]
    for (name, tensor), following in zip(tensors, ends, strict=True):
        crc = store.manifest.resident_crc32[name]
        yield _Item(tensor.offset, tensor.nbytes, crc, Damage(file, f"tensor {name}", tensor=name))
        end = tensor.offset + tensor.nbytes
        if end < following:
            what = f"the padding behind tensor {name}"
            yield _Item(end, following - end, None, Damage(file, what, tensor=name))
