"""What a backend computes on, in which numbers, and what of a plan follows from that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from aegis.errors import UsageError
from aegis.kernels.base import Numbers
from aegis.planner import DeviceShare, Surroundings
from aegis.settings import DEVICE_RUNTIME_NBYTES, PREFILL_STEPS, Settings

if TYPE_CHECKING:
    from aegis.checkpoint.layout import StoreLayout

Device = Literal["cpu", "metal", "cuda"]

NUMBER_NBYTES: dict[Numbers, int] = {"f32": 4, "bf16": 2, "f16": 2}


def device_of(backend: str) -> Device:
    """What a backend computes on; BackendUnavailableError where it is not installed."""
    if backend != "mlx":
        return "cpu"
    from aegis.kernels.mlx.probe import installed_device

    return installed_device()


def numbers_of(settings: Settings, device: Device, layout: StoreLayout) -> Numbers:
    """The numbers of activations: float32 on a CPU, on a GPU those of the experts' scales, or of
    the embedding's, where these are powers of two.

    Raises:
        UsageError: the ones asked for are not what the device computes in.
    """
    wanted = settings.activations
    if device == "cpu":
        if wanted not in ("auto", "f32"):
            raise UsageError(
                f"the CPU computes in f32, not in {wanted}; leave --activations out, or use a GPU"
            )
        return "f32"
    if wanted != "auto":
        return wanted
    experts = next(iter(layout.geometry(settings.experts).segments.values())).format.dtype
    found = layout.embedding.format.dtype if experts == "e8m0" else experts
    return "bf16" if found == "e8m0" else found


def prefill_steps(settings: Settings, backend: str, context: int) -> list[int]:
    """The prefill steps that a plan may choose from, ascending.

    Raises:
        UsageError: one is asked for where the backend has only its own.
    """
    wanted = settings.prefill_step
    if backend == "mlx":
        from aegis.kernels.mlx.sizes import PREFILL_STEP

        if wanted is not None:
            raise UsageError(
                f"the mlx backend computes prompts in steps of {PREFILL_STEP}, since others would"
                " change the last bits of its results; leave --prefill-step-size out"
            )
        return [min(PREFILL_STEP, context)]
    largest = wanted or PREFILL_STEPS[0]
    return sorted({min(step, context, largest) for step in (*PREFILL_STEPS, largest)})


def runtime_name(backend: str, device: Device) -> str:
    """What the declared runtime figures are kept under."""
    return f"mlx-{device}" if backend == "mlx" else backend


def device_share(settings: Settings, device: Device) -> DeviceShare | None:
    """The part of a plan that a GPU with memory of its own holds; None where there is none.

    Raises:
        UsageError: a cap for such a device is given where there is none.
    """
    if device != "cuda":
        if settings.device_cap_nbytes is not None:
            raise UsageError(
                "--device-cap is for a GPU with memory of its own, which the backend does not"
                " compute on here; leave it out"
            )
        return None
    from aegis.kernels.mlx.probe import gpu_memory

    found = gpu_memory()
    around = Surroundings(
        ceiling_nbytes=None if found is None else found.total_nbytes,
        ceiling="the GPU's memory",
        free_nbytes=None if found is None else found.free_nbytes,
        cap="device cap",
        remedy="use a shorter context or another backend (--backend native)",
    )
    return DeviceShare(DEVICE_RUNTIME_NBYTES, settings.device_cap_nbytes, around)
