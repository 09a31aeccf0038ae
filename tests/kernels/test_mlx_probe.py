"""Whether MLX can be used is found out without importing it; the advice says what to install."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Callable

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
