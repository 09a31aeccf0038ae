"""One cache folder for every engine test, so that a model is converted once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_tools import store_of
from small_model import SMALL, open_small

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.engine import memory


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """AEGIS_CACHE for the session."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("AEGIS_CACHE")
    os.environ["AEGIS_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["AEGIS_CACHE"]
    else:
        os.environ["AEGIS_CACHE"] = before


@pytest.fixture(scope="module")
def quick_open() -> Iterator[None]:
    """Giving memory back to the system takes most of the time of an open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "trim", lambda: None)
        yield


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """A small random model."""
    with store_of(SMALL, seed=11) as made:
        yield made


@pytest.fixture
def engine(store: Store) -> Iterator[Engine]:
    """The small model with every expert in memory."""
    with open_small(store) as opened:
        yield opened


@pytest.fixture
def streaming(store: Store) -> Iterator[Engine]:
    """The small model with only the slots that a token needs: nearly every expert is read."""
    with open_small(store, max_slots=SMALL.num_experts_per_tok) as opened:
        yield opened
