"""A watchdog: a deadlock becomes a failure instead of a test run that hangs."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

WATCHDOG_S = 600


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    def bark(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no progress for {WATCHDOG_S} seconds")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(WATCHDOG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
