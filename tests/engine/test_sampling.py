"""Tokens are drawn from the distribution asked for, and a seed repeats them."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aegis.engine import sampling
from aegis.engine.sampling import Sampler
from aegis.errors import AegisError, UsageError
from aegis.settings import SAMPLING_NBYTES_PER_LOGIT

Floats = NDArray[np.float32]

LOGITS = st.lists(
    st.floats(-30, 30, width=32) | st.integers(-3, 3).map(float), min_size=1, max_size=80
).map(lambda values: np.array(values, np.float32))


def random_logits(size: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def kept(sampler: Sampler, logits: Floats) -> list[int]:
    ids = sampler._kept(logits, float(logits.max()))
    return [int(token) for token in ids]


def expected(logits: Floats, top_p: float, top_k: int, min_p: float) -> list[int]:
    """The filters written out plainly, on the distribution at temperature 1."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    odds = [math.exp(float(logits[token]) - float(logits.max())) for token in order]
    total, above, left = sum(odds), 0.0, []
    for rank, token in enumerate(order):
        ok = (
            (top_p == 1.0 or above < top_p * total)
            and odds[rank] >= min_p
            and (not top_k or rank < top_k)
        )
        if ok or rank == 0:
            left.append(token)
        above += odds[rank]
    return left


@given(logits=LOGITS)
def test_temperature_zero_takes_the_largest_and_the_lowest_id_of_equals(logits: Floats) -> None:
    chosen = Sampler().sample(logits)
    assert chosen == min(i for i, value in enumerate(logits) if value == logits.max())


@given(
    logits=LOGITS,
    top_p=st.sampled_from([1.0, 0.97, 0.5, 0.11]),
    top_k=st.integers(0, 12),
    min_p=st.sampled_from([0.0, 0.013, 0.3, 1.0]),
)
def test_filters_keep_what_their_definitions_say(
    logits: Floats, top_p: float, top_k: int, min_p: float
) -> None:
    sampler = Sampler(temperature=1.0, top_p=top_p, top_k=top_k, min_p=min_p)
    total = float(np.exp(logits.astype(np.float64) - float(logits.max())).sum())
    near = np.cumsum(np.sort(np.exp(logits.astype(np.float64) - float(logits.max())))[::-1])
    if top_p < 1.0 and np.any(np.abs(near / total - top_p) < 1e-9):
        return  # the border falls on rounding
    assert kept(sampler, logits) == expected(logits, top_p, top_k, min_p)


@pytest.mark.parametrize("size", [1, 1023, 5000, 49152])
@pytest.mark.parametrize("count", [1, 40, 700])
def test_the_ranking_is_a_stable_sort_also_among_ties(size: int, count: int) -> None:
    for logits in (random_logits(size), np.round(random_logits(size)).astype(np.float32)):
        whole = np.argsort(-logits, kind="stable")
        np.testing.assert_array_equal(sampling._ranked(logits, min(count, size)), whole[:count])


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(settings: dict[str, Any], temperature: float) -> None:
    logits = random_logits(12)
    sampler = Sampler(temperature=temperature, seed=7, **settings)
    draws = np.bincount([sampler.sample(logits) for _ in range(4000)], minlength=12) / 4000
    ids = kept(sampler, logits)
    odds = np.zeros(12)
    odds[ids] = np.exp(logits[ids].astype(np.float64) / temperature)
    odds /= odds.sum()
    assert set(np.flatnonzero(draws)) <= set(ids)
    assert np.abs(draws - odds).max() < 5 * 0.5 / math.sqrt(4000)


