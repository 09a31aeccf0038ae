"""Native linear kernels: exact order of sums, and agreement with the numpy truth."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from hypothesis import given
from hypothesis import strategies as st
from native_tools import MX, fmt_of, isa, normal, random_arrays, random_weight, stored

from aegis.kernels import formats
from aegis.kernels.base import Weight
from aegis.kernels.native import _native
from aegis.kernels.native.descs import linear_desc
from aegis.kernels.sizes import CODE_BITS, GROUPS

ISAS = _native.isas()
POOLS = [_native.Pool(n) for n in (1, 2, 4)]
BITS = (*CODE_BITS, 0, MX)
ROWS = (1, 9, 10, 16, 17, 80)

weights = st.builds(
    lambda seed, rows, groups, bits, dtype, size: random_weight(
        np.random.default_rng(seed),
        (rows, max(64, size) * groups),
        fmt_of(bits, dtype, size if bits else 64),
    ),
    st.integers(0, 2**32),
    st.sampled_from(ROWS),
    st.integers(1, 5),
    st.sampled_from(BITS),
    st.sampled_from(("bf16", "f16", "f32")),
    st.sampled_from(GROUPS),
)


def linear(weight: Weight, x: Any, pool: Any = POOLS[0], bias: Weight | None = None) -> Any:
    out = np.full((len(x), weight.shape[0]), np.nan, np.float32)
    _native.linear(pool, linear_desc(weight, bias), x, out)
    return out


def bits_of(values: Any) -> Any:
    """float32 as integers; NaNs count as equal."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def fma(a: Any, b: Any, c: Any) -> Any:
    """float32: a product of two float32 is exact in float64, so one rounding of the float64 sum
    differs from a fused multiply-add only where that sum was itself rounded onto a tie."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    return (product + np.asarray(c, np.float64)).astype(np.float32)


def scalar_linear(weight: Weight, x: Any) -> Any:
    """The canonical sum of one row of x, in groups of 64, in plain Python."""
    arrays = formats.unpack(weight)
    fmt = weight.format
    codes = formats.unpack_codes(arrays.weight, fmt.bits)
    codes = (formats.E2M1[codes] if fmt.kind == "mxfp4" else codes).astype(np.float64)
    scales, biases = (a if a is None else formats.to_f32(a, fmt) for a in arrays[1:])
    total = np.zeros(weight.shape[0], np.float32)
    for g in range(weight.shape[1] // 64):
        part = x[64 * g : 64 * g + 64]
        chains = []
        for half in (0, 32):
            acc = np.zeros(weight.shape[0], np.float32)
            for k in range(half, half + 32):
                acc = fma(codes[:, 64 * g + k], part[k], acc)
            chains.append(acc)
        if biases is None:
            total = fma(scales[:, 2 * g], chains[0], total)
            total = fma(scales[:, 2 * g + 1], chains[1], total)
            continue
        lanes = (part[:16] + part[16:32]) + (part[32:48] + part[48:])
        for width in (8, 4, 2, 1):
            lanes = lanes[:width] + lanes[width : 2 * width]
        total = fma(scales[:, g], chains[0] + chains[1], total)
        total = fma(biases[:, g], lanes[0], total)
    return total


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("group_size", GROUPS)
def test_agrees_with_float64(bits: int, dtype: str, group_size: int) -> None:
    rng = np.random.default_rng(bits)
    weight = random_weight(rng, (80, 1024), fmt_of(bits, dtype, group_size))
    x = normal(rng, 3, 1024)
    dense = formats.dequantize(weight).astype(np.float64)
    expected = x.astype(np.float64) @ dense.T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(dense).T
    assert np.all(np.abs(linear(weight, x) - expected) <= 2e-6 * magnitude)


@pytest.mark.parametrize("bits", [*CODE_BITS, MX])
def test_follows_the_canonical_order_of_the_sum(bits: int) -> None:
    rng = np.random.default_rng(bits)
    weight = random_weight(rng, (33, 320), fmt_of(bits))
    x = normal(rng, 1, 320)
    assert np.array_equal(linear(weight, x)[0], scalar_linear(weight, x[0]))


@pytest.mark.parametrize("bits", CODE_BITS)
def test_a_group_of_128_is_two_of_64_that_share_a_scale(bits: int) -> None:
    rng = np.random.default_rng(bits)
    shape, x = (33, 384), normal(rng, 6, 384)
    arrays = random_arrays(rng, shape, fmt_of(bits, group_size=128))
    twice = {n: np.repeat(getattr(arrays, n), 2, axis=1) for n in ("scales", "biases")}
    wide = stored(arrays, shape, fmt_of(bits, group_size=128))
    narrow = stored(arrays._replace(**twice), shape, fmt_of(bits))
    for rows in (1, 6):
        assert np.array_equal(linear(wide, x[:rows]), linear(narrow, x[:rows]))


@pytest.mark.parametrize("bits", CODE_BITS)
def test_groups_of_32_are_summed_as_dense_numbers(bits: int) -> None:
    rng = np.random.default_rng(bits)
    shape, x = (33, 192), normal(rng, 6, 192)
    weight = random_weight(rng, shape, fmt_of(bits, group_size=32))
    plain = formats.MlxArrays(formats.dequantize(weight).view(np.uint32))
    dense = stored(plain, shape, fmt_of(0, "f32"))
    for rows in (1, 6):
        assert np.array_equal(linear(weight, x[:rows]), linear(dense, x[:rows]))


@given(weights, st.integers(1, 70), st.integers(0, 2**32))
def test_same_bits_for_every_split(weight: Weight, rows: int, seed: int) -> None:
    x = normal(np.random.default_rng(seed), rows, weight.shape[1])
    with isa(ISAS[0]):
        expected = np.concatenate([linear(weight, x[t : t + 1]) for t in range(rows)])
    cut = seed % rows
    for name in ISAS:
        with isa(name):
            for pool in POOLS:
                assert np.array_equal(linear(weight, x, pool), expected)
            parts = [linear(weight, part) for part in (x[:cut], x[cut:]) if len(part)]
            assert np.array_equal(np.concatenate(parts), expected)


@given(st.integers(0, 2**32), st.sampled_from(ROWS), st.integers(1, 4), st.integers(1, 12))
def test_packed_3bit_equals_nibbles(seed: int, rows: int, groups: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (rows, 64 * groups)
    narrow = random_arrays(rng, shape, fmt_of(3))
    wide = narrow._replace(weight=formats.repack_codes(narrow.weight, 3, 4))
    x = normal(rng, tokens, shape[1])
    packed, nibbles = stored(narrow, shape, fmt_of(3)), stored(wide, shape, fmt_of(4))
    for name in ISAS:
        with isa(name):
            assert np.array_equal(linear(packed, x), linear(nibbles, x))


special = st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]
)


@given(
    st.integers(0, 2**32),
    st.sampled_from(BITS),
    st.sampled_from(GROUPS),
    st.lists(special, min_size=1, max_size=6),
)
def test_denormals_infinities_and_nan_agree(
    seed: int, bits: int, group_size: int, values: list[float]
) -> None:
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, (17, 128), fmt_of(bits, group_size=group_size))
    x = normal(rng, 9, 128) * np.float32(1e-38)
    x[rng.integers(0, 9, len(values)), rng.integers(0, 128, len(values))] = values
    with isa(ISAS[0]):
        expected = bits_of(linear(weight, x))
    for name in ISAS[1:]:
        with isa(name):
            assert np.array_equal(bits_of(linear(weight, x)), expected)


@given(
    st.integers(0, 2**32),
    st.sampled_from(CODE_BITS),
    st.sampled_from(GROUPS),
    st.sampled_from(("bf16", "f16", "f32")),
    st.sampled_from((-126, -100, -75, -63, -62, -61, 0, 40, 42, 43, 44, 80)),
    st.integers(0, 4),
)
def test_one_token_gives_the_bits_of_several_at_any_magnitude(
    seed: int, bits: int, group_size: int, dtype: str, exponent: int, spread: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, (17, 128), fmt_of(bits, dtype, group_size))
    exponents = exponent + rng.integers(-spread, spread + 1, (1, 128))
    x = np.ldexp(rng.choice([1.0, 1.5, 2 - 2**-23], (1, 128)), exponents).astype(np.float32)
    # Opposite neighbours cancel, so that sums reach the smallest numbers of their inputs.
    x[:, 1::2] = np.where(rng.random((1, 64)) < 0.5, -x[:, ::2], x[:, 1::2])
    x[:, rng.integers(0, 128, 8)] = 0.0
    for name in ISAS:
        with isa(name), np.errstate(all="ignore"):
            one = linear(weight, x)
            many = linear(weight, np.repeat(x, 2, axis=0))
            assert np.array_equal(bits_of(one[0]), bits_of(many[0]))
            with isa("scalar"):
                assert np.array_equal(bits_of(linear(weight, x)), bits_of(one))


def test_bias_is_added_last() -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, (17, 64), fmt_of(4))
    bias = Weight((17,), fmt_of(0, "f32"), "il16", normal(rng, 17).view(np.uint8))
    x = normal(rng, 5, 64)
    assert np.array_equal(linear(weight, x, bias=bias), linear(weight, x) + bias.data.view("f4"))


def test_writes_nothing_beyond_the_last_row() -> None:
    rng = np.random.default_rng(0)
    for rows in ROWS:
        weight = random_weight(rng, (rows, 64), fmt_of(4))
        for tokens in (1, 7):
            buffer = np.full(tokens * rows + 32, 7, np.float32)
            out = buffer[: tokens * rows].reshape(tokens, rows)
            _native.linear(POOLS[1], linear_desc(weight), normal(rng, tokens, 64), out)
            assert np.all(buffer[tokens * rows :] == 7)


def test_refuses_what_it_cannot_compute() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        _native.LinearDesc(0, 16, 96, 4, "bf16")
    with pytest.raises(ValueError, match="7-bit"):
        _native.LinearDesc(0, 16, 64, 7, "bf16")
    with pytest.raises(ValueError, match="groups of 16"):
        _native.LinearDesc(0, 16, 64, 4, "bf16", group_size=16)
    with pytest.raises(ValueError, match="multiple of 128"):
        _native.LinearDesc(0, 16, 192, 4, "bf16", group_size=128)
    with pytest.raises(ValueError, match="multiple of 64"):
        _native.LinearDesc(0, 16, 96, 4, "bf16", group_size=32)
    with pytest.raises(ValueError, match="f8"):
        _native.LinearDesc(0, 16, 64, 4, "f8")
    with pytest.raises(ValueError, match="codes of 4 bits"):
        _native.LinearDesc(0, 16, 64, 8, "e8m0")
    weight = random_weight(np.random.default_rng(0), (16, 64), fmt_of(4))
    short = Weight(weight.shape, weight.format, "il16", weight.data[:-1])
    with pytest.raises(ValueError, match="needs 576 bytes"):
        linear_desc(short)
    with pytest.raises(ValueError, match="layout il16"):
        linear_desc(Weight(weight.shape, weight.format, "row", weight.data))
    with pytest.raises(ValueError, match="in_features"):
        linear(weight, np.zeros((1, 128), np.float32))


def test_isa_by_name_or_not_at_all() -> None:
    assert ISAS[-1] == "scalar"
    with pytest.raises(ValueError, match="not available"):
        _native.select_isa("sse2")


def test_pool_never_exceeds_the_processors_and_can_be_resized() -> None:
    pool = _native.Pool(1000)
    assert pool.threads == _native.usable_processors()
    weight = random_weight(np.random.default_rng(0), (640, 640), fmt_of(4))
    x = normal(np.random.default_rng(1), 2, 640)
    expected = linear(weight, x)
    for threads in (1, 2, 1, 3):
        pool.set_threads(threads)
        assert np.array_equal(linear(weight, x, pool), expected)
