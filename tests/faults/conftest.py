"""A small store that nobody changes, one that a test may hurt, and a watchdog."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from engine_tools import store_of
from small_model import SMALL

from aegis.checkpoint.store import Store
from aegis.engine import memory

WATCHDOG_S = 300


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A fault that makes something wait for ever is a failure, not a test run that hangs."""

    def bark(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no progress for {WATCHDOG_S} seconds")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(WATCHDOG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def quick_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving memory back to the system takes most of the time of an open."""
    monkeypatch.setattr(memory, "trim", lambda: None)


@pytest.fixture(scope="session")
def sound_store() -> Iterator[Store]:
    """A small random model; not to be changed."""
    with store_of(SMALL, seed=11) as made:
        yield made


@pytest.fixture
def store(sound_store: Store, tmp_path: Path) -> Store:
    """A copy of it to hurt."""
    shutil.copytree(sound_store.path, tmp_path / "store")
    return Store.open(tmp_path / "store")
