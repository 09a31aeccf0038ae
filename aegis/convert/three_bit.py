"""Derive 3-bit expert files from a store's 4-bit ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.checksum import crc32
from aegis.checkpoint.fileio import (
    PIECE_NBYTES,
    UncachedReader,
    aligned_buffer,
    write_file,
)
from aegis.checkpoint.manifest import ROUNDING_3BIT, encode
from aegis.checkpoint.store import EXPERT_FOLDERS, MANIFEST, Store, expert_file
from aegis.convert.behind import Behind
from aegis.convert.build import (
    JOURNAL,
    check_space,
    disk_errors,
    locked,
    partial_folder,
    prepare_parent,
    remove_leftovers,
    telling_what_is_kept,
)
from aegis.convert.journal import Journal, begin_again, keep_finished, unfinished_of
from aegis.convert.records import threads_for, write_records
from aegis.errors import StoreError
from aegis.kernels.base import Weight
from aegis.kernels.formats import pack, requantize_3bit, unpack
from aegis.kernels.sizes import LANES, RECORD_ALIGN, nbytes

U8 = NDArray[np.uint8]


def add_3bit(path: str | Path, progress: Callable[[int, int], None] | None = None) -> Store:
    """Add 3-bit expert files to a store, unless it has them; the store opened again.

    Raises:
        StoreError: the store is damaged, has no 4-bit experts, or cannot be written.
    """
    folder = Path(path).absolute()
    prepare_parent(folder, "they are added to the store itself, so make that possible")
    with (
        disk_errors(folder),
        locked(folder) as alone,
        telling_what_is_kept(folder / EXPERT_FOLDERS["3bit"], by_aegis=False),
    ):
        store = Store.open(folder)
        if not store.has_3bit:
            write_3bit(store, progress, alone=alone)
    return Store.open(folder)


def write_3bit(
    store: Store,
    progress: Callable[[int, int], None] | None = None,
    write_layer: Callable[[Path, int, Behind], tuple[int, ...]] | None = None,
    alone: bool = True,
) -> None:
    """Write the 3-bit files of a store that lacks them; the caller holds the store's lock, or is
    not known to be ``alone``.

    store.json is replaced last, so an interrupted run leaves the store as it was, and what it has
    finished to the next one. ``write_layer`` writes a layer's file and returns its checksums,
    where there is something better to derive it from than the 4-bit one.
    """
    layout = store.layout
    if layout.experts_3bit is None:
        raise StoreError(f"{store.path} has no 4-bit experts to derive 3-bit ones from")
    target = store.path / EXPERT_FOLDERS["3bit"]
    manifest = encode(store.manifest)
    rule = "numbers" if write_layer else f"codes {ROUNDING_3BIT}"
    key = hashlib.sha256(manifest + rule.encode()).hexdigest()
    unfinished = None
    if alone:
        begin_again(target, key)
        unfinished = unfinished_of(target, key)
    kept = unfinished.folder if unfinished else None
    if alone:
        remove_leftovers(store.path, target, kept)
    total, layers = layout.experts_nbytes("3bit"), len(layout.moe_layers)
    check_space(store.path, total - (unfinished.nbytes if unfinished else 0))
    checksums: list[tuple[int, ...]] = []
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    write = write_layer or partial(_convert_layer, store, report)
    with (
        partial_folder(target, True, kept, keep_finished, journal_stays=True) as folder,
        Behind() as behind,
    ):
        journal = unfinished or Journal(folder, key)
        for layer in layout.moe_layers:
            path = folder / expert_file(store.path, layer, "3bit").name
            make = partial(write, path, layer, behind)
            checksums.append(journal.fill(path, total // layers, layout.num_experts, make, behind))
            report(total * len(checksums) // layers - done)
    write_file(store.path / MANIFEST, encode(store.manifest.with_3bit(tuple(checksums))))
    (target / JOURNAL).unlink(missing_ok=True)


class _Source:
    """A layer's 4-bit records."""

    def __init__(self, path: Path, stride: int, checksums: Sequence[int], layer: int) -> None:
        self._path, self._checksums, self._layer = path, checksums, layer
        try:
            self._reader = UncachedReader(path, stride, RECORD_ALIGN)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        self._record = aligned_buffer(stride)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def record(self, expert: int) -> U8:
        """A record that is what was written; it lies where the next one will.

        Raises:
            StoreError: it cannot be read, or is damaged.
        """
        try:
            self._reader.read_into(expert * self._record.size, self._record)
        except (OSError, EOFError) as error:
            raise StoreError(f"{self._path} cannot be read: {error}") from error
        if crc32(self._record) != self._checksums[expert]:
            raise StoreError(
                f"{self._path}: expert {expert} of layer {self._layer} is damaged (checksum"
                " mismatch); convert the model again"
            )
        return self._record


def _convert_layer(
    store: Store, report: Callable[[int], None], target: Path, layer: int, behind: Behind
) -> tuple[int, ...]:
    layout, old, new = store.layout, store.layout.geometry("4bit"), store.layout.geometry("3bit")
    checksums = store.expert_checksums()[layout.moe_layers.index(layer)]

    def opened() -> closing[_Source]:
        return closing(_Source(expert_file(store.path, layer), old.stride, checksums, layer))

    def pieces(source: _Source, expert: int) -> Iterator[tuple[int, U8]]:
        record = source.record(expert)
        for part, before in old.segments.items():
            data, offset = record[before.offset :][: before.nbytes], new.segments[part].offset
            if before.format == new.segments[part].format:
                yield offset, data
                continue
            for piece in _derived(Weight(before.shape, before.format, layout.layout, data)):
                yield offset, piece
                offset += piece.size

    count = layout.num_experts
    threads = threads_for(count, 2 * old.stride + new.stride)
    return write_records(target, new.stride, count, opened, pieces, report, behind, threads)


def _derived(weight: Weight) -> Iterator[U8]:
    """The bytes of a 4-bit weight as a 3-bit one, in pieces."""
    if weight.layout == "row":
        three, fmt = requantize_3bit(unpack(weight, align=RECORD_ALIGN), weight.format)
        yield pack(three, fmt, "row", align=RECORD_ALIGN)
        return
    rows, cols = weight.shape
    few = nbytes((LANES, cols), weight.format, "il16")
    step = max(1, PIECE_NBYTES // few)
    for start in range(0, weight.data.size, step * few):
        data = weight.data[start : start + step * few]
        shape = (min(rows - start // few * LANES, step * LANES), cols)
        three, fmt = requantize_3bit(unpack(replace(weight, shape=shape, data=data)), weight.format)
        yield pack(three, fmt, "il16")
