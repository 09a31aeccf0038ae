"""Writing the store of a synthetic model: in place, atomically, as fast as the disk takes it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.checksum import crc32
from aegis.checkpoint.fileio import (
    aligned_buffer,
    sync_folder,
    write_file,
    write_pieces,
)
from aegis.checkpoint.layout import PARTS, ExpertBits
from aegis.checkpoint.manifest import Checksums, Manifest, encode
from aegis.checkpoint.overlapped import OverlappedWriter
from aegis.checkpoint.store import EXPERT_FOLDERS, MANIFEST, RESIDENT, Store, expert_file
from aegis.convert.convert import Progress, make_store
from aegis.convert.journal import Journal
from aegis.convert.three_bit import write_3bit
from aegis.kernels.base import Layout
from aegis.kernels.formats import MlxArrays, requantize_3bit
from aegis.kernels.sizes import LANES, RECORD_ALIGN
from aegis.synthetic.numbers import Pool, common_direction, packed_matrix, random_rows
from aegis.synthetic.recipe import Recipe
from aegis.synthetic.structure import Structure, random_bits, random_words

_STARTS = 512
"""Places in a layer's pool at which an expert's rows may begin."""
_WRITE_NBYTES = 4 << 20


def make(
    recipe: Recipe,
    destination: Path,
    layout: Layout,
    *,
    experts3bit: bool = False,
    progress: Progress | None = None,
    replace_damaged: bool = False,
) -> Store:
    """The store at ``destination``, written unless it is there already.

    ``replace_damaged``: a damaged one is written anew.

    Raises:
        StoreError: it cannot be written, or something else is there.
    """
    job = _Job(recipe, layout, experts3bit, progress)
    return make_store(destination, recipe.identity, job, experts3bit, replace_damaged)


class _Job:
    """One store into a folder of its own."""

    def __init__(
        self, recipe: Recipe, layout: Layout, experts3bit: bool, progress: Progress | None
    ) -> None:
        self._recipe, self.plan, self._progress = recipe, recipe.layout(layout), progress
        self._structure = Structure(recipe.description, recipe.seed)
        bits = random_bits(recipe.seed, "the common direction")
        self._common = common_direction(bits, recipe.description.shape.hidden_size)
        self._kinds: tuple[ExpertBits, ...] = ("4bit", "3bit") if experts3bit else ("4bit",)
        self._done = 0
        self._total_nbytes = self.plan.nbytes(experts3bit)
        self.disk_nbytes = self._total_nbytes + recipe.tokenizer_nbytes

    def report_nothing(self) -> None:
        """Show that it has not begun."""
        self._report(0)

    def _report(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(self._done, self._total_nbytes)

    def write(self, folder: Path, identity: str, journal: Journal) -> None:
        """Write every file of the store; store.json comes last. Nothing is noted in the journal:
        what was killed is soon written anew."""
        small = self._recipe.files().items()
        files = {name: write_pieces(folder / name, pieces) for name, pieces in small}
        resident = self._write_resident(folder)
        experts = self._write_experts(folder)
        source = {"name": self._recipe.name, "identity": identity}
        manifest = Manifest(
            self.plan,
            resident,
            experts["4bit"],
            experts.get("3bit"),
            files=files,
            source=source,
        )
        write_file(folder / MANIFEST, encode(manifest))

    def write_3bit(self, store: Store, alone: bool) -> None:
        """Add 3-bit experts to a store that lacks them."""
        self._done = self._total_nbytes - self.plan.experts_nbytes("3bit")
        write_3bit(
            store,
            None,
            lambda path, layer, _: self._write_layer({"3bit": path}, layer)["3bit"],
            alone,
        )

    def _write_resident(self, folder: Path) -> dict[str, int]:
        checksums = {}
        with OverlappedWriter(folder / RESIDENT, _WRITE_NBYTES) as writer:
            for name in self.plan.resident:
                crc, start = 0, writer.written
                for piece in self._pieces(name):
                    crc = zlib.crc32(piece.data, crc)
                    writer.write(piece)
                checksums[name] = crc
                writer.pad_to(RECORD_ALIGN)
                self._report(writer.written - start)
        return checksums

    def _pieces(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The bytes of a resident tensor."""
        tensor, plan = self.plan.resident[name], self.plan
        if len(tensor.shape) == 1:
            yield self._structure.vector(name, tensor.shape[0]).view(np.uint8)
            return
        rows, cols = tensor.shape
        noise = self._structure.matrix(name, (rows, cols))
        bits = random_bits(self._recipe.seed, name)
        yield from packed_matrix(
            bits, noise, (rows, cols), tensor.format, plan.layout, self._common
        )

    def _write_experts(self, folder: Path) -> dict[ExpertBits, Checksums]:
        for kind in self._kinds:
            (folder / EXPERT_FOLDERS[kind]).mkdir()
        layers = []
        for layer in self.plan.moe_layers:
            paths = {kind: expert_file(folder, layer, kind) for kind in self._kinds}
            layers.append(self._write_layer(paths, layer))
        for kind in self._kinds:
            sync_folder(folder / EXPERT_FOLDERS[kind])
        return {kind: tuple(found[kind] for found in layers) for kind in self._kinds}

    def _write_layer(
        self, paths: Mapping[ExpertBits, Path], layer: int
    ) -> dict[ExpertBits, tuple[int, ...]]:
        """A layer's records of each kind; their checksums.

        Every expert has other runs of rows of one pool: what fills the files is copied."""
        bits = random_bits(self._recipe.seed, f"experts of layer {layer}")
        arrays = {part: self._pool_rows(bits, part, layer) for part in PARTS}
        starts = random_words(bits, self.plan.num_experts * len(PARTS)) % np.uint64(_STARTS)
        checksums = {}
        for kind, path in paths.items():
            pools = {part: self._pool(arrays[part], part, kind) for part in PARTS}
            checksums[kind] = self._write_records(path, kind, pools, starts.tolist())
        return checksums

    def _pool_rows(self, bits: np.random.PCG64, part: str, layer: int) -> MlxArrays:
        segment = self.plan.experts.segments[part]
        rows, cols = segment.shape
        noise = self._structure.expert(part, layer)
        shape = (rows + (_STARTS - 1) * LANES, cols)
        return random_rows(bits, noise, 0, shape, segment.format, self._common)

    def _pool(self, arrays: MlxArrays, part: str, kind: ExpertBits) -> Pool:
        before = self.plan.experts.segments[part].format
        segment = self.plan.geometry(kind).segments[part]
        if segment.format != before:
            arrays, _ = requantize_3bit(arrays, before)
        return Pool(arrays, segment, self.plan.layout)

    def _write_records(
        self, path: Path, kind: ExpertBits, pools: Mapping[str, Pool], starts: list[int]
    ) -> tuple[int, ...]:
        """Padding and biases are zero from the start and never written."""
        geometry, checksums = self.plan.geometry(kind), []
        record = aligned_buffer(geometry.stride)
        with OverlappedWriter(path, _WRITE_NBYTES) as writer:
            for expert in range(self.plan.num_experts):
                for n, part in enumerate(PARTS):
                    place = geometry.segments[part]
                    out = record[place.offset : place.offset + place.nbytes]
                    pools[part].fill(out, starts[expert * len(PARTS) + n])
                checksums.append(crc32(record))
                writer.write(record)
                self._report(record.size)
        return tuple(checksums)
