"""Sizes and places of everything in a store, as plain data (no array library needed)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from aegis.checkpoint.config import ModelConfig
from aegis.errors import StoreError
from aegis.kernels.base import Format, Layout, Segment
from aegis.kernels.sizes import (
    LANES,
    RECORD_ALIGN,
    RESIDENT_ALIGN,
    align_up,
    dtype_nbytes,
    nbytes,
)

PARTS = ("gate_proj", "up_proj", "down_proj")
"""The matrices of an expert, in the order of its record."""

BIASES = tuple(f"{part}.bias" for part in PARTS)
"""What lies behind these, where experts have biases."""

READ_PADDING = 64
"""Bytes behind the last weight that kernels may read."""

ExpertBits = Literal["4bit", "3bit"]


@dataclass(frozen=True)
class ResidentTensor:
    """One tensor of resident.bin: byte range (offset a multiple of 4096), shape and format."""

    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ExpertGeometry:
    """One expert record: its segments, its bytes and the distance from record to record."""

    segments: Mapping[str, Segment]
    record_nbytes: int
    stride: int
    """A multiple of 4096; at least 64 bytes behind the record are readable."""


@dataclass(frozen=True)
class EmbeddingRange:
    """The bytes of the stored table that must be read for one token id.

    Ids ``rows * n`` to ``rows * n + rows - 1`` share the range at ``n * nbytes``.
    """

    rows: int
    nbytes: int


@dataclass(frozen=True)
class StoreLayout:
    """Everything about the sizes of a store, known from headers before it is written."""

    config: ModelConfig = field(compare=False)
    layout: Layout
    resident: Mapping[str, ResidentTensor]
    """By store name, in file order."""
    resident_file_nbytes: int
    moe_layers: tuple[int, ...]
    """Model layer indices that have routed experts."""
    num_experts: int
    experts: ExpertGeometry
    experts_3bit: ExpertGeometry | None
    """What 3-bit expert files have or would have; None where there is no 4-bit segment."""
    vision_nbytes: int = 0
    """The size of vision.safetensors; 0: the model has none, and the store no such file."""

    @property
    def model_type(self) -> str:
        """The family's name in config.json."""
        return self.config.model_type

    def geometry(self, experts: ExpertBits = "4bit") -> ExpertGeometry:
        """The expert records of one of the two kinds; ``4bit`` means as in the checkpoint.

        Raises:
            StoreError: 3-bit records are asked for and there is nothing to derive them from.
        """
        if experts == "4bit":
            return self.experts
        if self.experts_3bit is None:
            raise StoreError(
                "this model has no 4-bit experts to derive 3-bit ones from; those of a plain"
                " checkpoint become so with --bits 4"
            )
        return self.experts_3bit

    def resident_nbytes(self, skip: Collection[str] = ()) -> int:
        """Bytes of memory that ``Store.load_resident`` fills when it leaves out ``skip``."""
        sizes = [
            align_up(t.nbytes, RESIDENT_ALIGN) for n, t in self.resident.items() if n not in skip
        ]
        return sum(sizes) + READ_PADDING

    def experts_nbytes(self, experts: ExpertBits = "4bit") -> int:
        """Bytes of all expert files."""
        return len(self.moe_layers) * self.num_experts * self.geometry(experts).stride

    def nbytes(self, experts3bit: bool = False) -> int:
        """Bytes of all files but copied ones and store.json; 3-bit expert files too if asked."""
        three = self.experts_nbytes("3bit") if experts3bit else 0
        return self.resident_file_nbytes + self.experts_nbytes() + three + self.vision_nbytes

    @property
    def embedding(self) -> ResidentTensor:
        """The embedding table."""
        return self.resident["embed_tokens"]

    @property
    def embedding_range(self) -> EmbeddingRange | None:
        """What one token's row takes to read; None where a row is not in one piece."""
        table = self.embedding
        cols = table.shape[1]
        if self.layout == "il16":
            return EmbeddingRange(LANES, nbytes((LANES, cols), table.format, "il16"))
        if table.format.kind == "dense":
            return EmbeddingRange(1, cols * dtype_nbytes(table.format))
        return None


def place_resident(
    tensors: Mapping[str, tuple[tuple[int, ...], Format]], layout: Layout
) -> tuple[dict[str, ResidentTensor], int]:
    """Give every tensor its place in resident.bin; also the file's size."""
    placed, offset = {}, 0
    for name, (shape, fmt) in tensors.items():
        size = nbytes(shape, fmt, layout)
        placed[name] = ResidentTensor(name, shape, fmt, offset, size)
        offset = align_up(offset + size, RECORD_ALIGN)
    return placed, offset


def place_experts(
    parts: Mapping[str, tuple[tuple[int, ...], Format]], layout: Layout
) -> ExpertGeometry:
    """Give every matrix of an expert, and every bias that there is, its place in the record."""
    align = RESIDENT_ALIGN if layout == "il16" else RECORD_ALIGN
    segments, end = {}, 0
    for name in (*PARTS, *filter(parts.__contains__, BIASES)):
        shape, fmt = parts[name]
        start = align_up(end, align)
        size = nbytes(shape, fmt, layout, align)
        segments[name] = Segment(start, size, shape, fmt)
        end = start + size
    return ExpertGeometry(segments, end, align_up(end + READ_PADDING, RECORD_ALIGN))


def place_experts_3bit(experts: ExpertGeometry, layout: Layout) -> ExpertGeometry | None:
    """The geometry with every segment of 4-bit codes at 3 bits; None where there is none."""
    formats = {name: (s.shape, s.format) for name, s in experts.segments.items()}
    three = {
        name: (shape, replace(fmt, bits=3) if fmt.kind == "affine" and fmt.bits == 4 else fmt)
        for name, (shape, fmt) in formats.items()
    }
    return place_experts(three, layout) if three != formats else None
