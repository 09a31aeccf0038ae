"""A converted store: opened, checked against the file system, its resident part loaded."""

from __future__ import annotations

import os
import shlex
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aegis.checkpoint.layout import ExpertBits, ResidentTensor, StoreLayout
from aegis.checkpoint.manifest import Checksums, Manifest, decode
from aegis.checkpoint.plainfile import (
    MAX_JSON_NBYTES,
    FileDamageError,
    read_regular,
    regular_nbytes,
)
from aegis.errors import StoreError
from aegis.kernels.base import Weight
from aegis.kernels.sizes import RESIDENT_ALIGN, align_up

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aegis.checkpoint.fileio import UncachedReader

MANIFEST = "store.json"
RESIDENT = "resident.bin"
VISION = "vision.safetensors"
EXPERT_FOLDERS: dict[ExpertBits, str] = {"4bit": "experts", "3bit": "experts-3bit"}

_PIECE_NBYTES = 1 << 20
_PASSING_NBYTES = 64 << 10


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a converted store (rather than a checkpoint)."""
    return os.path.lexists(Path(path) / MANIFEST)


def without_3bit(path: str | os.PathLike[str], other: bool, options: str = "") -> StoreError:
    """What to tell someone who asks for 3-bit experts where there are none, or ``other`` ones;
    ``options``: more of what the command needs."""
    found = "has no 3-bit experts yet"
    if other:
        found = "has 3-bit experts that another version of aegis rounded in another way"
    command = f"aegis convert --experts 3bit{options} {shlex.quote(os.fspath(path))}"
    return StoreError(f"{os.fspath(path)} {found}; make them with '{command}'")


def expert_file(folder: Path, layer: int, experts: ExpertBits = "4bit") -> Path:
    """The file with a model layer's expert records."""
    return folder / EXPERT_FOLDERS[experts] / f"layer_{layer:03d}.bin"


