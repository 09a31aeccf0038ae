"""--device-cap where a GPU has memory of its own, which is faked here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_tools import store_of
from small_model import SMALL

from aegis import Engine, plan
from aegis.engine import planning
from aegis.engine.governor import DeviceGauge, Governor, ProcessGauge
from aegis.engine.limits import MemoryLimits
from aegis.errors import CapExceededError, PlanError, UsageError
from aegis.kernels.mlx import probe
from aegis.settings import DEVICE_RUNTIME_NBYTES, Settings
from aegis.tiers import Arena

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU of 8 GiB, as far as planning can tell."""
    monkeypatch.setattr(probe, "installed_device", lambda: "cuda")
    monkeypatch.setattr(probe, "gpu_memory", lambda: probe.GpuMemory(8 * GIB, 7 * GIB))
    return Path()


@pytest.mark.usefixtures("gpu")
def test_caps_of_host_and_device_are_planned_apart() -> None:
    with store_of(SMALL, seed=1, layout="row") as store:
        one = plan(store.path, cap="4GiB", backend="mlx", context=64)
        two = plan(store.path, cap="2GiB", device_cap="1GiB", backend="mlx", context=64)
        assert one.device is not None
        assert one.device.cap_nbytes is None
        assert dict(one.items)["device_runtime"] == DEVICE_RUNTIME_NBYTES
        assert two.device is not None
        assert (two.cap_nbytes, two.device.cap_nbytes) == (2 * GIB, GIB)
        assert two.device_nbytes <= GIB < two.total_nbytes
        assert two.feasible
        small = plan(store.path, cap="2GiB", device_cap="800MiB", backend="mlx", context=64)
        assert not small.feasible
        with pytest.raises(PlanError, match="device cap of 800 MiB") as refused:
            Engine.open(store.path, cap="2GiB", device_cap="800MiB", backend="mlx", context=64)
        assert refused.value.exit_code == 3
        large = plan(store.path, cap="2GiB", device_cap="9GiB", backend="mlx", context=64)
        assert "above the GPU's memory" in large.warnings[0]


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_too_small_is_not_to_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "gpu_memory", lambda: probe.GpuMemory(500 * MIB, 400 * MIB))
    with store_of(SMALL, seed=1, layout="row") as store:
        told = plan(store.path, cap="4GiB", backend="mlx", context=64).refusal()
    assert "but the GPU's memory ends at 500 MiB; even the smallest device cap that opens" in told
    assert told.endswith("so use a shorter context or another backend (--backend native)")
    assert "raise" not in told


@pytest.mark.parametrize("backend", ["reference"])
def test_a_device_cap_without_such_a_device_is_refused(backend: str) -> None:
    with store_of(SMALL, seed=1) as store:
        with pytest.raises(UsageError, match="--device-cap is for a GPU") as refused:
            plan(store.path, cap="2GiB", device_cap="1GiB", backend=backend, context=64)
        assert refused.value.exit_code == 2


@pytest.mark.parametrize("size", ["4", "0MiB", 0, 1.5])
def test_a_device_cap_that_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(UsageError):
        planning.settings_for("1GiB", {"device_cap": size})
    assert planning.settings_for("1GiB", {"device_cap": None}) == Settings(GIB)
    assert planning.settings_for(5, {"device_cap": "1GiB"}).device_cap_nbytes == GIB


class FakeMemory:
    """What a backend with arrays on a device measures."""

    def __init__(self) -> None:
        self.device = 0

    def measured(self) -> dict[str, int]:
        """All arrays."""
        return {"slots": self.device}

    def apart(self, resident: int, shared: int) -> tuple[int, int]:
        """A tenth of what lies in files moves."""
        return resident - shared // 10, self.device


class NoTiers:
    """Nothing to give back."""

    def release_nbytes(self, nbytes: int) -> int:
        """None of it."""
        return 0


def test_the_device_is_under_the_cap_unless_it_has_its_own() -> None:
    memory, arena = FakeMemory(), Arena(4096)
    made: Any = memory
    together = ProcessGauge(GIB, arena, (0, 0), 0, made, device_nbytes=100 * MIB)
    apart = ProcessGauge(GIB, arena, (0, 0), 0, made, device_nbytes=None)
    memory.device = 700 * MIB
    assert abs(together.taken() - apart.taken() - 800 * MIB) < 8 * MIB
    for gauge in (together, apart):
        gauge.close()
    arena.close()


def test_above_its_own_cap_a_device_stops_the_run() -> None:
    memory, arena = FakeMemory(), Arena(4096)
    made: Any = memory
    tiers: Any = NoTiers()
    process = ProcessGauge(1 << 40, arena, (0, 0), 0, made, device_nbytes=None)
    device = DeviceGauge(GIB, 100 * MIB, made)
    governor = Governor(tiers, process, lambda: MemoryLimits(None, None, ()), device=device)
    memory.device = 800 * MIB
    governor.look()
    assert governor.room() == device.room() == GIB - 900 * MIB
    other = DeviceGauge(GIB, 100 * MIB, made)
    assert device.room() == 2 * GIB - 900 * MIB
    other.close()
    memory.device = 950 * MIB
    with pytest.raises(CapExceededError, match="above the device cap of 1 GiB") as stopped:
        governor.look()
    assert stopped.value.exit_code == 4
    governor.close()
    assert device not in DeviceGauge._all
    arena.close()
