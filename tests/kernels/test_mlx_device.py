"""What differs between MLX's devices, as far as it can be told without them."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_tools import ON_GPU, needs_mlx

from aegis.kernels.base import BackendUnavailableError, KVSpec
from aegis.kernels.mlx import sizes

pytestmark = needs_mlx

MIB = 1 << 20


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, pretending that MLX was installed for something else."""
    from aegis.kernels.mlx import device

    return device


def pretend(monkeypatch: pytest.MonkeyPatch, device: Any, name: str, gpu: bool = True) -> None:
    """MLX is for ``name``, and finds a GPU or not."""
    kinds = device.mx.DeviceType
    found = device.mx.Device(kinds.gpu if gpu else kinds.cpu, 0)
    monkeypatch.setattr(device, "installed_device", lambda: name)
    monkeypatch.setattr(device.mx, "default_device", lambda: found)
    monkeypatch.setattr(device.mx, "eval", lambda *arrays: None)


@pytest.mark.parametrize(("name", "says"), [("cuda", "CUDA"), ("metal", "Metal")])
def test_a_gpu_that_mlx_does_not_find_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: Any, name: str, says: str
) -> None:
    pretend(monkeypatch, device, name, gpu=False)
    with pytest.raises(BackendUnavailableError, match=f"installed for {says}, but finds no GPU"):
        device.open_device("bf16", MIB)


def test_each_device_has_its_own_tiles(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    found = {}
    for name in ("cuda", "metal"):
        with monkeypatch.context() as patch:
            pretend(patch, device, name)
            found[name] = device.open_device("bf16", MIB)
    assert (found["cuda"].tile_rows, found["cuda"].row_multiple) == (16, 64)
    assert (found["metal"].tile_rows, found["metal"].row_multiple) == (16, 1)
    assert found["cuda"].files_nbytes > 0 == found["metal"].files_nbytes
    assert (found["cuda"].reads_direct, found["metal"].reads_direct) == (False, True)
    assert found["cuda"].attention_is_fused(128)
    assert not found["metal"].attention_is_fused(96)


@pytest.mark.skipif(ON_GPU, reason="a GPU computes in every type")
def test_a_cpu_computes_in_float32_only(device: Any) -> None:
    with pytest.raises(BackendUnavailableError, match="computes in f32 only, not in bf16"):
        device.open_device("bf16", MIB)


def test_mlx_with_a_gpu_that_nothing_announced_is_taken_for_cuda(
    monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    pretend(monkeypatch, device, "cpu")
    assert device.open_device("f32", MIB).device == "cuda"


def test_what_moved_from_the_device_is_not_counted_twice(device: Any) -> None:
    import mlx.core as mx

    arrays = mx.get_active_memory() + mx.get_cache_memory()
    cuda = device.Traits("cuda", "f32", 16, 64, files_nbytes=50 * MIB)
    assert device.apart(cuda, 300 * MIB, 40 * MIB) == (300 * MIB, arrays)
    assert device.apart(cuda, 300 * MIB, 90 * MIB) == (260 * MIB, arrays)
    for name in ("cpu", "metal"):
        traits = device.Traits(name, "f32", 4, 1)
        assert device.apart(traits, 300 * MIB, 90 * MIB) == (300 * MIB, 0)


def test_only_metal_keeps_memory_from_being_paged_out(
    monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    wired: list[int] = []
    monkeypatch.setattr(device.mx, "set_wired_limit", wired.append)
    info = {"max_recommended_working_set_size": 100, "device_name": "a GPU"}
    monkeypatch.setattr(device.mx, "device_info", lambda: info)
    for name, nbytes in (("cpu", 50), ("cuda", 50), ("metal", 50), ("metal", 500)):
        device.wire(device.Traits(name, "f32", 4, 1), nbytes)
    assert wired == [50, 100]
    assert device.describe(device.Traits("metal", "bf16", 4, 1)).endswith("(Metal, a GPU, bf16)")


@pytest.mark.parametrize("context", [1, 8, 255, 256, 257, 1024, 4096])
def test_caches_hold_the_context_and_never_a_multiple_of_256(context: int) -> None:
    found = sizes.capacity(KVSpec(2, 64, context))
    assert context <= found <= context + 15
    assert found % 256 != 0
