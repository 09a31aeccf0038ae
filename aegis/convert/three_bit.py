"""Derive 3-bit expert files from a store's 4-bit ones."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.fileio import (
    PIECE_NBYTES,
    UncachedReader,
    UncachedWriter,
    aligned_buffer,
    write_file,
)
from aegis.checkpoint.layout import ExpertGeometry
from aegis.checkpoint.manifest import ROUNDING_3BIT, encode
from aegis.checkpoint.store import EXPERT_FOLDERS, MANIFEST, Store, expert_file
from aegis.convert.build import (
    check_space,
    disk_errors,
    locked,
    partial_folder,
    prepare_parent,
    remove_leftovers,
    telling_what_is_kept,
)
from aegis.convert.journal import Journal, keep_finished, unfinished_of
from aegis.errors import StoreError
from aegis.kernels.base import Layout, Weight
from aegis.kernels.formats import pack, requantize_3bit, unpack
from aegis.kernels.sizes import RECORD_ALIGN, RESIDENT_ALIGN

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
    write_layer: Callable[[Path, int], tuple[int, ...]] | None = None,
    alone: bool = True,
) -> None:
    """Write the 3-bit files of a store that lacks them; the caller holds the store's lock, or is
    not known to be ``alone``.

    store.json is replaced last, so an interrupted run leaves the store as it was, and what it has
    finished to the next one. ``write_layer``
    writes a layer's file and returns its checksums, where there is something better to derive it
    from than the 4-bit one.
    """
    layout = store.layout
    if layout.experts_3bit is None:
        raise StoreError(f"{store.path} has no 4-bit experts to derive 3-bit ones from")
    target = store.path / EXPERT_FOLDERS["3bit"]
    manifest = encode(store.manifest)
    rule = "numbers" if write_layer else f"codes {ROUNDING_3BIT}"
    key = hashlib.sha256(manifest + rule.encode()).hexdigest()
    unfinished = unfinished_of(target, key) if alone else None
    kept = unfinished.folder if unfinished else None
    if alone:
        remove_leftovers(store.path, target, kept)
    total, layers = layout.experts_nbytes("3bit"), len(layout.moe_layers)
    check_space(store.path, total - (unfinished.nbytes if unfinished else 0))
    checksums: list[tuple[int, ...]] = []
    write = write_layer or partial(_convert_layer, store)
    with partial_folder(target, True, kept, keep_finished) as folder:
        journal = unfinished or Journal(folder, key)
        for layer in layout.moe_layers:
            path = folder / expert_file(store.path, layer, "3bit").name
            found = journal.finished(path, total // layers, layout.num_experts)
            if found is None:
                found = write(path, layer)
                journal.note(path, found)
            checksums.append(found)
            if progress:
                progress(total * len(checksums) // layers, total)
    write_file(store.path / MANIFEST, encode(store.manifest.with_3bit(tuple(checksums))))


def _convert_layer(store: Store, target: Path, layer: int) -> tuple[int, ...]:
    layout, old, new = store.layout, store.layout.geometry("4bit"), store.layout.geometry("3bit")
    expected = store.expert_checksums()[layout.moe_layers.index(layer)]
    record, out = aligned_buffer(old.stride), aligned_buffer(new.stride)
    checksums = []
    source = expert_file(store.path, layer)
    with (
        _opened(source) as reader,
        UncachedWriter(target, PIECE_NBYTES) as writer,
    ):
        for expert in range(layout.num_experts):
            try:
                reader.read_into(expert * old.stride, record)
            except (OSError, EOFError) as error:
                raise StoreError(f"{source} cannot be read: {error}") from error
            if zlib.crc32(record.data) != expected[expert]:
                raise StoreError(
                    f"{source}: expert {expert} of layer {layer} is damaged (checksum mismatch);"
                    " convert the model again"
                )
            _convert_record(record, old, out, new, layout.layout)
            checksums.append(zlib.crc32(out.data))
            writer.write(out)
    return tuple(checksums)


def _opened(path: Path) -> UncachedReader:
    try:
        return UncachedReader(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error


def _convert_record(
    record: U8, old: ExpertGeometry, out: U8, new: ExpertGeometry, layout: Layout
) -> None:
    align = RESIDENT_ALIGN if layout == "il16" else RECORD_ALIGN
    for part, before in old.segments.items():
        after = new.segments[part]
        data = record[before.offset : before.offset + before.nbytes]
        target = out[after.offset : after.offset + after.nbytes]
        if before.format == after.format:
            target[:] = data
            continue
        arrays = unpack(Weight(before.shape, before.format, layout, data), align=align)
        three, fmt = requantize_3bit(arrays, before.format)
        pack(three, fmt, layout, align=align, out=target)
