"""Native embedding: exact rows from memory and from disk."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from attention_tools import same_bits, workspace
from native_tools import MX, fmt_of, isa, random_arrays, stored

from aegis.kernels import formats
from aegis.kernels.base import Weight
from aegis.kernels.native import _native
from aegis.kernels.native.embedding import NativeEmbedding
from aegis.kernels.sizes import CODE_BITS, GROUPS

VOCAB, HIDDEN = 43, 384
IDS = np.array([0, 42, 15, 16, 17, 31, 32, 7, 7], np.int32)
FORMATS = [(bits, dtype) for bits in (*CODE_BITS, 0) for dtype in ("bf16", "f16", "f32")]
FORMATS.append((MX, "e8m0"))


def table(bits: int, dtype: str, group_size: int = 64) -> Weight:
    fmt = fmt_of(bits, dtype, group_size)
    arrays = random_arrays(np.random.default_rng(bits), (VOCAB, HIDDEN), fmt)
    return stored(arrays, (VOCAB, HIDDEN), fmt)


def block(weight: Weight, in_memory: bool = True) -> NativeEmbedding:
    space = workspace(hidden_size=HIDDEN, max_tokens=16)
    kept = weight if in_memory else None
    return NativeEmbedding(space, (VOCAB, HIDDEN), weight.format, "il16", kept)


def ranges(weight: Weight, embedding: NativeEmbedding, ids: Any) -> Any:
    """What a reader would bring from disk."""
    starts = [embedding.row_offset(int(i)) for i in ids]
    return np.stack([weight.data[s : s + embedding.row_nbytes] for s in starts])


@pytest.mark.parametrize(("bits", "dtype"), FORMATS)
@pytest.mark.parametrize("size", GROUPS)
def test_rows_are_the_exact_ones_rounded_once(bits: int, dtype: str, size: int) -> None:
    weight = table(bits, dtype, size)
    arrays, fmt = formats.unpack(weight), weight.format
    if bits == 0:
        exact = formats.to_f32(arrays.weight, fmt)
    elif bits == MX:
        exact = formats.dequantize_mlx(arrays, fmt)
    else:
        assert arrays.scales is not None
        assert arrays.biases is not None
        codes = formats.unpack_codes(arrays.weight, bits).astype(np.float64)
        scale, bias = (
            np.repeat(formats.to_f32(part, fmt).astype(np.float64), size, axis=1)
            for part in (arrays.scales, arrays.biases)
        )
        exact = (scale * codes + bias).astype(np.float32)
    assert same_bits(block(weight)(IDS), exact[IDS])


def test_rows_are_multiplied_last() -> None:
    weight, space = table(4, "bf16"), workspace(hidden_size=HIDDEN, max_tokens=16)
    plain = block(weight)(IDS).copy()
    multiplied = NativeEmbedding(space, (VOCAB, HIDDEN), weight.format, "il16", weight, 0.3)
    assert same_bits(multiplied(IDS), plain * np.float32(0.3))
    read = multiplied.from_rows(IDS, ranges(weight, multiplied, IDS))
    assert same_bits(read, plain * np.float32(0.3))


@pytest.mark.parametrize(("bits", "dtype"), FORMATS)
def test_memory_disk_and_every_instruction_set_give_the_same_bits(bits: int, dtype: str) -> None:
    weight = table(bits, dtype)
    expected = block(weight)(IDS).copy()
    on_disk = block(weight, in_memory=False)
    for each in _native.isas():
        with isa(each):
            assert same_bits(block(weight)(IDS), expected)
            assert same_bits(on_disk.from_rows(IDS, ranges(weight, on_disk, IDS)), expected)


def test_ids_outside_the_table_are_refused() -> None:
    weight = table(4, "bf16")
    embedding = block(weight)
    for bad in (-1, VOCAB):
        ids = np.array([3, bad], np.int32)
        with pytest.raises(ValueError, match=f"token id {bad} "):
            embedding(ids)
        with pytest.raises(ValueError, match=f"token id {bad} "):
            embedding.from_rows(ids, np.zeros((2, embedding.row_nbytes), np.uint8))
        with pytest.raises(ValueError, match=f"token id {bad} "):
            embedding.row_offset(bad)


def test_too_many_ids_or_too_few_rows_are_refused() -> None:
    embedding = block(table(4, "bf16"))
    with pytest.raises(ValueError, match="more token ids"):
        embedding(np.zeros(17, np.int32))
    with pytest.raises(ValueError, match="than rows read"):
        embedding.from_rows(IDS, np.zeros((2, embedding.row_nbytes), np.uint8))
    with pytest.raises(ValueError, match="columns"):
        embedding.from_rows(IDS, np.zeros((9, 64), np.uint8))


def test_a_table_on_disk_says_how_to_use_it() -> None:
    with pytest.raises(ValueError, match="from_rows"):
        block(table(4, "bf16"), in_memory=False)(IDS)


def test_another_width_or_layout_is_refused() -> None:
    weight = table(4, "bf16")
    with pytest.raises(ValueError, match="hidden_size is 64"):
        NativeEmbedding(workspace(), (VOCAB, HIDDEN), weight.format, "il16", weight)
    space = workspace(hidden_size=HIDDEN)
    with pytest.raises(ValueError, match="layout il16"):
        NativeEmbedding(space, (VOCAB, HIDDEN), weight.format, "row", None)
