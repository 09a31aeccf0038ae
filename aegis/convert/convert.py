"""Convert a checkpoint into a store: streaming, atomic, and without filling the page cache."""

from __future__ import annotations

import errno
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.config import COPIED_FILES, QuantSpec
from aegis.checkpoint.fileio import (
    ALIGN,
    PIECE_NBYTES,
    copy_file,
    write_file,
)
from aegis.checkpoint.hub_cache import Origin, revisions_at
from aegis.checkpoint.layout import ExpertGeometry, StoreLayout
from aegis.checkpoint.manifest import Checksums, Manifest, encode
from aegis.checkpoint.overlapped import OverlappedWriter
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import (
    EXPERT_FOLDERS,
    MANIFEST,
    RESIDENT,
    VISION,
    Store,
    expert_file,
    is_store,
)
from aegis.convert.behind import Behind
from aegis.convert.build import (
    ELSEWHERE,
    JOURNAL,
    check_space,
    disk_errors,
    locked,
    partial_folder,
    prepare_parent,
    remove_leftovers,
    telling_what_is_kept,
)
from aegis.convert.identity import identity_of, model_name
from aegis.convert.journal import Journal, keep_finished, unfinished_of
from aegis.convert.layout import layout_of, resolve_checkpoint
from aegis.convert.names import ExpertSource, Resolved
from aegis.convert.records import RUN, Threads, is_large, threads_for, write_records
from aegis.convert.source_data import Streams, ahead_nbytes, packed
from aegis.convert.targets import in_3bit
from aegis.convert.three_bit import write_3bit
from aegis.convert.verify import verify
from aegis.convert.vision import write_vision
from aegis.errors import CheckpointError, StoreError
from aegis.kernels.base import Layout
from aegis.kernels.sizes import RECORD_ALIGN, RESIDENT_ALIGN

U8 = NDArray[np.uint8]
Progress = Callable[[int, int], None]
"""Called with the bytes written so far and in all."""

_COPIED_LIMIT_NBYTES = 1 << 30


def convert(
    source: str | PathLike[str],
    destination: str | Path,
    *,
    layout: Layout = "il16",
    experts3bit: bool = False,
    quantize: QuantSpec | None = None,
    progress: Progress | None = None,
    piece_nbytes: int = PIECE_NBYTES,
    replace_damaged: bool = False,
    announce: Callable[[str], None] | None = None,
) -> Store:
    """Convert a checkpoint folder into a store at ``destination`` and open it.

    A store of the same checkpoint and layout that is there already is used. ``quantize``: a plain
    checkpoint is quantised meanwhile, as ``mlx_lm.convert`` does it; its 3-bit experts then come
    from the numbers themselves, else from the 4-bit codes. ``piece_nbytes``
    bounds each buffer; the whole conversion holds a few of them and two expert records.
    ``announce`` is told what it takes of the disk before anything is written. What another
    conversion of the same source with the same options finished before it was ended or killed is
    not done again; a note on the exception says what is kept.
    ``replace_damaged``: a store at ``destination`` that cannot be opened, or whose checksums
    are not those of its contents, is converted anew.

    Raises:
        CheckpointError: the source is damaged, incomplete or not supported.
        StoreError: the destination cannot be written, or holds something else.
        UsageError: there is no such quantisation.
    """
    if is_store(source):
        raise StoreError(f"{source} is a store already; only checkpoints are converted")
    target = Path(destination).absolute()
    checkpoint, resolved = resolve_checkpoint(Checkpoint.open(source), quantize)
    plan = layout_of(checkpoint, resolved, layout)
    identity = identity_of(checkpoint, quantize)
    job = _Job(checkpoint, resolved, plan, quantize, experts3bit, progress, piece_nbytes)
    return make_store(target, identity, job, experts3bit, replace_damaged, announce)


