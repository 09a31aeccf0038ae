"""Stored formats: lossless both ways, and the definitions that kernels rely on."""

from __future__ import annotations

import zlib
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aegis.checkpoint.manifest import ROUNDING_3BIT
from aegis.convert.quantize import quantize
from aegis.kernels import formats
from aegis.kernels.base import Format, Layout, Weight
from aegis.kernels.formats import MlxArrays
from aegis.kernels.sizes import (
    CODE_BITS,
    GROUPS,
    MXFP4,
    FormatError,
    block_inputs,
    block_nbytes,
    nbytes,
    row_parts,
)


def random_arrays(seed: int, shape: tuple[int, ...], fmt: Format) -> MlxArrays:
    rng = np.random.default_rng(seed)
    raw = formats.raw_dtype(fmt)
    top = np.iinfo(raw).max

    def numbers(size: tuple[int, ...]) -> formats.Raw:
        return rng.integers(0, top, size, dtype=raw, endpoint=True)

    if fmt.kind == "dense":
        return MlxArrays(numbers(shape))
    rows, cols = shape
    words = rng.integers(0, 2**32, (rows, cols * fmt.bits // 32), dtype=np.uint32)
    params = (rows, cols // fmt.group_size)
    if fmt.kind == "mxfp4":
        return MlxArrays(words, rng.integers(0, 252, params, dtype=raw, endpoint=True))
    return MlxArrays(words, numbers(params), numbers(params))


def same(first: formats.Raw | None, second: formats.Raw | None) -> bool:
    return second is None if first is None else second is not None and np.array_equal(first, second)


def rows_of(arrays: MlxArrays, rows: slice) -> MlxArrays:
    return MlxArrays(*(array if array is None else array[rows] for array in arrays))


dtypes = st.sampled_from(["bf16", "f16", "f32"])
affine = st.builds(
    lambda dtype, bits, group_size: Format("affine", dtype, bits, group_size),
    dtypes,
    st.sampled_from(CODE_BITS),
    st.sampled_from(GROUPS),
)
quantised = affine | st.just(MXFP4)
dense = st.builds(lambda dtype: Format("dense", dtype), dtypes)
matrices = st.tuples(st.integers(1, 70), st.integers(1, 4))
"""Rows, and blocks of inputs."""
layouts = st.sampled_from(["il16", "row"])
seeds = st.integers(0, 2**32 - 1)


@given(seeds, matrices, quantised | dense, layouts, st.sampled_from([64, 4096]))
def test_packing_loses_nothing_in_either_layout(
    seed: int, size: tuple[int, int], fmt: Format, layout: Layout, align: int
) -> None:
    shape = (size[0], size[1] * max(64, block_inputs(fmt)))
    arrays = random_arrays(seed, shape, fmt)
    data = formats.pack(arrays, fmt, layout, align=align)
    assert data.size == nbytes(shape, fmt, layout, align)
    back = formats.unpack(Weight(shape, fmt, layout, data), align=align)
    for before, after in zip(arrays, back, strict=True):
        assert same(before, after)


@given(seeds, matrices, quantised | dense)
def test_both_layouts_dequantise_to_the_same_values(
    seed: int, size: tuple[int, int], fmt: Format
) -> None:
    shape = (size[0], size[1] * max(64, block_inputs(fmt)))
    arrays = random_arrays(seed, shape, fmt)
    with np.errstate(all="ignore"):
        values = [
            formats.dequantize(Weight(shape, fmt, layout, formats.pack(arrays, fmt, layout)))
            for layout in ("il16", "row")
        ]
    assert np.array_equal(values[0].view(np.uint32), values[1].view(np.uint32))


@given(seeds, matrices, quantised | dense, st.integers(0, 4))
def test_packing_in_pieces_of_whole_row_blocks_gives_the_same_bytes(
    seed: int, size: tuple[int, int], fmt: Format, blocks: int
) -> None:
    shape = (size[0], size[1] * max(64, block_inputs(fmt)))
    arrays = random_arrays(seed, shape, fmt)
    cut = 16 * blocks
    whole = formats.pack(arrays, fmt, "il16")
    pieces = [
        formats.pack(rows_of(arrays, rows), fmt, "il16")
        for rows in (slice(0, cut), slice(cut, None))
        if len(arrays.weight[rows])
    ]
    assert np.array_equal(whole, np.concatenate(pieces))


def test_mxfp4_is_a_power_of_two_times_a_float_of_four_bits() -> None:
    codes = np.arange(32, dtype=np.uint8)[None] % 16
    scales = np.array([[0], [1], [127], [130], [252]], np.uint8)
    words = np.repeat(formats.pack_codes(codes, 4), len(scales), axis=0)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.array([*magnitudes, *(-m for m in magnitudes)] * 2)
    found = formats.dequantize_mlx(MlxArrays(words, scales), MXFP4).astype(np.float64)
    assert (found == expected * 2.0 ** (scales.astype(np.float64) - 127)).all()
    assert (np.signbit(found) == (codes >= 8)).all()


def test_a_block_of_mxfp4_is_two_groups_their_scales_first() -> None:
    arrays = random_arrays(0, (17, 128), MXFP4)
    assert arrays.scales is not None
    blocks = formats.pack(arrays, MXFP4, "il16").reshape(2, 2, 544)
    assert blocks[0, 1, :16].tolist() == arrays.scales[:16, 2].tolist()
    assert blocks[0, 1, 16:32].tolist() == arrays.scales[:16, 3].tolist()
    assert blocks[1, 0, [0, 1, 16, 17]].tolist() == [
        *arrays.scales[16, :1],
        0,
        arrays.scales[16, 1],
        0,
    ]
    words = blocks[0, 1, 32:].copy().view(np.uint32).reshape(8, 16)
    assert (words == arrays.weight[:16, 8:].T).all()


@given(seeds, st.integers(1, 40), dense)
def test_vectors_are_plain_numbers_in_both_layouts(seed: int, size: int, fmt: Format) -> None:
    arrays = random_arrays(seed, (size,), fmt)
    for layout in ("il16", "row"):
        data = formats.pack(arrays, fmt, layout)
        assert data.tobytes() == arrays.weight.tobytes()


@given(seeds, st.sampled_from([2, 3, 4, 5, 6, 8]), st.integers(1, 5), st.integers(1, 3))
def test_code_words_are_one_little_endian_bit_stream_per_row(
    seed: int, bits: int, rows: int, groups: int
) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 64 * groups), dtype=np.uint8)
    words = formats.pack_codes(codes, bits)
    assert words.shape == (rows, groups * 2 * bits)
    for row, row_codes in zip(words, codes, strict=True):
        number = sum(int(code) << (bits * k) for k, code in enumerate(row_codes))
        assert int.from_bytes(row.tobytes(), "little") == number
    assert np.array_equal(formats.unpack_codes(words, bits), codes)


@given(seeds, st.sampled_from([(2, 4), (3, 4), (3, 8), (5, 8), (6, 8)]))
def test_widening_codes_changes_no_code(seed: int, widths: tuple[int, int]) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << widths[0], (3, 64), dtype=np.uint8)
    words = formats.repack_codes(formats.pack_codes(codes, widths[0]), *widths)
    assert np.array_equal(formats.unpack_codes(words, widths[1]), codes)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("size", GROUPS)
