"""Native Gated DeltaNet: right, and the same bits for any chunking, thread count and processor."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)


from attention_tools import POOLS, chunkings, same_bits, vector, workspace
from delta_tools import Delta
from hypothesis import given, settings
from hypothesis import strategies as st
from native_tools import aligned, isa, normal

from aegis.kernels.native import _native, sizes
from aegis.kernels.native.delta import NativeRecurrentState

ISAS = _native.isas()

layers = st.builds(
    Delta,
    key_heads=st.sampled_from([1, 2]),
    value_heads=st.sampled_from([4, 8]),
    key_dim=st.sampled_from([16, 48]),
    value_dim=st.sampled_from([16, 32, 48]),
    taps=st.sampled_from([1, 2, 4]),
    max_tokens=st.sampled_from([1, 7, 40]),
    bits=st.sampled_from([3, 4, 8]),
    seed=st.integers(0, 1000),
)


def rows(count: int, hidden: int = 64, seed: int = 0) -> Any:
    return normal(np.random.default_rng(seed), count, hidden)


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim", "taps"),
    [
        (2, 4, 32, 32, 4),
        (4, 4, 16, 16, 4),
        (1, 4, 128, 128, 4),
        (2, 4, 48, 80, 2),
        (1, 4, 64, 16, 1),
    ],
)
def test_matches_float64(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int
) -> None:
    layer = Delta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=taps,
    )
    x = rows(200)
    np.testing.assert_allclose(layer.run(x, POOLS[1], [190] + 10 * [1]), layer.oracle(x), atol=3e-5)


@pytest.mark.parametrize("bits", [3, 8, 0])
def test_matches_float64_in_every_format(bits: int) -> None:
    layer, x = Delta(bits=bits), rows(40)
    np.testing.assert_allclose(layer.run(x, POOLS[1], [33, 7]), layer.oracle(x), atol=3e-5)


@given(layers, st.lists(st.integers(1, 47), max_size=6))
@settings(max_examples=25)
def test_chunks_and_threads_never_change_a_bit(layer: Delta, cuts: list[int]) -> None:
    x = rows(48)
    whole = layer.run(x, POOLS[0], [48])
    for pool in POOLS:
        assert same_bits(layer.run(x, pool, chunkings(48, cuts)), whole)


def test_one_token_at_a_time_equals_one_pass_over_more_rows_than_a_tile_has() -> None:
    layer, x = Delta(max_tokens=300), rows(300)
    whole = layer.run(x, POOLS[1], [300])
    assert same_bits(layer.run(x, POOLS[0], [1] * 300), whole)


@given(layers)
@settings(max_examples=10)
def test_every_instruction_set_gives_the_same_bits(layer: Delta) -> None:
    x, results = rows(20), []
    for each in ISAS:
        with isa(each):
            results.append(layer.run(x, POOLS[0], [13, 1, 6]))
    assert all(same_bits(result, results[0]) for result in results)


def test_a_state_goes_back_to_its_copy() -> None:
    layer, x = Delta(), rows(30)
    block, state = layer.block(POOLS[1]), layer.state()
    block(x[:10].copy(), state, 0)
    state.keep(10)
    once = block(x[10:20].copy(), state, 10)
    block(x[20:].copy(), state, 20)
    state.restore()
    assert same_bits(block(x[10:20].copy(), state, 10), once)


def test_a_state_begins_empty_at_position_0() -> None:
    layer, x = Delta(), rows(10)
    block, state = layer.block(POOLS[0]), layer.state()
    first = block(x.copy(), state, 0)
    assert same_bits(block(x.copy(), state, 0), first)
    assert not same_bits(block(x.copy(), state, 10), first)


def test_what_does_not_fit_is_refused() -> None:
    layer = Delta()
    short = aligned(sizes.recurrent_nbytes(layer.spec) - 4)
    with pytest.raises(ValueError, match="recurrent state and its copy need"):
        NativeRecurrentState(layer.spec, short)
    other = Delta(taps=2)
    with pytest.raises(ValueError, match="made for other sizes"):
        layer.block(POOLS[0])(rows(1), other.state(), 0)
    with pytest.raises(ValueError, match="columns"):
        layer.block(POOLS[0])(rows(1, 128), layer.state(), 0)
    layer.weights["conv"] = vector([1.0] * 7)
    with pytest.raises(ValueError, match="conv has shape"):
        layer.block(POOLS[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"key_heads": 3}, "evenly"), ({"key_dim": 24}, "multiples of 16"), ({"taps": 17}, "1 to 16")],
)
def test_sizes_without_kernels_are_refused(change: dict[str, int], message: str) -> None:
    layer = Delta(**{"key_dim": 32, "value_heads": 4} | change)
    with pytest.raises(ValueError, match=message):
        layer.block(POOLS[0])
    if "key_heads" not in change:
        reason = sizes.unsupported(replace(workspace().spec, delta=layer.spec))
        assert reason is not None
        assert "linear heads" in reason or "convolution" in reason