class StoreJob(Protocol):
    """What fills a store."""

    plan: StoreLayout
    disk_nbytes: int
    """What it writes in all."""

    def report_nothing(self) -> None:
        """Show that it has not begun."""

    def write(self, folder: Path, identity: str, journal: Journal) -> None:
        """Write every file of the store; what the journal names is there, and what is noted in it
        need not be written again should the process be killed."""

    def write_3bit(self, store: Store, alone: bool) -> None:
        """Add 3-bit experts to a store that lacks them; ``alone``: nobody else does so now."""


def make_store(
    target: Path,
    identity: str,
    job: StoreJob,
    experts3bit: bool,
    replace_damaged: bool,
    announce: Callable[[str], None] | None = None,
) -> Store:
    """The store at ``target``, filled by ``job`` unless it is there already; it appears whole or
    not at all. The other arguments are those of ``convert``.

    Raises:
        StoreError: it cannot be written, or something else is there.
    """
    hint = ELSEWHERE if replace_damaged else "choose a destination on another disk"
    prepare_parent(target)
    with (
        disk_errors(target.parent, hint),
        locked(target, job.report_nothing) as alone,
        telling_what_is_kept(target, by_aegis=not os.path.lexists(target)),
    ):
        key = _key(job.plan, identity, experts3bit)
        found = _existing(target, job.plan.layout, identity, replace_damaged)
        unfinished = unfinished_of(target, key) if alone and found is None else None
        kept = unfinished.folder if unfinished else None
        if alone:
            remove_leftovers(target.parent, target, kept)
        if found is not None and alone:
            # Of builds that were killed when all was done.
            (target / JOURNAL).unlink(missing_ok=True)
            if found.has_3bit:
                (target / EXPERT_FOLDERS["3bit"] / JOURNAL).unlink(missing_ok=True)
        if found is None:
            there = unfinished.nbytes if unfinished else 0
            needed = check_space(target.parent, job.disk_nbytes - there, hint)
            if announce:
                before = f", beside {there >> 20} MiB that are there already" if there else ""
                announce(needed + before)
            with partial_folder(target, replace_damaged, kept, keep_finished) as folder:
                job.write(folder, identity, unfinished or Journal(folder, key))
            found = Store.open(target)
        elif experts3bit and not found.has_3bit:
            with telling_what_is_kept(found.path / EXPERT_FOLDERS["3bit"], by_aegis=False):
                job.write_3bit(found, alone)
            found = Store.open(target)
    return found


def _key(plan: StoreLayout, identity: str, experts3bit: bool) -> str:
    """Of a conversion that may go on with what another one left: all that its bytes follow from."""
    none = dict.fromkeys(plan.resident, 0)
    described = encode(Manifest(plan, none, (), source={"identity": identity}))
    return hashlib.sha256(described + bytes([experts3bit])).hexdigest()


