"""Expert files for all; a watchdog: a deadlock becomes a failure instead of a run that hangs."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from tier_fakes import open_files, write_expert_files
from tier_runs import NUM_LAYERS

from aegis.tiers import ExpertFiles

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


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, ExpertFiles]]:
    """Expert files by number of experts per layer."""
    opened = {}
    for num_experts in (2, 5, 12):
        paths = write_expert_files(tmp_path_factory.mktemp("store"), NUM_LAYERS, num_experts)
        opened[num_experts] = open_files(paths, num_experts)
    yield opened
    for files in opened.values():
        files.close()
