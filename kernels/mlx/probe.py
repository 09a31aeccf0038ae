"""What MLX would compute on here, found out without importing it (standard library only)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from aegis.kernels.base import BackendUnavailableError

Device = Literal["metal", "cuda", "cpu"]

_CUDA = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
"""Distributions that bring MLX's library for NVIDIA."""
_DRIVER = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/nvhost-gpu")
"""One of these is there where an NVIDIA driver is."""


class GpuMemory(NamedTuple):
    """Bytes of an NVIDIA GPU's own memory."""

    total_nbytes: int
    free_nbytes: int


class _NvmlMemory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def gpu_memory() -> GpuMemory | None:
    """What the driver says of the first GPU that programs here may use; None where it cannot be
    asked."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return None
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        index = int(first) if first.isdecimal() else 0
        failed = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        failed = failed or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        library.nvmlShutdown()
        return None if failed else GpuMemory(int(memory.total), int(memory.free))
    return None


def installed_device() -> Device:
    """The device that the installed MLX is for.

    Raises:
        BackendUnavailableError: MLX is not installed; the message says what to install.
    """
    if sys.platform == "darwin" and platform.machine() != "arm64":
        raise BackendUnavailableError("the mlx backend needs Apple silicon or an NVIDIA GPU")
    if not _importable():
        raise BackendUnavailableError(_what_to_install())
    if sys.platform == "darwin":
        return "metal"
    if has_nvidia_driver() and any(map(_installed, _CUDA)):
        return "cuda"
    return "cpu"


def reads_direct(device: Device) -> bool:
    """Whether direct reads may go into the device's arrays: see aegis.kernels.mlx.memory."""
    return device != "cuda"


def why_not_chosen() -> str | None:
    """Why ``auto`` takes another backend although this one can run; None where it takes it."""
    if installed_device() != "cpu":
        return None
    advice = "it is chosen with --backend mlx"
    if has_nvidia_driver():
        advice = f"for the NVIDIA GPU here {_install('cuda13')} (or cuda12, for older drivers)"
    return f"MLX is installed without a GPU that it could use, and slow on the CPU; {advice}"


def has_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA GPU that programs can use."""
    return any(Path(path).exists() for path in _DRIVER)


def lacks_cuda_headers() -> bool:
    """Whether MLX takes CUDA's headers from packages beside it and would not find all of them when
    it compiles a kernel: those in crt/ are a distribution of their own, which it does not ask for.
    """
    found = find_spec("mlx")
    if found is None or not has_nvidia_driver():
        return False
    places = found.submodule_search_locations or ()
    folders = [Path(place).parent / "nvidia/cu13/include" for place in places]
    return any((f / "mma.h").is_file() and not (f / "crt/mma.h").is_file() for f in folders)


def _importable() -> bool:
    try:
        return find_spec("mlx.core") is not None
    except ImportError:
        return False


def _installed(distribution: str) -> bool:
    # Takes 40 ms to import, which `aegis plan` need not spend where there is no MLX.
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _what_to_install() -> str:
    if sys.platform == "darwin":
        return "the mlx backend needs MLX, which is not installed: run pip install mlx"
    extra = "cuda13" if has_nvidia_driver() else "mlx-cpu"
    other = "cuda12 for older drivers" if has_nvidia_driver() else "cuda13 or cuda12 for NVIDIA"
    return f"the mlx backend needs MLX, which is not installed: {_install(extra)} ({other})"


def _install(extra: str) -> str:
    return f"run pip install 'aegis-moe[{extra}]'"
