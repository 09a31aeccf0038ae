"""Model families: one file each, found by the config's model_type."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, cast

from aegis.checkpoint.plainfile import shown
from aegis.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from aegis.checkpoint.layout import StoreLayout
    from aegis.models.base import Family

_SHARED = {"base", "decoder", "delta", "latent", "layers", "rotary"}

_ALIASES = {"kimi_k2": "deepseek_v3"}
"""Other names for what a family computes."""


def supported() -> list[str]:
    """Every model_type that can run."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED)


def family(model_type: str) -> Family:
    """The family module for a config's model_type.

    Raises:
        CheckpointError: no such family; the message lists those that exist.
    """
    name = _ALIASES.get(model_type, model_type)
    if name not in supported():
        known = ", ".join(sorted([*supported(), *_ALIASES]))
        raise CheckpointError(
            f"model_type {shown(model_type)} is not supported: aegis runs {known}; use a checkpoint"
            " of one of these"
        )
    return cast("Family", importlib.import_module(f"aegis.models.{name}"))


def check_layout(layout: StoreLayout) -> None:
    """Compare what a store holds with what its config says that the family needs.

    Raises:
        StoreError: a tensor is missing, left over, or of another shape.
    """
    where, remedy = layout.config.where, "convert the model again"
    wanted = family(layout.model_type).tensor_map(layout.config)
    left = dict(layout.resident)
    for entry in wanted.resident:
        tensor = left.pop(entry.name, None)
        if tensor is None and not entry.optional:
            raise StoreError(f"{where} lacks the tensor {entry.name}; {remedy}")
        if tensor is not None and tensor.shape != entry.shape:
            raise StoreError(
                f"{where} holds {entry.name} with the shape {list(tensor.shape)}; its config says"
                f" {list(entry.shape)}: {remedy}"
            )
    if left:
        raise StoreError(f"{where} holds {next(iter(left))}, which its model lacks; {remedy}")
    experts = wanted.experts
    shapes = {part: segment.shape for part, segment in layout.experts.segments.items()}
    found = (layout.moe_layers, layout.num_experts, shapes)
    if found != (experts.layers, experts.num_experts, dict(experts.shapes)):
        raise StoreError(f"{where} holds other experts than its config describes; {remedy}")
