"""What is measured is what happened, and the same at every repetition of a bench."""

from __future__ import annotations

from itertools import islice

import pytest
from engine_tools import store_of
from hypothesis import given
from hypothesis import strategies as st
from mlx_tools import PLENTY as MLX_PLENTY
from mlx_tools import mlx_options, needs_mlx
from small_model import SMALL, open_small

from aegis.bench.measure import Meter, Window, measure, repetition
from aegis.checkpoint.store import Store
from aegis.engine.forced import token_stream

PROMPT, TOKENS, REPETITIONS = 24, 8, 3
CHOICES = SMALL.num_hidden_layers * SMALL.num_experts_per_tok


@pytest.fixture(scope="module", params=[2, 12, 24])
def windows(store: Store, request: pytest.FixtureRequest) -> list[tuple[Window, Window]]:
    with open_small(store, max_slots=request.param) as engine, engine.timing() as timing:
        found = measure(engine, timing, PROMPT, TOKENS, REPETITIONS, seed=5)
    return [(one.prompt, one.decoded) for one in found if one.prompt and one.decoded]


def test_the_parts_of_a_windows_time_make_the_whole(windows: list[tuple[Window, Window]]) -> None:
    assert len(windows) == REPETITIONS
    for window in (window for both in windows for window in both):
        split = window.to_json(True)["split_s"]
        assert sum(split.values()) == pytest.approx(window.seconds)
        assert all(seconds >= 0 for seconds in split.values())
        assert split["wait"] == pytest.approx(window.counted.wait_s)
        assert 0 <= window.busy_s <= window.seconds * 1.001
    for _, decoded in windows:
        assert len(decoded.token_s) == TOKENS
        assert sum(decoded.token_s) <= decoded.seconds


def test_every_token_is_counted_once(windows: list[tuple[Window, Window]]) -> None:
    for prompt, decoded in windows:
        assert (prompt.tokens, decoded.tokens) == (PROMPT, TOKENS)
        counted = decoded.counted
        assert counted.hits + counted.late + counted.misses == counted.choices == TOKENS * CHOICES
        # A prompt asks once for each expert of a layer that any of its tokens has chosen.
        assert 0 < prompt.counted.choices <= SMALL.num_hidden_layers * SMALL.num_experts


def test_nothing_is_read_or_waited_for_once_every_expert_is_there(store: Store) -> None:
    with open_small(store) as engine, engine.timing() as timing:
        *_, last = measure(engine, timing, PROMPT, TOKENS, 4, seed=5)
    assert last.prompt is not None
    assert last.decoded is not None
    for window in (last.prompt, last.decoded):
        assert (window.counted.read_nbytes, window.busy_s, window.spent.wait) == (0, 0, 0)
        assert window.counted.hit_rate == 1


@needs_mlx
@pytest.mark.parametrize("slots", [3, None])
def test_where_calls_queue_the_device_and_reads_are_told_apart(slots: int | None) -> None:
    options = mlx_options("f32", cap=MLX_PLENTY, max_slots=slots)
    with store_of(SMALL, seed=11, layout="row") as made:
        with open_small(made, **options) as engine, engine.timing() as timing:
            assert not timing.has_blocks
            found = measure(engine, timing, PROMPT, TOKENS, 2 * REPETITIONS, seed=5)
        for window in (found[-1].prompt, found[-1].decoded):
            assert window is not None
            split = window.to_json(timing.has_blocks)["split_s"]
            told = {name: seconds for name, seconds in split.items() if seconds is not None}
            assert set(told) == {"wait", "queue", "device", "other"}
            assert sum(told.values()) == pytest.approx(window.seconds)
            assert min(told.values()) >= 0 < min(told["queue"], told["device"])
            assert slots is None or told["wait"] > 0


@pytest.mark.parametrize(("prompt", "tokens"), [(0, 4), (6, 0), (1, 1)])
def test_either_may_be_left_out(store: Store, prompt: int, tokens: int) -> None:
    done = []
    with open_small(store) as engine, engine.timing() as timing:
        found = measure(engine, timing, prompt, tokens, 2, 0, done.append)
    for one in found:
        assert [one.prompt is None, one.decoded is None] == [not prompt, not tokens]
    assert sum(done) == 2 * (prompt + tokens)


@given(st.integers(0, 1 << 64), st.integers(1, 600), st.integers(1, 30), st.integers(1, 4))
def test_no_prompt_begins_as_the_one_before(
    seed: int, vocab_size: int, count: int, repetitions: int
) -> None:
    from aegis.bench.measure import _unlike

    stream, last = token_stream(seed, vocab_size), -1
    drawn = []
    for _ in range(repetitions):
        ids = _unlike(last, stream, count)
        assert len(ids) == count
        # A vocabulary of control tokens has one token.
        assert ids[0] != last or vocab_size <= 18
        last = ids[0]
        drawn += ids
    assert set(drawn) <= set(islice(token_stream(seed, vocab_size), 64 * repetitions + len(drawn)))


def test_a_repetition_computes_what_it_was_given(store: Store) -> None:
    ids = list(islice(token_stream(1, SMALL.vocab_size), 20))
    with open_small(store) as engine, engine.timing() as timing:
        repetition(engine, Meter(engine, timing), ids[:12], ids[12:])
        assert engine.cached_prefix(ids) == 20
