"""Tokens are drawn from the distribution asked for, and a seed repeats them."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aegis.engine import sampling
from aegis.engine.sampling import Sampler
from aegis.errors import LogitsError, UsageError
from aegis.settings import SAMPLING_NBYTES_PER_LOGIT

Floats = NDArray[np.float32]

GOLDENS = Path(__file__).parent.parent / "goldens/text"
MLX_LM = json.loads((GOLDENS / "sampling.json").read_text())["filters"]

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


@pytest.mark.parametrize("case", MLX_LM, ids=lambda case: str(case["settings"]))
def test_filters_and_penalty_are_those_of_mlx_lm(case: dict[str, Any]) -> None:
    logits = np.array(case["logits"], np.float32)
    assert sorted(kept(Sampler(temperature=1.0, **case["settings"]), logits)) == case["kept"]
    penalised = Sampler(repeat_penalty=1.3, repeat_last_n=20)._penalise(logits, case["history"])
    np.testing.assert_array_equal(penalised, np.array(case["penalised"], np.float32))


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


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-38, 1e38, 1e39, 1e300])
def test_an_extreme_repetition_penalty_still_ranks_numbers(penalty: float) -> None:
    logits = np.array([2.0, -2.0, 0.0, 1.0, -np.inf, 3e38, -3e38], np.float32)
    assert Sampler(repeat_penalty=penalty).sample(logits, range(7)) == 5
    only = Sampler(repeat_penalty=penalty).sample(logits, [5])
    assert only == (0 if penalty > 3e38 else 5)
    small = np.array([-2.0, -1.0, -1.5, -np.inf], np.float32)
    assert Sampler(repeat_penalty=penalty).sample(small, [1]) == (2 if penalty > 1 else 1)


def test_repetition_penalty_without_a_history_changes_nothing() -> None:
    logits = random_logits(100)
    for history in ([], ()):
        for last in (64, -1, 1):
            sampler = Sampler(repeat_penalty=5.0, repeat_last_n=last)
            assert sampler.sample(logits, history) == int(logits.argmax())


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"temperature": 5e-324},
        {"temperature": 1e-30, "top_p": 0.9},
        {"temperature": 1e-30, "top_k": 5},
    ],
    ids=str,
)
def test_the_narrowest_settings_are_greedy_and_the_lowest_of_equals(
    settings: dict[str, Any],
) -> None:
    logits = random_logits(500)
    logits[[77, 310]] = logits.max() + 1
    first = {"temperature": 3.0, **settings}
    drawn = {Sampler(seed=seed, **first).sample(logits) for seed in range(12)}
    # Where only the temperature narrows, equals stay equally likely, as in mlx-lm.
    ranked = "temperature" in settings or "min_p" in settings
    assert drawn <= {77, 310}
    assert ranked or drawn == {77}


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 10**30}, {"top_k": 500}, {"top_p": 1.0}, {"min_p": 1e-300}, {"top_p": 1.0 - 1e-16}],
    ids=str,
)
def test_the_widest_settings_keep_every_token(settings: dict[str, Any]) -> None:
    logits = random_logits(500) / 10
    sampler = Sampler(temperature=1e308, seed=3, **settings)
    draws = np.bincount([sampler.sample(logits) for _ in range(3000)], minlength=500)
    assert np.count_nonzero(draws) > 480  # of 500 equally likely ones, about 499 come


def test_logits_at_the_ends_of_float32_are_numbers() -> None:
    logits = np.array([3e38, -3e38, 3.4e38, -3.4e38], np.float32)
    for settings in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        for temperature in (0.0, 1e-300, 1.0):
            assert Sampler(temperature=temperature, seed=1, **settings).sample(logits) == 2


def test_settings_can_be_numpy_numbers() -> None:
    logits = random_logits(100)
    kinds = Sampler(
        temperature=np.float32(0.5), top_p=np.float64(0.9), top_k=np.int64(5), seed=np.int32(3)
    )
    plain = Sampler(temperature=0.5, top_p=0.9, top_k=5, seed=3)
    assert [kinds.sample(logits) for _ in range(9)] == [plain.sample(logits) for _ in range(9)]


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
        (lambda logits: np.put(logits, [3, 7], [np.inf, np.nan]), r"NaN \(first at token 7\)"),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.5, "top_p": 0.5},
    ],
)
@pytest.mark.parametrize("repeat_penalty", [1.0, 1.3])
def test_logits_that_are_no_numbers_are_named(
    change: Callable[[Floats], None],
    message: str,
    settings: dict[str, Any],
    repeat_penalty: float,
) -> None:
    logits = random_logits(100)
    change(logits)
    sampler = Sampler(seed=1, repeat_penalty=repeat_penalty, **settings)
    with pytest.raises(LogitsError, match=message):
        sampler.sample(logits, [3, 7])


@pytest.mark.parametrize("shape", [(0,), (2, 3)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LogitsError, match="shape"):
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
        {"temperature": "0.5"},
        {"temperature": None},
        {"top_p": "0.5"},
        {"top_p": None},
        {"top_k": 1.5},
        {"top_k": None},
        {"min_p": "0"},
        {"min_p": math.nan},
        {"seed": 1.5},
        {"seed": "a"},
        {"repeat_penalty": math.inf},
        {"repeat_penalty": True},
        {"repeat_last_n": 1.5},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused_by_name(settings: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e300},
        {"temperature": 5e-324},
        {"temperature": 1.7e308, "top_k": 100},
        {"temperature": 1.0, "repeat_penalty": 1e-300},
        {"temperature": 1.0, "repeat_penalty": 1e30, "top_p": 5e-324},
    ],
)
def test_a_program_that_makes_numpy_raise_gets_the_same_tokens(settings: dict[str, Any]) -> None:
    logits = np.linspace(-300.0, 50.0, 5000, dtype=np.float32)
    drawn = [
        [sampler.sample(logits, [4999, 7, 1]) for _ in range(5)]
        for sampler in (Sampler(seed=3, **settings), Sampler(seed=3, **settings))
    ]
    with np.errstate(all="raise"):
        sampler = Sampler(seed=3, **settings)
        assert [sampler.sample(logits, [4999, 7, 1]) for _ in range(5)] == drawn[0] == drawn[1]
