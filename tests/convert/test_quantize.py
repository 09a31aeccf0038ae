"""Quantising gives the bits that MLX's quantiser gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.convert.quantize import quantize
from aegis.kernels import formats
from aegis.kernels.base import Format, Numbers
from aegis.kernels.formats import Raw
from aegis.kernels.sizes import CODE_BITS, GROUPS, FormatError

DTYPES: tuple[Numbers, ...] = ("bf16", "f16", "f32")


@pytest.fixture(scope="module")
def mx() -> Any:
    core = pytest.importorskip("mlx.core", reason="MLX, whose quantiser is the truth, is missing")
    core.set_default_device(core.cpu)
    return core


def by_mlx(mx: Any, raw: Raw, dtype: Numbers, bits: int, group_size: int) -> list[Raw]:
    kinds = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
    plain = mx.array(raw).view(kinds[dtype])
    words, scales, biases = mx.quantize(plain, group_size=group_size, bits=bits)
    as_raw = mx.uint32 if dtype == "f32" else mx.uint16
    return [np.array(words), np.array(scales.view(as_raw)), np.array(biases.view(as_raw))]


def check_same(mx: Any, raw: Raw, dtype: Numbers, bits: int, group_size: int) -> None:
    arrays, fmt = quantize(raw, Format("dense", dtype), bits, group_size)
    assert fmt == Format("affine", dtype, bits, group_size)
    for ours, theirs in zip(arrays, by_mlx(mx, raw, dtype, bits, group_size), strict=True):
        assert ours is not None
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def raw_of(values: np.ndarray[Any, np.dtype[np.float32]], dtype: Numbers) -> Raw:
    return formats.from_f32(values.astype(np.float32), Format("dense", dtype))


KINDS = ("normal", "uniform", "positive", "negative", "constant", "zero", "sparse", "two", "ties")


def group_of(rng: np.random.Generator, kind: str, size: int) -> np.ndarray[Any, Any]:
    """Numbers about 1 in size of some kind that rules of edges and halves treat unlike."""
    normal = rng.normal(size=size)
    return {
        "normal": normal,
        "uniform": rng.uniform(-1, 1, size),
        "positive": np.abs(normal) + 0.5,
        "negative": -np.abs(normal) - 0.5,
        "constant": np.full(size, normal[0]),
        "zero": np.zeros(size) * rng.choice([-1, 1], size),
        "sparse": normal * (rng.random(size) < 0.05),
        "two": rng.choice(normal[:2], size),
        "ties": rng.integers(-15, 16, size) / 2,
    }[kind]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(DTYPES),
    st.sampled_from(CODE_BITS),
    st.sampled_from(GROUPS),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(-44, 40)), min_size=1, max_size=12),
)
def test_codes_scales_and_biases_are_those_of_mlx(
    mx: Any,
    seed: int,
    dtype: Numbers,
    bits: int,
    group_size: int,
    groups: list[tuple[str, int]],
) -> None:
    rng = np.random.default_rng(seed)
    least, most = (-24, 12) if dtype == "f16" else (-44, 40)
    rows = [
        np.ldexp(group_of(rng, kind, group_size), int(np.clip(power, least, most)))
        for kind, power in groups
    ]
    check_same(mx, raw_of(np.array(rows), dtype), dtype, bits, group_size)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_and_group_is_that_of_mlx_over_many_rows(
    mx: Any, dtype: Numbers, bits: int, group_size: int
) -> None:
    values = np.random.default_rng(bits).normal(0, 0.03, (300, 1152)).astype(np.float32)
    check_same(mx, raw_of(values, dtype), dtype, bits, group_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_exponent_are_quantised_as_mlx_does(mx: Any, dtype: Numbers) -> None:
    """Subnormal ones too: nothing may be flushed to zero."""
    rng = np.random.default_rng(3)
    raw = formats.raw_dtype(Format("dense", dtype))
    mantissa = {"bf16": 7, "f16": 10, "f32": 23}[dtype]
    exponents = (1 << {"bf16": 8, "f16": 5, "f32": 8}[dtype]) - 1
    # The topmost spread too far for a scale: that is refused, in a test of its own.
    top = exponents - (0 if dtype == "f16" else 30)
    rows = np.repeat(np.arange(top, dtype=raw)[:, None], 64, axis=1) << raw(mantissa)
    noise = rng.integers(0, 1 << mantissa, rows.shape, dtype=raw)
    signs = rng.integers(0, 2, rows.shape, dtype=raw) << raw(8 * raw().nbytes - 1)
    for bits in (3, 4, 8):
        check_same(mx, rows | noise | signs, dtype, bits, 64)


def test_quantising_in_pieces_gives_the_same(mx: Any) -> None:
    raw = raw_of(np.random.default_rng(0).normal(size=(700, 4096)).astype(np.float32), "bf16")
    check_same(mx, raw, "bf16", 4, 64)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_not_finite_is_refused(dtype: Numbers, bad: float) -> None:
    values = np.ones((3, 128), np.float32)
    values[2, 77] = bad
    with pytest.raises(FormatError, match="not finite"):
        quantize(raw_of(values, dtype), Format("dense", dtype), 4, 64)


@pytest.mark.parametrize("values", [[3e38, -3e38], [3e38, 3e38]])
def test_a_group_without_a_scale_is_refused(values: list[float]) -> None:
    raw = raw_of(np.array([values * 32]), "f32")
    with pytest.raises(FormatError, match="too large"):
        quantize(raw, Format("dense", "f32"), 4, 64)


def test_the_input_is_left_as_it_was() -> None:
    raw = raw_of(np.arange(64, dtype=np.float32)[None], "f32")
    before = raw.copy()
    quantize(raw, Format("dense", "f32"), 4, 64)
    assert np.array_equal(raw, before)
