"""What differs between MLX's devices: everything that is for one of them only is in this file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakMethod

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import BackendUnavailableError
from aegis.kernels.mlx.probe import Device, installed_device, reads_direct
from aegis.kernels.mlx.sizes import TILE_ROWS

if TYPE_CHECKING:
    from aegis.kernels.base import Numbers

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16, "e8m0": mx.uint8}
"""MLX's type of numbers."""
_CPU_TILE_ROWS = 4
"""The CPU computes padding rows one by one like all others."""
_CUDA_ROWS = 64
"""For CUDA, MLX compiles one kernel for up to 16 rows, one for up to 32 and one for more, when it
first needs them, which takes half a minute each: with this only one of them is needed."""
_FUSED_HEAD_DIMS = {"metal": (64, 80, 128), "cuda": (64, 96, 128), "cpu": ()}
"""Where attention over many queries keeps no scores in memory (16-bit numbers only)."""


class Clock:
    """What the host's time went into where it meets the device: seconds since a model was opened.

    Always running: it takes less than a thousandth of what it measures.
    """

    def __init__(self) -> None:
        self.queued_s = 0.0
        """Handing over what is to be computed."""
        self.waited_s = 0.0
        """Waiting until something was computed."""

    def start(self, *results: mx.array) -> None:
        """Have these computed, without waiting."""
        begin = perf_counter()
        start(*results)
        self.queued_s += perf_counter() - begin

    def wait(self, *results: mx.array) -> None:
        """Wait for these."""
        begin = perf_counter()
        mx.eval(*results)
        self.waited_s += perf_counter() - begin

    def on_host(self, result: mx.array) -> NDArray[Any]:
        """The numbers of an array that has been started."""
        self.wait(result)
        return np.array(result)


@dataclass(frozen=True)
class Traits:
    """What the blocks need to know of the device."""

    device: Device
    numbers: Numbers
    tile_rows: int
    row_multiple: int
    """Products of several rows have a multiple of so many."""
    by_index: bool = False
    """Whether quantised products of several rows have to be gathered where all inputs are one
    group: the kernels that MLX has for just that case on Hopper GPUs (qmm_sm90) give wrong numbers,
    NaN among them, up to version 0.32.4 at least."""
    wide_groups_in_tiles: bool = False
    """Whether products in groups of 128 have to have at most ``tile_rows`` rows: in float32 the
    kernel that MLX has on CUDA (qmm_naive) asks for more shared memory than it may have where there
    are more, and is not started, up to version 0.32.4 at least."""
    reads_behind: bool = False
    """Whether a kernel reads behind narrow inputs, as ``sizes.inputs_behind`` says."""
    files_nbytes: int = 0
    """What libraries take of the resident size (CUDA only)."""
    clock: Clock = field(default_factory=Clock, compare=False)
    """Of everything that is computed for one backend."""

    @property
    def dtype(self) -> mx.Dtype:
        """MLX's type of activations."""
        return DTYPES[self.numbers]

    @property
    def reads_direct(self) -> bool:
        """Whether direct reads may go into arrays."""
        return reads_direct(self.device)

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
    mx.reset_peak_memory()
    if device == "cuda":
        mx.eval(mx.zeros(1) + 1)  # loads the libraries
        return Traits(
            device,
            numbers,
            TILE_ROWS,
            _CUDA_ROWS,
            by_index=True,
            wide_groups_in_tiles=numbers == "f32",
            reads_behind=numbers != "f32",
            files_nbytes=_files_nbytes(),
        )
    return Traits(device, numbers, _CPU_TILE_ROWS if device == "cpu" else TILE_ROWS, 1)


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


def apart(traits: Traits, resident: int, shared: int) -> tuple[int, int]:
    """What the process takes on the host and on the device. With CUDA arrays move between the two;
    on the host they count as mapped files. So what lies in files beyond the libraries is theirs,
    and all of theirs is the device's, wherever it is at the moment."""
    if traits.device != "cuda":
        return resident, 0
    moved = max(0, shared - traits.files_nbytes)
    return resident - moved, int(mx.get_active_memory() + mx.get_cache_memory())


def _files_nbytes() -> int:
    """The part of the resident size that lies in files now."""
    shared = Path("/proc/self/statm").read_bytes().split()[2]
    return int(shared) * os.sysconf("SC_PAGE_SIZE")


def clear_cache() -> None:
    """Give freed buffers back to the system."""
    mx.clear_cache()


def start(*results: mx.array) -> None:
    """Have these computed, without waiting."""
    mx.async_eval(*results)  # type: ignore[no-untyped-call,unused-ignore]


def compiled(method: F) -> F:
    """mx.compile for a method whose object keeps the result: with a plain one it would hold itself,
    and its arrays, until Python next looks for such rings."""
    weak = WeakMethod(method)

    def call(*arrays: Any) -> Any:
        found = weak()
        assert found is not None
        return found(*arrays)

    return cast(F, mx.compile(call))
