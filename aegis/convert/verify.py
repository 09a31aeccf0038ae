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
from aegis.checkpoint.store import Store

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Damage:
    """One thing whose bytes are not those that were written."""

    file: Path
    what: str
    """For people: ``expert 3 of layer 7``, ``tensor lm_head``, ``file``."""
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None


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
    crc32: int
    damage: Damage


def verify(store: Store, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Read every resident tensor, expert record and copied file, in small pieces."""
    batches = list(_batches(store))
    total = sum(item.nbytes for batch in batches for item in batch)
    damaged, done, checked = [], 0, 0
    buffer = aligned_buffer(PIECE_NBYTES)
    for batch in batches:
        with UncachedReader(batch[0].damage.file) as reader:
            for item in batch:
                if not _matches(reader, item, buffer):
                    damaged.append(item.damage)
                done, checked = done + item.nbytes, checked + 1
        if progress:
            progress(done, total)
    return VerifyReport(checked, done, tuple(damaged))


def _matches(reader: UncachedReader, item: _Item, buffer: U8) -> bool:
    crc = 0
    try:
        for start in range(0, item.nbytes, buffer.size):
            piece = buffer[: min(buffer.size, item.nbytes - start)]
            reader.read_into(item.offset + start, piece)
            crc = zlib.crc32(piece.data, crc)
    except (OSError, EOFError):
        return False
    return crc == item.crc32


def _batches(store: Store) -> Iterator[list[_Item]]:
    """What to compare, one list per file."""
    manifest, layout = store.manifest, store.layout
    for name, (size, crc) in manifest.files.items():
        yield [_Item(0, size, crc, Damage(store.path / name, "the file"))]
    yield [
        _Item(
            t.offset,
            t.nbytes,
            manifest.resident_crc32[name],
            Damage(store.resident_path, f"tensor {name}", tensor=name),
        )
        for name, t in layout.resident.items()
    ]
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
