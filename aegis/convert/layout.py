"""The layout a checkpoint will have as a store, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.layout import (
    PARTS,
    StoreLayout,
    place_experts,
    place_experts_3bit,
    place_resident,
)
from aegis.checkpoint.safetensors import file_nbytes
from aegis.checkpoint.source import Checkpoint
from aegis.convert.names import Resolved, SourceWeight, resolve
from aegis.convert.targets import quantised
from aegis.errors import CheckpointError
from aegis.kernels.base import Format, Layout
from aegis.kernels.sizes import FormatError, check_format
from aegis.models import family


def layout_of_checkpoint(
    path: str | PathLike[str], layout: Layout = "il16", quantize: QuantSpec | None = None
) -> StoreLayout:
    """What converting ``path`` would give; nothing but headers is read.

    ``quantize``: how a plain checkpoint is quantised while it is converted.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or not supported.
    """
    return layout_of(*resolve_checkpoint(Checkpoint.open(path), quantize), layout)


def resolve_checkpoint(
    checkpoint: Checkpoint, quantize: QuantSpec | None = None
) -> tuple[Checkpoint, Resolved]:
    """The checkpoint and where in it everything lies, and what it becomes."""
    tensor_map = family(checkpoint.config.model_type).tensor_map(checkpoint.config)
    resolved = resolve(checkpoint, tensor_map)
    if quantize is not None:
        resolved = quantised(checkpoint, resolved, tensor_map.quantize, quantize)
    return checkpoint, resolved


def layout_of(checkpoint: Checkpoint, resolved: Resolved, layout: Layout) -> StoreLayout:
    """The layout of a resolved checkpoint."""
    tensors = {name: (w.shape, _stored(w, layout)) for name, w in resolved.resident.items()}
    resident, resident_nbytes = place_resident(tensors, layout)
    first = next(iter(resolved.experts.values()))
    parts = {}
    for part in first:
        weights = [w for layer in resolved.experts.values() for w in layer[part].weights]
        shape = (first[part].rows, *weights[0].shape[1:])
        parts[part] = (shape, _common_format(part, {_stored(w, layout) for w in weights}))
    experts = place_experts(parts, layout)
    source = first[PARTS[0]]
    rows = sum(w.shape[0] for w in source.weights)
    num_experts = rows // (source.stride or source.rows)
    return StoreLayout(
        config=checkpoint.config,
        layout=layout,
        resident=resident,
        resident_file_nbytes=resident_nbytes,
        moe_layers=tuple(resolved.experts),
        num_experts=num_experts,
        experts=experts,
        experts_3bit=place_experts_3bit(experts, layout),
        vision_nbytes=file_nbytes(resolved.vision),
    )


def _stored(weight: SourceWeight, layout: Layout) -> Format:
    """Vectors become f32, which is exact; matrices keep their numbers."""
    if len(weight.shape) == 1:
        return Format("dense", "f32")
    fmt = weight.stored
    try:
        check_format(weight.shape, fmt, layout)
    except FormatError as error:
        raise CheckpointError(f"{weight.name} cannot be stored: {error}") from None
    return fmt


def _common_format(part: str, formats: Iterable[Format]) -> Format:
    """One format for a matrix of every expert: the widest codes, which hold all others exactly."""
    ordered = sorted(formats, key=lambda fmt: (fmt.bits, fmt.kind, fmt.dtype))
    widest = ordered[-1]
    for fmt in ordered:
        if (fmt.kind, fmt.dtype, fmt.group_size) != (widest.kind, widest.dtype, widest.group_size):
            raise CheckpointError(
                f"the experts' {part} is {fmt.kind} {fmt.dtype} in one place and {widest.kind}"
                f" {widest.dtype} in another; quantise all experts of a matrix alike"
            )
    return widest
