"""Whether MLX can be used is found out without importing it; the advice says what to install."""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from aegis.kernels import registry
from aegis.kernels.base import BackendUnavailableError
from aegis.kernels.mlx import probe

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend that this is some machine."""

    def pretend(
        system: str = "linux",
        processor: str = "x86_64",
        installed: tuple[str, ...] = (),
        importable: bool = True,
        driver: bool = False,
    ) -> None:
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda: processor)
        monkeypatch.setattr(probe, "_importable", lambda: importable)
        monkeypatch.setattr(probe, "_installed", installed.__contains__)
        monkeypatch.setattr(probe, "has_nvidia_driver", lambda: driver)

    return pretend


def test_apple_silicon_computes_on_metal_and_is_chosen(machine: Machine) -> None:
    machine("darwin", "arm64")
    assert probe.installed_device() == "metal"
    assert registry.resolve() == "mlx"


def test_an_nvidia_gpu_with_its_library_is_chosen(machine: Machine) -> None:
    machine(installed=("mlx-cuda-13",), driver=True)
    assert probe.installed_device() == "cuda"
    assert registry.resolve() == "mlx"


@pytest.mark.parametrize(
    ("driver", "files", "lacking"),
    [
        (True, ("mma.h",), True),
        (True, ("mma.h", "crt/mma.h"), False),
        (True, (), False),
        (False, ("mma.h",), False),
    ],
)
def test_headers_that_mlx_would_not_find_are_missed_before_it_compiles(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    driver: bool,
    files: tuple[str, ...],
    lacking: bool,
) -> None:
    machine(installed=("mlx-cuda-13",), driver=driver)
    found = ModuleSpec("mlx", None, is_package=True)
    assert found.submodule_search_locations is not None
    found.submodule_search_locations.append(str(tmp_path / "mlx"))
    monkeypatch.setattr(probe, "find_spec", {"mlx": found}.get)
    for name in files:
        path = tmp_path / "nvidia/cu13/include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert probe.lacks_cuda_headers() == lacking
    monkeypatch.setattr(probe, "find_spec", lambda _: None)
    assert not probe.lacks_cuda_headers()


@pytest.mark.parametrize(
    ("installed", "driver", "advice"),
    [
        ((), False, "--backend mlx"),
        (("mlx-cuda-13",), False, "--backend mlx"),
        ((), True, r"aegis-moe\[cuda13\]"),
    ],
)
def test_without_a_gpu_it_runs_only_when_asked_for(
    machine: Machine, installed: tuple[str, ...], driver: bool, advice: str
) -> None:
    machine(installed=installed, driver=driver)
    assert probe.installed_device() == "cpu"
    assert registry.reason("mlx") is None
    assert registry.resolve() != "mlx"
    assert registry.resolve("mlx") == "mlx"
    assert re.search(advice, str(registry.why_not_auto("mlx")))


@pytest.mark.parametrize(
    ("system", "processor", "driver", "advice"),
    [
        ("darwin", "arm64", False, "pip install mlx"),
        ("darwin", "x86_64", False, "Apple silicon"),
        ("linux", "x86_64", False, r"aegis-moe\[mlx-cpu\]"),
        ("linux", "aarch64", True, r"aegis-moe\[cuda13\].*cuda12"),
    ],
)
def test_where_it_is_missing_the_reason_says_what_to_install(
    machine: Machine, system: str, processor: str, driver: bool, advice: str
) -> None:
    machine(system, processor, importable=False, driver=driver)
    with pytest.raises(BackendUnavailableError, match=advice):
        probe.installed_device()
    assert registry.resolve() != "mlx"


def test_looking_does_not_import_mlx() -> None:
    code = (
        "import sys; from aegis.kernels import registry; registry.available(); registry.resolve();"
        "print('mlx.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class FakeDriver:
    """The driver's library, with a GPU of 100 bytes at each index; ``broken`` calls fail."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.asked, self.open = broken, -1, 0

    def nvmlInit_v2(self) -> int:
        """Begin."""
        self.open += self.broken != "init"
        return int(self.broken == "init")

    def nvmlShutdown(self) -> int:
        """End."""
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        """Which GPU."""
        self.asked = index
        return int(self.broken == "handle")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        """Its memory."""
        memory._obj.total, memory._obj.free, memory._obj.used = 100, 70, 30
        return int(self.broken == "memory")


@pytest.mark.parametrize(("visible", "index"), [(None, 0), ("2,1", 2), ("GPU-8a5", 0), ("", 0)])
def test_the_driver_says_what_memory_the_first_gpu_has(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert probe.gpu_memory() == (100, 70)
    assert (driver.asked, driver.open) == (index, 0)


@pytest.mark.parametrize("broken", ["init", "handle", "memory"])
def test_a_driver_that_does_not_answer_says_nothing(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    driver = FakeDriver(broken)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert probe.gpu_memory() is None
    assert driver.open == 0


def test_without_a_driver_nothing_is_known_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert probe.gpu_memory() is None
