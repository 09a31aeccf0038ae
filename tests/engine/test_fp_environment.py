"""Whatever rounding and denormal mode the host process has, the bits are the same."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from attention_tools import Attention, same_bits
from native_tools import fmt_of, normal, random_weight
from small_model import IDS, open_small

from aegis.checkpoint.store import Store
from aegis.kernels.native import _native
from aegis.kernels.native.descs import linear_desc

X86 = platform.machine() in ("x86_64", "AMD64")
if not X86 or platform.system() != "Linux":
    pytest.skip("sets the register as glibc on x86-64 lays it out", allow_module_level=True)

LIBM = ctypes.CDLL("libm.so.6")
MODES = {"flush": 0x9FC0, "down": 0x3F80, "up": 0x5F80, "zero": 0x7F80}


@contextmanager
def foreign(mode: str) -> Iterator[None]:
    """MXCSR as a library may leave it; numpy and Python compute with it too."""
    before, changed = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    LIBM.fegetenv(before)
    LIBM.fegetenv(changed)
    changed[7] = MODES[mode]
    LIBM.fesetenv(changed)
    try:
        yield
    finally:
        LIBM.fesetenv(before)


def test_the_modes_do_change_what_others_compute() -> None:
    numbers = np.array([1e-40, 1, -1], np.float32)
    plain = numbers / np.float32(3)
    for mode in MODES:
        with foreign(mode):
            found = numbers / np.float32(3)
        assert not same_bits(found, plain)


@pytest.mark.parametrize("mode", MODES)
def test_linear_layers_attention_and_functions(mode: str) -> None:
    rng = np.random.default_rng(1)
    weight, layer = random_weight(rng, (640, 640), fmt_of(4)), Attention()
    desc, pool = linear_desc(weight), _native.Pool(2)
    x, rows = normal(rng, 3, 640), normal(rng, 9, 64)
    x[1] *= np.float32(1e-38)
    values = np.concatenate([normal(rng, 100), np.float32([-100, -90, 1e-40])])

    def compute(made: Any) -> list[Any]:
        one, out, exps = np.empty((1, 640), np.float32), np.empty((3, 640), np.float32), values * 0
        _native.linear(made, desc, x[:1], one)
        _native.linear(made, desc, x, out)
        _native.elementwise("exp", values, exps)
        return [one, out, exps, layer.run(rows, made, [4, 1, 4])]

    expected = compute(pool)
    with foreign(mode):
        found = compute(pool), compute(_native.Pool(2))  # its workers start in this mode
    for results in found:
        for result, right in zip(results, expected, strict=True):
            assert same_bits(result, right)


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_model(mode: str, store: Store) -> None:
    with open_small(store) as engine:
        expected = engine.score(IDS, last=None)
        tokens = list(engine.generate(IDS, max_tokens=8, ignore_eos=True))
        with foreign(mode):
            found = engine.score(IDS, last=None)
            again = list(engine.generate(IDS, max_tokens=8, ignore_eos=True))
    assert same_bits(found, expected)
    assert again == tokens


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_program_that_makes_numpy_raise_gets_the_same_bits(backend: str, store: Store) -> None:
    small = np.array([1e-30], np.float32)
    with open_small(store, backend=backend, cap="1GiB") as engine:
        expected = engine.score(IDS, last=None), engine.nll(IDS)
        with np.errstate(all="raise"):
            found = engine.score(IDS, last=None), engine.nll(IDS)
            assert engine._guarded(lambda: small * small)[0] == 0
    assert all(map(same_bits, found, expected))


def test_the_mode_of_the_caller_comes_back() -> None:
    weight = random_weight(np.random.default_rng(2), (640, 640), fmt_of(4))
    x, out = np.zeros((2, 640), np.float32), np.zeros((2, 640), np.float32)
    now = (ctypes.c_uint32 * 8)()
    with foreign("flush"):
        _native.linear(_native.Pool(2), linear_desc(weight), x, out)
        LIBM.fegetenv(now)
    assert now[7] & 0xFFC0 == MODES["flush"]
