"""What differs between MLX's devices: everything that is for one of them only is in this file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import mlx.core as mx

from aegis.kernels.base import BackendUnavailableError
from aegis.kernels.mlx.probe import Device, installed_device
from aegis.kernels.mlx.sizes import TILE_ROWS

if TYPE_CHECKING:
    from aegis.kernels.base import Numbers

_DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
_CPU_TILE_ROWS = 4
"""The CPU computes padding rows one by one like all others."""
_CUDA_ROWS = 64
"""For CUDA, MLX compiles a kernel for up to 16, up to 32 and more rows when it first needs it, which
takes half a minute each: with this only one of them is needed."""
_FUSED_HEAD_DIMS = {"metal": (64, 80, 128), "cuda": (64, 96, 128), "cpu": ()}
"""Where attention over many queries keeps no scores in memory (16-bit numbers only)."""


@dataclass(frozen=True)
class Traits:
    """What the blocks need to know of the device."""

    device: Device
    numbers: Numbers
    tile_rows: int
    row_multiple: int
    """Products of several rows have a multiple of so many."""

    @property
    def dtype(self) -> mx.Dtype:
        """MLX's type of activations."""
        return _DTYPES[self.numbers]

    def attention_is_fused(self, head_dim: int) -> bool:
        """Whether attention over a chunk of queries needs no memory for scores."""
        return self.numbers != "f32" and head_dim in _FUSED_HEAD_DIMS[self.device]


def open_device(numbers: Numbers, cache_nbytes: int) -> Traits:
    """Make MLX ready to compute in ``numbers``, keeping at most so many freed bytes.

    Raises:
        BackendUnavailableError: MLX does not find the GPU that it was installed for.
    """
    device = installed_device()
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    if device != "cpu" and not on_gpu:
        name = {"metal": "Metal", "cuda": "CUDA"}[device]
        raise BackendUnavailableError(
            f"MLX was installed for {name}, but finds no GPU here: check the driver, or use"
            " --backend native"
        )
    if device == "cpu" and on_gpu:
        device = "cuda"
    if device == "cpu" and numbers != "f32":
        raise BackendUnavailableError(
            f"MLX on the CPU computes in f32 only, not in {numbers}: leave --activations out"
        )
    mx.set_cache_limit(cache_nbytes)
    tile_rows = _CPU_TILE_ROWS if device == "cpu" else TILE_ROWS
    return Traits(device, numbers, tile_rows, _CUDA_ROWS if device == "cuda" else 1)


def wire(traits: Traits, nbytes: int) -> None:
    """Keep so much memory from being paged out (Metal only; macOS 15 and later honours it)."""
    if traits.device != "metal":
        return
    most = int(mx.device_info()["max_recommended_working_set_size"])
    mx.set_wired_limit(min(nbytes, most))


def describe(traits: Traits) -> str:
    """MLX's version, the device and the numbers."""
    where = {"metal": "Metal", "cuda": "CUDA", "cpu": "CPU"}[traits.device]
    name = str(mx.device_info().get("device_name", "")) if traits.device != "cpu" else ""
    return f"mlx {version('mlx')} ({', '.join(filter(None, (where, name, traits.numbers)))})"


def beside_nbytes(traits: Traits) -> int:
    """Memory that the system does not count as this process's: on CUDA, what MLX has allocated."""
    if traits.device != "cuda":
        return 0
    return int(mx.get_active_memory() + mx.get_cache_memory())


def clear_cache() -> None:
    """Give freed buffers back to the system."""
    mx.clear_cache()


def start(*results: mx.array) -> None:
    """Have these computed, without waiting."""
    mx.async_eval(*results)  # type: ignore[no-untyped-call,unused-ignore]
