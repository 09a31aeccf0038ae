"""A small model, and what a process that measured one might say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bench_tools import measured
from engine_tools import store_of
from small_model import SMALL

from aegis.checkpoint.store import Store


@pytest.fixture(scope="session")
def store() -> Iterator[Store]:
    """A small random model."""
    with store_of(SMALL, seed=11) as made:
        yield made


@pytest.fixture
def found() -> dict[str, Any]:
    """Of a process, for a test to change."""
    return measured()
