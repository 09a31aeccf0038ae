"""One cache folder for every engine test, so that a model is converted once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


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