@dataclass(frozen=True)
class Store:
    """An opened store. Nothing but store.json has been read."""

    path: Path
    manifest: Manifest
    verify_resident: bool = True

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], verify_resident: bool = True, check_sizes: bool = True
    ) -> Store:
        """Read store.json, check it and every file's size.

        ``verify_resident``: whether ``load_resident`` checks each tensor's checksum.
        ``check_sizes``: False leaves the other files to ``verify``, which names all that is wrong.

        Raises:
            StoreError: the folder is no store, or damaged, or of another version.
        """
        folder = Path(path)
        try:
            data = read_regular(folder / MANIFEST, MAX_JSON_NBYTES)
        except FileNotFoundError:
            raise StoreError(f"{folder} is not a store: it has no {MANIFEST}") from None
        except FileDamageError as error:
            raise StoreError(error.about(folder / MANIFEST, "convert the model again")) from error
        store = cls(folder, decode(data, str(folder / MANIFEST)), verify_resident)
        if check_sizes:
            for file, size in store.file_sizes().items():
                store._check_size(file, size)
        return store

    @property
    def layout(self) -> StoreLayout:
        """Sizes and places of everything in the store."""
        return self.manifest.layout

    @property
    def has_3bit(self) -> bool:
        """Whether the store holds 3-bit expert files too."""
        return self.manifest.experts_3bit_crc32 is not None

    @property
    def resident_path(self) -> Path:
        """The file with every tensor that is not an expert's."""
        return self.path / RESIDENT

    @property
    def vision_path(self) -> Path:
        """The file with the tensors that look at pictures, as the checkpoint has them; there only
        where ``layout.vision_nbytes`` says so."""
        return self.path / VISION

    def expert_paths(self, experts: ExpertBits = "4bit") -> list[Path]:
        """One file per MoE layer, in the order of ``layout.moe_layers``.

        Raises:
            StoreError: 3-bit files are asked for and not there.
        """
        if experts == "3bit" and not self.has_3bit:
            raise without_3bit(self.path, self.manifest.other_3bit)
        return [expert_file(self.path, layer, experts) for layer in self.layout.moe_layers]

    def expert_checksums(self, experts: ExpertBits = "4bit") -> Checksums:
        """The CRC-32 of every record of ``expert_paths``, padding included."""
        manifest = self.manifest
        if experts == "4bit":
            return manifest.experts_crc32
        return manifest.experts_3bit_crc32 or ()

    def file_sizes(self) -> dict[Path, int]:
        """Every file of the store but store.json, and the size it must have."""
        sizes = {self.path / name: size for name, (size, _) in self.manifest.files.items()}
        sizes[self.resident_path] = self.layout.resident_file_nbytes
        if self.layout.vision_nbytes:
            sizes[self.vision_path] = self.layout.vision_nbytes
        kinds: list[ExpertBits] = ["4bit", "3bit"] if self.has_3bit else ["4bit"]
        for kind in kinds:
            size = self.layout.num_experts * self.layout.geometry(kind).stride
            sizes.update(dict.fromkeys(self.expert_paths(kind), size))
        return sizes

    def _check_size(self, file: Path, expected: int) -> None:
        try:
            actual = regular_nbytes(file)
        except FileNotFoundError:
            raise StoreError(f"{file} is missing; convert the model again") from None
        except FileDamageError as error:
            raise StoreError(error.about(file, "convert the model again")) from error
        if actual != expected:
            raise StoreError(
                f"{file} has {actual} bytes, but the store says {expected}; convert the model again"
            )

    def check_copied(self) -> None:
        """Read the copied files (tokenizer, configs) and compare their checksums.

        Raises:
            StoreError: one of them is damaged.
        """
        for name, (size, crc) in self.manifest.files.items():
            file = self.path / name
            try:
                actual = zlib.crc32(read_regular(file, size))
            except (FileNotFoundError, FileDamageError):
                actual = None
            if actual != crc:
                raise StoreError(f"{file} is damaged (checksum mismatch); convert the model again")

    def load_resident(
        self, buffer: NDArray[np.uint8], skip_names: Collection[str] = ()
    ) -> dict[str, Weight]:
        """Read every resident tensor but ``skip_names`` into ``buffer``, in file order.

        ``buffer`` has at least ``layout.resident_nbytes(skip_names)`` bytes; each tensor starts on
        a multiple of 64 in it. Checksums are verified as the bytes arrive, also those of tensors
        that are skipped: they are used from the disk later, when nobody compares anything.

        Raises:
            StoreError: a tensor is damaged.
        """
        from aegis.checkpoint.fileio import UncachedReader, aligned_buffer

        if buffer.size < self.layout.resident_nbytes(skip_names):
            raise ValueError("the buffer is smaller than layout.resident_nbytes says")
        weights, start = {}, 0
        passing = aligned_buffer(_PASSING_NBYTES)
        try:
            with UncachedReader(self.resident_path, _PIECE_NBYTES) as reader:
                for name, tensor in self.layout.resident.items():
                    if name in skip_names:
                        if self.verify_resident:
                            self._read_tensor(reader, tensor, passing)
                        continue
                    data = buffer[start : start + tensor.nbytes]
                    self._read_tensor(reader, tensor, data)
                    weights[name] = Weight(tensor.shape, tensor.format, self.layout.layout, data)
                    start = align_up(start + tensor.nbytes, RESIDENT_ALIGN)
        except (OSError, EOFError) as error:
            raise StoreError(f"{self.resident_path} cannot be read: {error}") from error
        return weights

    def _read_tensor(
        self, reader: UncachedReader, tensor: ResidentTensor, out: NDArray[np.uint8]
    ) -> None:
        """Into ``out``, or through it where it is smaller than the tensor."""
        crc, step = 0, min(out.size, _PIECE_NBYTES)
        for start in range(0, tensor.nbytes, step):
            at = start if out.size >= tensor.nbytes else 0
            piece = out[at : at + min(step, tensor.nbytes - start)]
            reader.read_into(tensor.offset + start, piece)
            crc = zlib.crc32(piece.data, crc) if self.verify_resident else crc
        if self.verify_resident and crc != self.manifest.resident_crc32[tensor.name]:
            raise StoreError(
                f"{self.resident_path}: the tensor {tensor.name} is damaged (checksum mismatch);"
                " convert the model again"
            )
