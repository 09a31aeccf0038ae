"""What tests of the mlx backend share: whether it is there, and the numbers it computes in here."""

from __future__ import annotations

from typing import Any

import pytest

from aegis.kernels import registry
from aegis.kernels.base import Numbers

WHY_NOT = registry.reason("mlx")
needs_mlx = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

ON_GPU = WHY_NOT is None and registry.why_not_auto("mlx") is None
NUMBERS: list[Numbers] = ["f32", "bf16"] if ON_GPU else ["f32"]
"""MLX on a CPU computes in f32 only."""

PLENTY = "16GiB"
"""A cap that holds everything: on a GPU the runtime alone takes most of a GiB."""


def mlx_options(numbers: Numbers, **options: Any) -> dict[str, Any]:
    """Options to open a model with."""
    return {"backend": "mlx", "activations": numbers, "context": 64} | options
