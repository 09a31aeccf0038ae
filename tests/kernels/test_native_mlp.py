"""Native MLP of layers without experts: right, and never dependent on how it was asked for."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from attention_tools import POOLS, chunkings, norm_rows, same_bits, vector, workspace
from hypothesis import given, settings
from hypothesis import strategies as st
from native_tools import PROJECTIONS, ffn, fmt_of, isa, normal, random_weight

from aegis.kernels.base import MlpSpec, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.mlp import NativeMlp

HIDDEN, INNER, ROWS = 128, 320, 150


def weights(bits: tuple[int, int, int] = (4, 8, 0), seed: int = 0) -> dict[str, Weight]:
    rng = np.random.default_rng(seed)
    given = {"norm": vector(1 + 0.1 * normal(rng, HIDDEN))}
    for name, width in zip(PROJECTIONS, bits, strict=True):
        shape = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
        given[name] = random_weight(rng, shape, fmt_of(width))
    return given


def block(given: dict[str, Weight], pool: Any = POOLS[1], multiplier: float = 1.0) -> NativeMlp:
    space = workspace(hidden_size=HIDDEN, intermediate_size=INNER, max_tokens=ROWS)
    return NativeMlp(pool, space, MlpSpec(HIDDEN, INNER, 1e-6, multiplier), given)


def rows(count: int = ROWS) -> Any:
    return normal(np.random.default_rng(1), count, HIDDEN)


@pytest.mark.parametrize("bits", [(4, 4, 4), (3, 8, 4), (8, 0, 3)])
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_matches_float64(bits: tuple[int, int, int], multiplier: float) -> None:
    given, x = weights(bits), rows(20)
    exact = x + multiplier * ffn(norm_rows(x, given["norm"], 1e-6), given)
    found = block(given, multiplier=multiplier)(x.copy())
    np.testing.assert_allclose(found, exact, atol=2e-5)
    assert np.abs(exact - x).max() > 0.05


@given(st.lists(st.integers(1, ROWS - 1), max_size=5))
@settings(max_examples=10)
def test_chunks_threads_and_instruction_sets_never_change_a_bit(cuts: list[int]) -> None:
    given, x = weights(), rows()
    whole = block(given, POOLS[0])(x.copy())
    for name, pool in zip(_native.isas() * len(POOLS), POOLS * len(_native.isas()), strict=True):
        with isa(name):
            mlp, parts, start = block(given, pool), [], 0
            for count in chunkings(ROWS, cuts):
                parts.append(mlp(x[start : start + count].copy()))
                start += count
        assert same_bits(np.concatenate(parts), whole)


def test_no_rows_are_none() -> None:
    assert block(weights())(rows(0)).shape == (0, HIDDEN)


def test_weights_that_do_not_fit_are_refused() -> None:
    given = weights()
    with pytest.raises(ValueError, match="an MLP of 128 by 320"):
        block(given | {"gate_proj": given["down_proj"]})
    with pytest.raises(ValueError, match="do not fit each other"):
        block(given | {"up_proj": given["down_proj"]})
    space = workspace(hidden_size=HIDDEN, max_tokens=ROWS)
    with pytest.raises(ValueError, match="workspace is too small"):
        NativeMlp(POOLS[0], space, MlpSpec(HIDDEN, INNER, 1e-6), given)