def _is_damage(error: StoreError) -> bool:
    """Whether it is the store that is wrong, rather than a process that may not read it now."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno not in (errno.EIO, errno.ENOTDIR):
            return False
        cause = cause.__cause__
    return True


def _existing(target: Path, layout: Layout, identity: str, replace_damaged: bool) -> Store | None:
    """The store that is already there, if it is the one wanted; None: it has to be made."""
    if target.is_symlink() and not is_store(target) and not replace_damaged:
        raise StoreError(
            f"{target} is a symbolic link, which a store cannot take the place of; name the folder"
            " that it points to"
        )
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not is_store(target):
        if replace_damaged:
            return None
        raise StoreError(f"{target} exists and is not a store; choose another destination")
    try:
        store = Store.open(target)
    except StoreError as error:
        if not _is_damage(error):
            raise
        if replace_damaged:
            return None
        raise StoreError(
            f"{target} holds a store that cannot be used; remove it or choose another destination"
            f" ({error})"
        ) from error
    if store.layout.layout != layout or store.manifest.source.get("identity") != identity:
        raise StoreError(
            f"{target} holds the store of another checkpoint or layout; remove it or choose"
            " another destination"
        )
    if replace_damaged and not verify(store).ok:
        return None
    return store


class _Job:
    """One conversion into a folder of its own."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        resolved: Resolved,
        plan: StoreLayout,
        quantize: QuantSpec | None,
        experts3bit: bool,
        progress: Progress | None,
        piece_nbytes: int,
    ) -> None:
        self._checkpoint, self._resolved, self.plan = checkpoint, resolved, plan
        self._quantize, self._experts3bit = quantize, experts3bit
        self._progress, self._piece_nbytes = progress, piece_nbytes
        self._done = 0
        self.total_nbytes = plan.nbytes(experts3bit)
        self._copied = {
            name: path
            for name in COPIED_FILES
            if (path := checkpoint.path / name).is_file()
            and path.stat().st_size <= _COPIED_LIMIT_NBYTES
        }
        self.disk_nbytes = self.total_nbytes + sum(p.stat().st_size for p in self._copied.values())

    def report_nothing(self) -> None:
        """Show that it has not begun."""
        self._report(0)

    def _report(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(self._done, self.total_nbytes)

    def write(self, folder: Path, identity: str, journal: Journal) -> None:
        """Write every file of the store that the journal lacks; store.json comes last.

        Raises:
            CheckpointError: the checkpoint was changed meanwhile.
        """
        files = self._copy_files(folder)
        with Behind() as behind:
            resident = self._resident(folder / RESIDENT, journal, behind)
            experts = self._experts(folder, journal, behind)
            vision = self._vision(folder / VISION, journal, behind)
        path = self._checkpoint.path
        source: dict[str, Any] = {"name": model_name(path), "identity": identity}
        if (origin := Origin.of(path)) is not None:
            revisions = revisions_at(path)
            source |= {"repo": origin.repo, "commit": origin.commit, "revisions": revisions}
        if self._quantize is not None:
            plain = identity_of(self._checkpoint)
            source |= {"quantized": asdict(self._quantize), "plain_identity": plain}
        if identity_of(self._checkpoint, self._quantize) != identity:
            raise CheckpointError(
                f"{self._checkpoint.path} was changed while it was converted; convert it again"
            )
        manifest = Manifest(
            self.plan, resident, experts, files=files, vision_crc32=vision, source=source
        )
        write_file(folder / MANIFEST, encode(manifest))
        if self._experts3bit:
            self.write_3bit(Store.open(folder))

    def _copy_files(self, folder: Path) -> dict[str, tuple[int, int]]:
        for name in COPIED_FILES:  # Also one that was there when another process copied them.
            (folder / name).unlink(missing_ok=True)
        return {name: copy_file(path, folder / name) for name, path in self._copied.items()}

    def _resident(self, path: Path, journal: Journal, behind: Behind) -> dict[str, int]:
        names, nbytes = self.plan.resident, self.plan.resident_file_nbytes
        make = partial(self._write_resident, path, behind)
        made = journal.fill(path, nbytes, len(names), make, behind, self._report)
        return dict(zip(names, made, strict=True))

    def _write_resident(self, path: Path, behind: Behind) -> list[int]:
        checksums = []
        with ExitStack() as file, Streams(self._piece_nbytes) as streams:
            writer = file.enter_context(OverlappedWriter(path, self._piece_nbytes))
            for name, tensor in self.plan.resident.items():
                weight = self._resolved.resident[name]
                crc, start = 0, writer.written
                rows = range(weight.shape[0])
                for piece in packed(
                    streams, "r", weight, rows, tensor.format, self.plan.layout, RESIDENT_ALIGN
                ):
                    crc = zlib.crc32(piece.data, crc)
                    writer.write(piece)
                checksums.append(crc)
                writer.pad_to(RECORD_ALIGN)
                self._report(writer.written - start)
            behind.first(file.pop_all().close)
        return checksums

    def _experts(self, folder: Path, journal: Journal, behind: Behind) -> Checksums:
        (folder / EXPERT_FOLDERS["4bit"]).mkdir(exist_ok=True)
        layers, count = [], self.plan.num_experts
        nbytes = self.plan.experts.stride * count
        for layer in self.plan.moe_layers:
            path = expert_file(folder, layer)
            sources = self._resolved.experts[layer]
            make = partial(self._write_layer, path, self.plan.experts, sources, behind)
            layers.append(journal.fill(path, nbytes, count, make, behind, self._report))
        return tuple(layers)

    def _vision(self, path: Path, journal: Journal, behind: Behind) -> int:
        nbytes = self.plan.vision_nbytes
        if not nbytes:
            return 0

        def make() -> list[int]:
            with Streams(self._piece_nbytes) as streams:
                return [write_vision(path, self._resolved.vision, streams, self._report)]

        return journal.fill(path, nbytes, 1, make, behind, self._report)[0]

    def write_3bit(self, store: Store, alone: bool = True) -> None:
        """Add 3-bit experts, from a plain checkpoint's own numbers rather than from 4-bit codes."""
        geometry = self.plan.geometry("3bit")
        self._done = start = self.total_nbytes - self.plan.experts_nbytes("3bit")

        def progress(done: int, _: int) -> None:
            self._report(start + done - self._done)

        if self._quantize is None:
            write_3bit(store, progress, alone=alone)
            return

        def write_layer(path: Path, layer: int, behind: Behind) -> tuple[int, ...]:
            sources = in_3bit(self._resolved.experts[layer])
            return self._write_layer(path, geometry, sources, behind)

        write_3bit(store, progress, write_layer, alone)

    def _write_layer(
        self,
        path: Path,
        geometry: ExpertGeometry,
        sources: Mapping[str, ExpertSource],
        behind: Behind,
    ) -> tuple[int, ...]:
        """The file of a layer's records; their checksums."""
        count = self.plan.num_experts
        turned = any(weight.transposed for source in sources.values() for weight in source.weights)
        reading = [ahead_nbytes(source.of(0)[0], source.rows, RUN) for source in sources.values()]
        threads = threads_for(count, geometry.stride + sum(reading))
        if turned:
            threads = Threads(1, RUN)  # A whole matrix is in memory to turn it.
        opened = partial(Streams, max(ALIGN, self._piece_nbytes // 2), threads.run)
        pieces = partial(self._pieces, geometry, sources)
        return write_records(
            path,
            geometry.stride,
            count,
            opened,
            pieces,
            self._report,
            behind,
            threads,
            self._piece_nbytes,
        )

    def _pieces(
        self,
        geometry: ExpertGeometry,
        sources: Mapping[str, ExpertSource],
        streams: Streams,
        expert: int,
    ) -> Iterator[tuple[int, U8]]:
        """The parts of a record in pieces, and where in the record these lie."""
        layout, together = self.plan.layout, not is_large(geometry.stride)
        align = RESIDENT_ALIGN if layout == "il16" else RECORD_ALIGN
        groups: dict[str, dict[str, Iterator[U8]]] = {}
        ends = {part: segment.offset for part, segment in geometry.segments.items()}
        for part, segment in geometry.segments.items():
            weight, first = sources[part].of(expert)
            rows = range(first, first + sources[part].rows)
            pieces = packed(streams, part, weight, rows, segment.format, layout, align)
            # Weights whose rows are in turn need the same bytes, which are read once for both.
            shared = together and weight.turn != (0, 1)
            groups.setdefault(weight.name if shared else part, {})[part] = pieces
        for group in groups.values():
            for part, piece in _in_step(group):
                yield ends[part], piece
                ends[part] += piece.size


def _in_step(streams: Mapping[str, Iterator[U8]]) -> Iterator[tuple[str, U8]]:
    """The next piece of each, with its name, until none has more."""
    for pieces in zip_longest(*streams.values()):
        for name, piece in zip(streams, pieces, strict=True):
            if piece is not None:
                yield name, piece
