"""The small random model that engine tests share."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from strategies import Choices

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.kernels import registry

CONTEXT = 64
IDS = [5, 90, 411, 7, 300, 22, 64, 8, 129, 77]
SMALL = Choices(num_hidden_layers=3, num_experts=8, bits=(4, 8))
PLENTY = "300MiB" if registry.reason("native") is None else "1GiB"
"""Every expert of a model of the tests in memory; what numpy dequantises is planned too."""
MIB = 1 << 20

needs_native = pytest.mark.skipif(
    registry.reason("native") is not None, reason=str(registry.reason("native"))
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


def open_small(store: Store, cap: str | int = PLENTY, **options: Any) -> Engine:
    """The small model with a short context."""
    return Engine.open(store.path, cap=cap, **({"context": CONTEXT} | options))
