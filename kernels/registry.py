"""Backends by name: which of them can run here, why the others cannot, and how to open one."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from aegis.kernels.base import BackendUnavailableError

if TYPE_CHECKING:
    from aegis.kernels.base import Backend


def _open_mlx(threads: int | None) -> Backend:
    raise BackendUnavailableError("the mlx backend is not part of this version")


def _check_mlx() -> None:
    _open_mlx(None)


def _open_native(threads: int | None) -> Backend:
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


def _open_reference(threads: int | None) -> Backend:
    from aegis.kernels.reference.backend import ReferenceBackend

    return ReferenceBackend(threads)


def _check_reference() -> None:
    """numpy is a dependency of the distribution: always there."""


_BACKENDS: dict[str, tuple[Callable[[], None], Callable[[int | None], Backend]]] = {
    "mlx": (_check_mlx, _open_mlx),
    "native": (_check_native, _open_native),
    "reference": (_check_reference, _open_reference),
}
NAMES = tuple(_BACKENDS)
"""Every backend, preferred first."""


def reason(name: str) -> str | None:
    """Why this backend cannot run here; None where it can."""
    check, _ = _entry(name)
    try:
        check()
    except BackendUnavailableError as error:
        return str(error)
    return None


def available() -> list[tuple[str, str | None]]:
    """Each backend in order of preference, with the reason where it cannot run."""
    return [(name, reason(name)) for name in NAMES]


def resolve(name: str = "auto", checked: bool = False) -> str:
    """The backend that ``name`` stands for; BackendUnavailableError says why there is none.

    checked: also where the environment asks of it what it cannot do here."""
    if name == "auto":
        name = next(candidate for candidate, missing in available() if missing is None)
    _entry(name)[0]()
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


def create(name: str = "auto", threads: int | None = None) -> Backend:
    """Open a backend. ``auto`` takes the first that can run; threads None: one per core."""
    _, opener = _entry(resolve(name))
    return opener(threads)


def _entry(name: str) -> tuple[Callable[[], None], Callable[[int | None], Backend]]:
    if name not in _BACKENDS:
        known = ", ".join(NAMES)
        raise BackendUnavailableError(f"there is no backend named {name!r}: use auto, {known}")
    return _BACKENDS[name]
