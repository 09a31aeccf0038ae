"""Hypothesis profiles, and a guard that the installed package is what gets tested."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before numpy is imported: idle BLAS threads spin, which slows everything beside them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
# From the repository root "import aegis" would find the bare folder, without planner or kernels;
# the interpreters that tests start must not either.
os.environ["PYTHONSAFEPATH"] = "1"
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# In the background or under nohup these come ignored, and so would the commands have them that the
# tests send them to; a handler, even one that does nothing, is not inherited.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, lambda number, frame: None),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

import cgroup  # noqa: E402 - after the guard

from aegis.kernels import registry  # noqa: E402

# Tests that name no backend mean the same everywhere; on a GPU they would take mlx, which has other
# needs. Those of the default itself remove it.
os.environ.setdefault(
    "AEGIS_BACKEND", "native" if registry.reason("native") is None else "reference"
)

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile(
    "deep", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "dev")
)


LONGEST = (
    "processors/test_instruction_sets.py",
    "engine/test_identity.py",
    "engine/test_capped.py",
    "engine/test_goldens.py",
    "engine/test_goldens_3bit.py",
    "engine/test_mlx.py",
    "engine/test_soak.py",
    "synthetic/test_written.py",
    "processors/test_thread_pools.py",
    "engine/test_widths.py",
    "cli/test_doctor.py",
)
"""Files that begin first, so that no process is left alone with one of them at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Have the files handed out in the order below, rather than by their numbers of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; all else as it was."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Opening a model collects garbage; what is there by now is none, and need not be looked at
    each time."""
    gc.freeze()


@pytest.fixture(scope="session")
def cold_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cgroup.ColdPython]:
    """An interpreter and packages that no process maps; skips where groups cannot be made."""
    cgroup.require()
    folder = tmp_path_factory.mktemp("cold")
    yield cgroup.cold_python(folder)
    shutil.rmtree(folder)