def test_draws_reach_every_block_of_a_large_vocabulary() -> None:
    logits = np.zeros(3 * 8192 + 5, np.float32)
    sampler = Sampler(temperature=1.0, seed=3)
    draws = np.array([sampler.sample(logits) for _ in range(300)])
    assert set(draws // 8192) >= {0, 1, 2}
    assert draws.max() < logits.size


def test_a_seed_gives_these_tokens_on_every_machine() -> None:
    logits = ((np.arange(5000) * 7919) % 1009).astype(np.float32) / 101
    draws = {
        name: [sampler.sample(logits) for _ in range(6)]
        for name, sampler in {
            "all": Sampler(temperature=0.8, seed=42),
            "top_p": Sampler(temperature=0.8, top_p=0.9, seed=42),
            "top_k": Sampler(temperature=1.2, top_k=50, seed=42),
        }.items()
    }
    assert draws == {
        "all": [3713, 798, 1386, 1728, 185, 4346],
        "top_p": [1313, 620, 2981, 3291, 4313, 390],
        "top_k": [1075, 2539, 3304, 1042, 1774, 3858],
    }


def test_the_random_numbers_are_splitmix64() -> None:
    sampler = Sampler(temperature=1.0, seed=1234567)
    numbers = [sampler._uniform() for _ in range(3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert numbers == [(number >> 11) * 2.0**-53 for number in published]


def test_equal_seeds_repeat_and_others_differ() -> None:
    logits = random_logits(1000)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(temperature=1.0, seed=seed)
        return [sampler.sample(logits) for _ in range(20)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    drawn = Sampler(temperature=1.0)
    assert [drawn.sample(logits) for _ in range(20)] == draws(drawn.seed)


@given(x=st.lists(st.floats(-700, 0), min_size=1, max_size=20))
def test_the_own_exponential_is_exact_to_a_few_units(x: list[float]) -> None:
    values = np.array(x)
    np.testing.assert_allclose(sampling.exp(values), np.exp(values), rtol=4e-16)


def test_the_own_exponential_ends_in_zero() -> None:
    assert sampling.exp(np.array([0.0, -700.5, -1e308, -np.inf])).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = np.array([2.0, 1.9, -1.0, -0.9], np.float32)
    before = logits.copy()
    assert Sampler(repeat_penalty=1.2).sample(logits, [0]) == 1
    assert Sampler(repeat_penalty=1.2).sample(-np.abs(logits), [3]) == 2
    np.testing.assert_array_equal(logits, before)


def test_repetition_penalty_looks_back_as_far_as_asked() -> None:
    logits = np.array([2.0, 1.9, 1.0], np.float32)
    history = [0, 2, 2]

    def chosen(last: int) -> int:
        return Sampler(repeat_penalty=1.5, repeat_last_n=last).sample(logits, history)

    assert [chosen(last) for last in (0, 2, 3, -1)] == [0, 0, 1, 1]
    assert Sampler(repeat_penalty=1.5).sample(logits, [0, 999]) == 1


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(20000, -np.inf, np.float32)
    logits[[3, 12345]] = 0.0
    for settings in ({}, {"top_k": 10}, {"top_p": 0.999}, {"min_p": 0.1}):
        sampler = Sampler(temperature=2.0, seed=1, **settings)
        assert {sampler.sample(logits) for _ in range(40)} == {3, 12345}


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(500)
    assert Sampler(temperature=1e-300, seed=1).sample(logits) == int(logits.argmax())
    assert Sampler(temperature=1e-300, top_p=0.9).sample(logits) == int(logits.argmax())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits: np.put(logits, 7, np.nan), r"NaN \(first at token 7\)"),
        (lambda logits: np.put(logits, 7, np.inf), r"largest logit is inf \(token 7\)"),
        (lambda logits: logits.fill(-np.inf), "largest logit is -inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_named(
    change: Callable[[Floats], None], message: str, temperature: float
) -> None:
    logits = random_logits(100)
    change(logits)
    with pytest.raises(AegisError, match=message):
        Sampler(temperature=temperature).sample(logits)


@pytest.mark.parametrize("shape", [(0,), (2, 3)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(AegisError, match="shape"):
        Sampler().sample(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"seed": -1},
        {"repeat_penalty": 0.0},
        {"repeat_last_n": -2},
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        Sampler(**settings)


@pytest.mark.parametrize("settings", [{"top_p": 0.999999}, {"min_p": 1e-9}, {"top_k": 40000}])
def test_filters_that_keep_everything_work_in_a_few_arrays(settings: dict[str, Any]) -> None:
    logits = np.zeros(49152, np.float32)
    sampler = Sampler(temperature=1.0, seed=1, **settings)
    sampler.sample(logits)
    tracemalloc.start()
    sampler.sample(logits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= SAMPLING_NBYTES_PER_LOGIT * logits.size
