"""Backends are found by name, in order, and say why they cannot run."""

import sys

import pytest

from aegis import plan
from aegis.errors import BackendError
from aegis.kernels import registry
from aegis.kernels.base import BackendUnavailableError
from aegis.kernels.mlx import probe


def test_backends_are_listed_in_order_of_preference() -> None:
    assert [name for name, _ in registry.available()] == ["mlx", "native", "reference"]


def test_the_reference_backend_can_always_run() -> None:
    assert registry.reason("reference") is None
    assert registry.create("reference").name == "reference"


def test_an_unavailable_backend_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_importable", lambda: False)
    assert "pip install" in str(registry.reason("mlx"))
    with pytest.raises(BackendUnavailableError, match="pip install"):
        registry.create("mlx")


def test_auto_falls_back_to_what_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aegis.kernels.native._native", None)
    monkeypatch.setattr(probe, "installed_device", lambda: "cpu")
    assert "C++17 compiler" in str(registry.reason("native"))
    assert registry.resolve() == "reference"
    assert registry.create().name == "reference"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendUnavailableError, match="use auto, mlx, native, reference"):
        registry.create("cuda")


def test_an_instruction_set_that_is_not_there_is_refused_where_it_would_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("aegis.kernels.native._native")
    monkeypatch.setattr(probe, "installed_device", lambda: "cpu")
    monkeypatch.setenv("AEGIS_ISA", "avx1024")
    assert registry.resolve("native") == registry.resolve() == "native"
    assert registry.resolve("reference", checked=True) == "reference"
    for name in ("auto", "native"):
        with pytest.raises(BackendUnavailableError, match=r"asks for avx1024, .* unset it, or use"):
            registry.resolve(name, checked=True)
    with pytest.raises(BackendError, match="AEGIS_ISA asks for avx1024"):
        plan(cap="1GiB")
    assert plan(cap="1GiB", backend="reference").feasible