def test_il16_block_places_every_code_where_the_definition_says(bits: int, size: int) -> None:
    rng, words = np.random.default_rng(1), size * bits // 32
    codes = rng.integers(0, 1 << bits, (32, 2 * size), dtype=np.uint8)
    scales = rng.integers(0, 2**16, (32, 2), dtype=np.uint16)
    biases = rng.integers(0, 2**16, (32, 2), dtype=np.uint16)
    fmt = Format("affine", "bf16", bits, size)
    data = formats.pack(MlxArrays(formats.pack_codes(codes, bits), scales, biases), fmt, "il16")
    assert block_nbytes(fmt) == 64 + words * 64
    for row, group in ((0, 0), (17, 1), (31, 0)):
        start = (row // 16 * 2 + group) * block_nbytes(fmt)
        block = data[start : start + block_nbytes(fmt)]
        lane = row % 16
        assert block[:32].view(np.uint16)[lane] == scales[row, group]
        assert block[32:64].view(np.uint16)[lane] == biases[row, group]
        lane_words = block[64:].view(np.uint32).reshape(words, 16)[:, lane]
        expected = codes[row, size * group : size * (group + 1)].tolist()
        assert codes_of_words([int(w) for w in lane_words], bits) == expected


def codes_of_words(words: list[int], bits: int) -> list[int]:
    """The codes of one lane of a block, written out from the definition of the layout."""
    if bits != 3:
        stream = sum(word << (32 * j) for j, word in enumerate(words))
        return [(stream >> (bits * k)) & ((1 << bits) - 1) for k in range(32 * len(words) // bits)]
    codes = []
    for half in (words[at : at + 3] for at in range(0, len(words), 3)):
        for word in half:
            for u in (0, 1):
                codes += [(word >> (16 * u + 3 * i)) & 7 for i in range(5)]
        spare = [(word >> (16 * u + 15)) & 1 for u in (0, 1) for word in half]
        codes += [sum(bit << i for i, bit in enumerate(spare[s : s + 3])) for s in (0, 3)]
    return codes


def test_dequantised_value_is_scale_times_code_plus_bias() -> None:
    codes = np.arange(64, dtype=np.uint8)[None] % 16
    scale, bias = np.array([[-0.125]], np.float32), np.array([[0.75]], np.float32)
    arrays = MlxArrays(
        formats.pack_codes(codes, 4), formats.f32_to_bf16(scale), formats.f32_to_bf16(bias)
    )
    fmt = Format("affine", "bf16", 4, 64)
    values = formats.dequantize(Weight((1, 64), fmt, "il16", formats.pack(arrays, fmt, "il16")))
    assert np.array_equal(values, codes * scale + bias)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_dequantised_values_are_those_of_mlx(dtype: Any, size: int, bits: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX, to compare with, is missing")
    rng = np.random.default_rng(bits)
    fmt = Format("affine", dtype, bits, size)
    codes = rng.integers(0, 1 << bits, (19, 4 * size), dtype=np.uint8)
    # Scales and biases that are whole multiples of a step, so that no sum is rounded: MLX rounds
    # to the scales' type, and its product before its sum.
    scales = rng.integers(-7, 8, (19, 4)).astype(np.float32) / 64
    biases = rng.integers(-3, 4, (19, 4)).astype(np.float32) / 64
    if bits > 5:
        scales, biases = np.sign(scales) / 64, np.zeros_like(biases)
    arrays = MlxArrays(
        formats.pack_codes(codes, bits),
        formats.from_f32(scales, fmt),
        formats.from_f32(biases, fmt),
    )
    kind = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}[dtype]
    params = (mx.array(scales).astype(kind), mx.array(biases).astype(kind))
    theirs = mx.dequantize(mx.array(arrays.weight), *params, group_size=size, bits=bits)
    for layout in ("il16", "row"):
        data = formats.pack(arrays, fmt, layout)
        ours = formats.dequantize(Weight((19, 4 * size), fmt, layout, data))
        assert np.array_equal(ours, np.array(theirs.astype(mx.float32)))


@given(st.floats(width=32))
def test_bf16_rounds_to_nearest_even_and_widens_exactly(value: float) -> None:
    raw = formats.f32_to_bf16(np.array([value], np.float32))
    back = float(formats.bf16_to_f32(raw)[0])
    if np.isnan(value):
        assert np.isnan(back)
        return
    bits = int(np.float32(value).view(np.uint32))
    floor = bits & 0xFFFF0000
    up = floor + 0x10000
    rest = bits - floor
    nearest = floor if rest < 0x8000 or (rest == 0x8000 and not floor >> 16 & 1) else up
    assert int(raw[0]) == nearest >> 16
    assert formats.f32_to_bf16(formats.bf16_to_f32(raw))[0] == raw[0]


def four_bit(seed: int, rows: int, fmt: Format) -> tuple[MlxArrays, NDArray[Any]]:
    """Four groups in every row; also their codes, of which some groups have few."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice([2, 5, 8, 9, 16], (rows, 4, 1))
    codes = rng.integers(0, kinds, (rows, 4, fmt.group_size)) + rng.integers(0, 17 - kinds)
    scales = (rng.normal(size=(rows, 4)) / 64).astype(np.float32)
    words = formats.pack_codes(codes.reshape(rows, -1).astype(np.uint8), 4)
    raw = [formats.from_f32(part, fmt) for part in (scales, -8 * scales)]
    return MlxArrays(words, *raw), codes


@given(seeds, affine)
@example(196, Format("affine", "f32", 2, 32))  # two neighbours in float32, which both suit
def test_3bit_groups_are_fitted_or_kept_whichever_errs_less(seed: int, fmt: Format) -> None:
    fmt = replace(fmt, bits=4)
    four, codes = four_bit(seed, 2, fmt)
    three, new_fmt = formats.requantize_3bit(four, fmt)
    assert new_fmt == replace(fmt, bits=3)

    def params(arrays: MlxArrays) -> list[tuple[float, float]]:
        scales, biases = (formats.to_f32(part, fmt).ravel() for part in arrays[1:])
        return list(zip(scales.tolist(), biases.tolist(), strict=True))

    groups = codes.reshape(-1, fmt.group_size).tolist()
    new_codes = formats.unpack_codes(three.weight, 3).reshape(-1, fmt.group_size).tolist()
    for group, (scale, bias), found in zip(
        groups, params(four), zip(new_codes, params(three), strict=True), strict=True
    ):
        values = [Fraction(scale) * code + Fraction(bias) for code in group]
        fitted = fitted_3bit(group, values, 2 * Fraction(scale), fmt)
        if max(group) - min(group) > 7:
            assert found == fitted
            continue
        moved = rounded(Fraction(bias) + Fraction(scale) * min(group), fmt)
        kept = [code - min(group) for code in group], (scale, moved)
        lost, least = (missed(values, *three) for three in (fitted, kept))
        # Smaller differences of squares are below what float64 holds of the terms.
        if abs(lost - least) > len(group) * Fraction(scale) ** 2 / 2**36:
            assert found == (kept if least < lost else fitted)
        assert found in (kept, fitted)


def fitted_3bit(
    group: list[int], values: list[Fraction], slope: Fraction, fmt: Format
) -> tuple[list[int], tuple[float, float]]:
    """Every two neighbouring codes as one, with scale and bias of least squares."""
    q, size = [code >> 1 for code in group], Fraction(len(group))
    middle, level = sum(q) / size, sum(values) / size
    if spread := sum((x - middle) ** 2 for x in q):
        slope = sum((x - middle) * v for x, v in zip(q, values, strict=True)) / spread
    scale = rounded(slope, fmt)
    return q, (scale, rounded(level - Fraction(scale) * middle, fmt))


def missed(values: list[Fraction], codes: list[int], params: tuple[float, float]) -> Fraction:
    """The sum of squared errors, exact."""
    scale, bias = map(Fraction, params)
    return sum(
        ((scale * code + bias - v) ** 2 for code, v in zip(codes, values, strict=True)),
        Fraction(0),
    )


def test_3bit_groups_of_eight_neighbours_stay_as_they_are() -> None:
    fmt = Format("affine", "bf16", 4, 64)
    rng = np.random.default_rng(0)
    least = rng.integers(0, 9, (16, 4, 1))
    codes = (least + rng.integers(0, 8, (16, 4, 64))).astype(np.uint8).reshape(16, -1)
    scales = rng.integers(1, 8, (16, 4)).astype(np.float32) / 64
    raw = [formats.from_f32(part, fmt) for part in (scales, -4 * scales)]
    four = MlxArrays(formats.pack_codes(codes, 4), *raw)
    exact, three = (
        formats.dequantize_mlx(*both) for both in ((four, fmt), formats.requantize_3bit(four, fmt))
    )
    assert np.array_equal(exact, three)


def rounded(value: Fraction, fmt: Format) -> float:
    """To nearest even, by way of float32."""
    return float(formats.to_f32(formats.from_f32(np.array([value], np.float32), fmt), fmt)[0])


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_3bit_loses_two_thirds_of_what_requantising_would(dtype: Any) -> None:
    values = np.random.default_rng(3).normal(size=(64, 1024)).astype(np.float32)
    four, fmt = quantize(formats.from_f32(values, dense_of(dtype)), dense_of(dtype), 4, 64)
    exact = formats.dequantize_mlx(four, fmt)
    raw = formats.from_f32(exact, dense_of(dtype))
    nearest, refitted = (
        np.square(formats.dequantize_mlx(*three) - exact).mean(dtype=np.float64)
        for three in (quantize(raw, dense_of(dtype), 3, 64), formats.requantize_3bit(four, fmt))
    )
    assert refitted < 2 / 3 * nearest


def dense_of(dtype: Any) -> Format:
    return Format("dense", dtype)


def test_3bit_bytes_change_only_with_the_number_that_stores_keep() -> None:
    fmt = Format("affine", "bf16", 4, 64)
    words = np.arange(64 * 32, dtype=np.uint32).reshape(64, 32) * np.uint32(2654435761)
    words[1::2] &= np.uint32(0x7777_7777)  # Groups of eight neighbours.
    scales = (0x3C00 + np.arange(256, dtype=np.uint16)).reshape(64, 4)
    three, _ = formats.requantize_3bit(MlxArrays(words, scales, scales + np.uint16(0x8180)), fmt)
    crc = 0
    for part in three:
        assert part is not None
        crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
    assert (ROUNDING_3BIT, crc) == (3, 3059636440)


def test_3bit_takes_seven_ninths_of_the_bytes_of_4bit() -> None:
    four, three = (nbytes((64, 576), Format("affine", "bf16", b, 64), "il16") for b in (4, 3))
    assert three * 9 == four * 7


def test_row_parts_are_aligned_and_do_not_overlap() -> None:
    for align in (64, 4096):
        parts = row_parts((24, 192), Format("affine", "bf16", 3, 64), align)
        scales, biases = parts.params_offsets
        assert scales % align == biases % align == 0
        assert parts.codes_nbytes <= scales
        assert scales + parts.params_nbytes <= biases
        assert parts.nbytes == biases + parts.params_nbytes
        parts = row_parts((24, 192), MXFP4, align)
        (scales,) = parts.params_offsets
        assert scales % align == 0
        assert parts.codes_nbytes == 24 * 96 <= scales
        assert parts.nbytes == scales + 24 * 6


@pytest.mark.parametrize(
    ("shape", "fmt", "words"),
    [
        ((16, 100), Format("affine", "bf16", 4, 64), "multiple of 64"),
        ((16, 64), Format("affine", "bf16", 7, 64), "7-bit"),
        ((16, 64), Format("affine", "bf16", 4, 16), "groups of 16"),
        ((16, 96), Format("affine", "bf16", 4, 64), "multiple of 64"),
        ((16, 96), Format("affine", "bf16", 4, 32), "multiple of 64"),
        ((16, 192), Format("affine", "bf16", 4, 128), "multiple of 128"),
        ((16, 80), Format("affine", "bf16", 4, 32), "multiple of 64"),
        ((16,), Format("affine", "bf16", 4, 64), "2 dimensions"),
        ((16,), MXFP4, "2 dimensions"),
        ((16, 96), MXFP4, "multiple of 64"),
        ((16, 64), Format("mxfp4", "e8m0", 4, 64), "groups of 32"),
        ((16, 64), Format("mxfp4", "bf16", 4, 32), "e8m0"),
        ((16, 64), Format("affine", "e8m0", 4, 32), "e8m0"),
        ((2, 16, 64), Format("dense", "bf16"), "1 or 2 dimensions"),
        ((0, 64), Format("dense", "bf16"), "no elements"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_a_sentence(
    shape: tuple[int, ...], fmt: Format, words: str
) -> None:
    with pytest.raises(FormatError, match=words):
        nbytes(shape, fmt, "il16")
