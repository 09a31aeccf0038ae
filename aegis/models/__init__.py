"""Model families: one file each, found by the config's model_type."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, cast

from aegis.errors import CheckpointError

if TYPE_CHECKING:
    from aegis.models.base import Family

_SHARED = {"base", "layers"}


def supported() -> list[str]:
    """Every model_type that can run."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED)


def family(model_type: str) -> Family:
    """The family module for a config's model_type.

    Raises:
        CheckpointError: no such family; the message lists those that exist.
    """
    if model_type not in supported():
        known = ", ".join(supported())
        raise CheckpointError(
            f"model_type {model_type!r} is not supported: aegis runs {known}; use a checkpoint"
            " of one of these"
        )
    return cast("Family", importlib.import_module(f"aegis.models.{model_type}"))
