"""Own elementary functions and norms: accurate, right at the limits, equal everywhere."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from native_tools import isa, normal

from aegis.kernels.native import _native

ISAS = _native.isas()
INF, NAN = float("inf"), float("nan")


def apply(name: str, x: Any) -> Any:
    out = np.empty_like(x)
    _native.elementwise(name, x, out)
    return out


def ulps(values: Any, exact: Any) -> float:
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(values.astype(np.float64) - exact) / spacing))


def sample(low: float, high: float, count: int = 20000) -> Any:
    rng = np.random.default_rng(1)
    grid = np.linspace(low, high, count)
    return np.concatenate([grid, rng.uniform(low, high, count)]).astype(np.float32)


def test_exp_is_within_two_ulps() -> None:
    x = sample(-87.0, 88.0)
    assert ulps(apply("exp", x), np.exp(x.astype(np.float64))) < 2


def test_exp_is_right_at_its_limits() -> None:
    x = np.array([INF, -INF, 0.0, -0.0, NAN, 89.0, -104.0, -100.0], np.float32)
    y = apply("exp", x)
    np.testing.assert_array_equal(y[:7], np.array([INF, 0, 1, 1, NAN, INF, 0], np.float32))
    assert 0 < y[7] < np.finfo(np.float32).tiny


def test_sigmoid_and_silu_are_close_and_right_at_their_limits() -> None:
    x = sample(-80.0, 80.0)
    wide = x.astype(np.float64)
    assert ulps(apply("sigmoid", x), 1 / (1 + np.exp(-wide))) < 4
    nonzero = x != 0
    assert ulps(apply("silu", x)[nonzero], (wide / (1 + np.exp(-wide)))[nonzero]) < 4
    edges = np.array([INF, -INF, 0.0, NAN], np.float32)
    np.testing.assert_array_equal(apply("sigmoid", edges), np.array([1, 0, 0.5, NAN], np.float32))
    np.testing.assert_array_equal(apply("silu", edges), np.array([INF, 0, 0, NAN], np.float32))


def test_softplus_is_close_and_right_at_its_limits() -> None:
    x = sample(-86.0, 86.0)
    assert ulps(apply("softplus", x), np.logaddexp(0, x.astype(np.float64))) < 2
    edges = np.array([INF, -INF, 0.0, NAN, 3e38], np.float32)
    expected = np.array([INF, 0, np.log(2), NAN, 3e38], np.float32)
    np.testing.assert_array_equal(apply("softplus", edges), expected)


@pytest.mark.parametrize("top", [4.0, 4096.0, 1e6])
def test_sine_and_cosine_are_within_an_ulp(top: float) -> None:
    x = sample(-top, top)
    x = x[x != 0]
    assert ulps(apply("sin", x), np.sin(x.astype(np.float64))) < 1
    assert ulps(apply("cos", x), np.cos(x.astype(np.float64))) < 1


@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu", "softplus", "sin", "cos"])
def test_every_instruction_set_gives_the_same_bits(name: str) -> None:
    edges = np.array([INF, -INF, 0.0, -0.0, 1e-40, -1e-40, 3e38, -103.5], np.float32)
    x = np.concatenate([sample(-100.0, 90.0, 3000), sample(-1e6, 1e6, 3000), edges])
    results = []
    for each in ISAS:
        with isa(each):
            results.append(apply(name, x))
    for result in results:
        np.testing.assert_array_equal(np.isnan(result), np.isnan(results[0]))
        finite = ~np.isnan(result)
        np.testing.assert_array_equal(
            result[finite].view(np.uint32), results[0][finite].view(np.uint32)
        )


def test_an_unknown_function_is_refused() -> None:
    with pytest.raises(ValueError, match="tan"):
        apply("tan", np.zeros(1, np.float32))


@pytest.mark.parametrize("width", [64, 192, 2048])
def test_rms_norm_matches_float64_and_every_instruction_set(width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = normal(rng, 5, width) * np.float32(3), normal(rng, width)
    results = []
    for each in ISAS:
        with isa(each):
            out = np.empty_like(x)
            _native.rms_norm(x, weight, 1e-6, out)
        results.append(out)
    wide = x.astype(np.float64)
    exact = weight * (wide / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + 1e-6))
    np.testing.assert_allclose(results[0], exact, rtol=1e-6)
    for result in results:
        np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))
