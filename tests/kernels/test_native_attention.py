"""Native attention: right, and the same bits for any chunking, thread count and processor."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from attention_tools import POOLS, Attention, chunkings, same_bits, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from native_tools import aligned, isa, normal

from aegis.kernels.base import KVSpec, QKNorm
from aegis.kernels.native import _native
from aegis.kernels.native.attention import NativeKVCache

ISAS = _native.isas()

layers = st.builds(
    Attention,
    heads=st.sampled_from([4, 12]),
    kv_heads=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([16, 32, 48, 64]),
    rotary=st.sampled_from([8, 16]),
    max_tokens=st.sampled_from([1, 7, 40]),
    bits=st.sampled_from([3, 4, 8]),
    biases=st.booleans(),
    seed=st.integers(0, 1000),
    qk_norm=st.sampled_from(["none", "head", "all"]),
    scale=st.sampled_from([None, 0.3]),
    residual=st.sampled_from([1.0, 0.22]),
)
gated = st.builds(
    Attention,
    dim=st.sampled_from([16, 48]),
    rotary=st.just(8),
    max_tokens=st.sampled_from([1, 7, 40]),
    qk_norm=st.sampled_from(["none", "head"]),
    gate=st.just(True),
)

windowed = st.builds(
    Attention,
    heads=st.sampled_from([4, 12]),
    kv_heads=st.sampled_from([1, 2]),
    dim=st.sampled_from([16, 64]),
    rotary=st.just(16),
    max_tokens=st.sampled_from([1, 7, 40]),
    rotary_scale=st.just(1.35),
    window=st.integers(1, 50),
    sinks=st.booleans(),
)


def rows(count: int, hidden: int = 64, seed: int = 0) -> Any:
    return normal(np.random.default_rng(seed), count, hidden)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"),
    [(4, 4, 32, 32), (9, 3, 64, 64), (8, 1, 128, 64), (40, 1, 16, 16), (4, 2, 256, 64)],
)
def test_matches_float64(heads: int, kv_heads: int, dim: int, rotary: int) -> None:
    layer = Attention(heads=heads, kv_heads=kv_heads, dim=dim, rotary=rotary, context=300)
    x = rows(300)
    exact = layer.oracle(x)
    np.testing.assert_allclose(layer.run(x, POOLS[1], [290] + 10 * [1]), exact, atol=2e-5)


@pytest.mark.parametrize("bits", [3, 8, 0])
def test_matches_float64_in_every_format(bits: int) -> None:
    layer = Attention(bits=bits, biases=bits == 8)
    x = rows(40)
    np.testing.assert_allclose(layer.run(x, POOLS[1], [33, 7]), layer.oracle(x), atol=2e-5)


@pytest.mark.parametrize("qk_norm", ["head", "all"])
@pytest.mark.parametrize("dim", [16, 48, 64])
def test_matches_float64_with_normed_heads_and_multipliers(qk_norm: QKNorm, dim: int) -> None:
    layer = Attention(dim=dim, rotary=16, qk_norm=qk_norm, scale=0.3, residual=0.22)
    x = rows(40)
    np.testing.assert_allclose(layer.run(x, POOLS[1], [33, 7]), layer.oracle(x), atol=2e-5)


@pytest.mark.parametrize("qk_norm", ["head", "none"])
@pytest.mark.parametrize("dim", [16, 64])
def test_matches_float64_with_gates_for_the_output(qk_norm: QKNorm, dim: int) -> None:
    layer = Attention(dim=dim, rotary=16, qk_norm=qk_norm, gate=True)
    x = rows(40)
    np.testing.assert_allclose(layer.run(x, POOLS[1], [33, 6, 1]), layer.oracle(x), atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 255, 256, 257, 400])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 64), (4, 4, 16)])
def test_matches_float64_with_windows_and_sinks(
    window: int | None, heads: int, kv_heads: int, dim: int
) -> None:
    layer = Attention(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        rotary=16,
        context=560,
        max_tokens=560,
        rotary_scale=1.35,
        window=window,
        sinks=True,
    )
    x = rows(550)
    found = layer.run(x, POOLS[1], [540] + 10 * [1])
    np.testing.assert_allclose(found, layer.oracle(x), atol=2e-5)


@pytest.mark.parametrize("window", [5, 100, 255, 257])
def test_a_window_over_position_blocks_gives_the_same_bits_in_any_chunks(window: int) -> None:
    layer = Attention(
        heads=4, kv_heads=2, dim=32, context=600, max_tokens=600, window=window, sinks=True
    )
    x = rows(600)
    whole = layer.run(x, POOLS[1], [600])
    assert same_bits(layer.run(x, POOLS[0], [250, 3, 1, 1, 1, 1, 200, 55, 1, 87]), whole)
    assert same_bits(layer.run(x, POOLS[1], 600 * [1]), whole)


def test_a_window_that_sees_all_is_none() -> None:
    x = rows(48)
    assert same_bits(
        Attention(window=48).run(x, POOLS[0], [48]), Attention().run(x, POOLS[0], [40, 8])
    )


def test_what_a_window_has_left_behind_never_leaks() -> None:
    """Not even as a NaN times nothing."""
    layer, x = Attention(window=5), rows(30)
    expected = layer.run(x, POOLS[1], [30])[20:]
    for chunks in ([10], 10 * [1]):
        block, cache = layer.block(POOLS[1]), layer.cache()
        block(x[:20].copy(), cache, 0)
        keys, values = cache._buffer.view(np.float32).reshape(2, 2, 64, 32)
        values[:, :16] = np.nan
        keys.reshape(2, 4, 32, 16)[:, 0] = np.nan
        found, start = [], 20
        for count in chunks:
            found.append(block(x[start : start + count].copy(), cache, start))
            start += count
        assert same_bits(np.concatenate(found), expected)


@given(st.one_of(layers, gated, windowed), st.lists(st.integers(1, 47), max_size=6))
@settings(max_examples=25)
def test_chunks_and_threads_never_change_a_bit(layer: Attention, cuts: list[int]) -> None:
    x = rows(48)
    whole = layer.run(x, POOLS[0], [48])
    for pool in POOLS:
        assert same_bits(layer.run(x, pool, chunkings(48, cuts)), whole)


def test_chunks_across_position_blocks_and_row_tiles_never_change_a_bit() -> None:
    layer = Attention(heads=6, kv_heads=2, dim=32, context=600, max_tokens=600)
    x = rows(600)
    whole = layer.run(x, POOLS[1], [600])
    assert same_bits(layer.run(x, POOLS[0], [250, 3, 1, 1, 1, 1, 200, 55, 1, 87]), whole)
    assert same_bits(layer.run(x, POOLS[1], [129, 129, 129, 129, 84]), whole)


def test_token_by_token_equals_a_single_call() -> None:
    layer = Attention(heads=8, kv_heads=1, dim=16, rotary=16, context=280, max_tokens=280)
    x = rows(280)
    assert same_bits(layer.run(x, POOLS[1], 280 * [1]), layer.run(x, POOLS[1], [280]))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "qk_norm", "window"),
    [
        (4, 2, 32, "none", None),
        (12, 1, 48, "head", None),
        (10, 2, 64, "all", None),
        (8, 1, 64, "none", 20),
    ],
)
def test_every_instruction_set_gives_the_same_bits(
    heads: int, kv_heads: int, dim: int, qk_norm: QKNorm, window: int | None
) -> None:
    layer = Attention(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        context=272,
        max_tokens=272,
        qk_norm=qk_norm,
        residual=1.0 if qk_norm == "none" else 0.22,
        window=window,
        sinks=window is not None,
    )
    x = rows(270)
    results = []
    for each in ISAS:
        with isa(each):
            results.append(layer.run(x, POOLS[1], [262, 1, 7]))
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("chunks", [[21], [20, 1], 21 * [1]])
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e38])
def test_garbage_in_unused_positions_never_leaks(chunks: list[int], fill: float) -> None:
    layer = Attention()
    x = rows(21)
    assert same_bits(layer.run(x, POOLS[1], chunks, fill), layer.run(x, POOLS[1], [21], 0.0))


def test_old_tokens_behind_a_shorter_prompt_never_leak() -> None:
    layer = Attention()
    x, block, cache = rows(30), layer.block(POOLS[1]), layer.cache()
    fresh = layer.run(x[:5], POOLS[1], [5])
    block(rows(30, seed=1), cache, 0)
    assert same_bits(block(x[:5].copy(), cache, 0), fresh)


def test_updates_the_residual_stream_in_place() -> None:
    layer = Attention()
    x = rows(3)
    assert layer.block(POOLS[0])(x, layer.cache(), 0) is x
    assert not same_bits(x, rows(3))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 24, "heads": 8, "rotary": 8}, "head_dim 24"),
        ({"dim": 320, "rotary": 64}, "head_dim 320"),
        ({"heads": 4, "kv_heads": 3}, "4 attention heads"),
        ({"rotary": 64}, "rotary"),
    ],
)
def test_shapes_without_a_kernel_are_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Attention(**changes).block(POOLS[0])


def test_positions_outside_the_cache_are_refused() -> None:
    layer = Attention()
    block, cache = layer.block(POOLS[0]), layer.cache()
    for start in (-1, 62):
        with pytest.raises(ValueError, match="context of 64"):
            block(rows(3), cache, start)


def test_a_cache_of_other_heads_is_refused() -> None:
    layer = Attention()
    other = Attention(kv_heads=4).cache()
    with pytest.raises(ValueError, match="other key/value heads"):
        layer.block(POOLS[0])(rows(1), other, 0)


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 8192"):
        NativeKVCache(KVSpec(1, 16, 50), aligned(8191))


def test_weights_of_another_shape_are_refused() -> None:
    layer = Attention()
    layer.weights["o_proj"] = layer.weights["k_proj"]
    with pytest.raises(ValueError, match="o_proj"):
        layer.block(POOLS[0])


@pytest.mark.parametrize("name", ["norm", "q_norm", "k_norm", "sinks"])
@pytest.mark.parametrize("qk_norm", ["head", "all"])
def test_norms_of_another_size_are_refused(name: str, qk_norm: QKNorm) -> None:
    layer = Attention(qk_norm=qk_norm, sinks=True)
    layer.weights[name] = vector([1.0] * 16)
    with pytest.raises(ValueError, match=f"attention {name} has shape"):
        layer.block(POOLS[0])


def test_gates_cannot_be_normed_along_with_queries() -> None:
    with pytest.raises(ValueError, match="gates"):
        Attention(qk_norm="all", gate=True).block(POOLS[0])
