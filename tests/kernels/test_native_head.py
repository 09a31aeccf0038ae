"""Native head: logits that are right and never depend on how they were asked for."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from attention_tools import POOLS, norm_rows, same_bits, vector, workspace
from native_tools import fmt_of, isa, normal, random_weight

from aegis.kernels import formats
from aegis.kernels.base import HeadSpec, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.head import NativeHead
from aegis.kernels.sizes import CODE_BITS

HIDDEN, VOCAB, ROWS = 128, 201, 20


def weights(bits: int = 4) -> dict[str, Weight]:
    rng = np.random.default_rng(bits)
    return {
        "norm": vector(1 + 0.1 * normal(rng, HIDDEN)),
        "lm_head": random_weight(rng, (VOCAB, HIDDEN), fmt_of(bits)),
    }


def block(given: dict[str, Weight], pool: Any = POOLS[1]) -> NativeHead:
    space = workspace(hidden_size=HIDDEN, vocab_size=VOCAB, max_logit_rows=ROWS)
    return NativeHead(pool, space, HeadSpec(HIDDEN, VOCAB, 1e-6), given)


def rows(count: int = ROWS) -> Any:
    return normal(np.random.default_rng(0), count, HIDDEN)


@pytest.mark.parametrize("bits", [*CODE_BITS, 0])
def test_matches_float64(bits: int) -> None:
    given = weights(bits)
    exact = norm_rows(rows(), given["norm"], 1e-6) @ formats.dequantize(given["lm_head"]).T
    np.testing.assert_allclose(block(given)(rows()), exact, atol=2e-5)


def test_row_count_threads_and_instruction_set_never_change_a_bit() -> None:
    given, x = weights(), rows()
    whole = block(given, POOLS[0])(x).copy()
    for each in _native.isas():
        for pool in POOLS:
            with isa(each):
                head = block(given, pool)
                single = np.concatenate([head(x[i : i + 1]).copy() for i in range(ROWS)])
                assert same_bits(head(x), whole)
                assert same_bits(single, whole)


@pytest.mark.parametrize("threads", range(len(POOLS)))
def test_logits_are_divided_last(threads: int) -> None:
    given, space = weights(), workspace(hidden_size=HIDDEN, vocab_size=VOCAB, max_logit_rows=ROWS)
    plain = block(given)(rows()).copy()
    head = NativeHead(POOLS[threads], space, HeadSpec(HIDDEN, VOCAB, 1e-6, 6.0), given)
    assert same_bits(head(rows()), plain / np.float32(6))


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="21 rows of logits"):
        block(weights())(rows(21))


def test_another_shape_is_refused() -> None:
    given = weights()
    given["lm_head"] = random_weight(np.random.default_rng(0), (64, HIDDEN), fmt_of(4))
    with pytest.raises(ValueError, match="lm_head has shape"):
        block(given)
