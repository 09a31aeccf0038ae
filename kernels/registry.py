"""Backends by name: which of them can run here, why the others cannot, and how to open one."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from aegis.kernels.base import BackendUnavailableError

if TYPE_CHECKING:
    from aegis.kernels.base import Backend, Numbers


def _open_mlx(threads: int | None, numbers: Numbers) -> Backend:
    del threads
    try:
        from aegis.kernels.mlx.backend import MlxBackend
    except ImportError as error:
        raise BackendUnavailableError(
            f"MLX is installed but cannot be loaded ({error}): install it again"
        ) from error
    return MlxBackend(numbers)


def _check_mlx() -> None:
    from aegis.kernels.mlx.probe import installed_device

    installed_device()


def _check_mlx_gpu() -> None:
    from aegis.kernels.mlx.probe import why_not_chosen

    if (why := why_not_chosen()) is not None:
        raise BackendUnavailableError(why)


def _open_native(threads: int | None, numbers: Numbers) -> Backend:
    _check_native()
    from aegis.kernels.native.backend import NativeBackend

    return NativeBackend(threads)


def _check_native() -> None:
    try:
        import_module("aegis.kernels.native._native")
    except ImportError as error:
        raise BackendUnavailableError(
            "the native backend was not built: install a C++17 compiler (g++ or clang++) and "
            f"Python's headers (python3-dev on Debian) and reinstall aegis-moe ({error})"
        ) from error


def _open_reference(threads: int | None, numbers: Numbers) -> Backend:
    from aegis.kernels.reference.backend import ReferenceBackend

    return ReferenceBackend(threads)


def _check_reference() -> None:
    """numpy is a dependency of the distribution: always there."""


class _Entry(NamedTuple):
    """A backend: whether it can run, whether ``auto`` should take it, and how to open it."""

    check: Callable[[], None]
    check_auto: Callable[[], None]
    open: Callable[[int | None, Numbers], Backend]


_BACKENDS = {
    "mlx": _Entry(_check_mlx, _check_mlx_gpu, _open_mlx),
    "native": _Entry(_check_native, _check_native, _open_native),
    "reference": _Entry(_check_reference, _check_reference, _open_reference),
}
NAMES = tuple(_BACKENDS)
"""Every backend, preferred first."""


def reason(name: str) -> str | None:
    """Why this backend cannot run here; None where it can."""
    return _sentence(_entry(name).check)


def _sentence(check: Callable[[], None]) -> str | None:
    try:
        check()
    except BackendUnavailableError as error:
        return str(error)
    return None


def available() -> list[tuple[str, str | None]]:
    """Each backend in order of preference, with the reason where it cannot run."""
    return [(name, reason(name)) for name in NAMES]


def why_not_auto(name: str) -> str | None:
    """Why ``auto`` passes this backend over; None where it would take it."""
    return _sentence(_entry(name).check_auto)


def resolve(name: str = "auto", checked: bool = False) -> str:
    """The backend that ``name`` stands for; BackendUnavailableError says why there is none.

    checked: also where the environment asks of it what it cannot do here."""
    if name == "auto":
        name = next(candidate for candidate in NAMES if why_not_auto(candidate) is None)
    _entry(name).check()
    if checked and name == "native":
        _check_isa()
    return name


def _check_isa() -> None:
    wanted = os.environ.get("AEGIS_ISA")
    known: list[str] = import_module("aegis.kernels.native._native").isas()
    if wanted and wanted not in known:
        raise BackendUnavailableError(
            f"AEGIS_ISA asks for {wanted}, which the kernels do not have here: unset it, or use"
            f" one of {', '.join(known)}"
        )


def create(name: str = "auto", threads: int | None = None, numbers: Numbers = "f32") -> Backend:
    """Open a backend. ``auto`` takes the first that is worth it; threads None: one per core."""
    return _entry(resolve(name)).open(threads, numbers)


def _entry(name: str) -> _Entry:
    if name not in _BACKENDS:
        known = ", ".join(NAMES)
        raise BackendUnavailableError(f"there is no backend named {name!r}: use auto, {known}")
    return _BACKENDS[name]
