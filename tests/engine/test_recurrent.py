"""Recurrent states: no conversation, failure or interruption changes what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from engine_tools import store_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_tools import mlx_options
from strategies import Choices

from aegis import Engine, plan
from aegis.engine.recurrent import Recurrence
from aegis.kernels import registry

pytestmark = pytest.mark.usefixtures("quick_open")

SMALL = Choices(
    model_type="qwen3_next", num_hidden_layers=3, full_attention_interval=3, num_experts=4
)
"""Two layers with Gated DeltaNet around none, then one with attention."""
STEP = 16
PROMPT = [(37 * i + i * i) % 509 for i in range(41)]
KEPT = 32
"""Where the last chunk of ``PROMPT`` begins."""
BACKENDS = [name for name, reason in registry.available() if reason is None]


def options(backend: str) -> dict[str, Any]:
    if backend == "mlx":
        return mlx_options("f32", cap="16GiB")
    return {"backend": backend, "cap": "300MiB", "context": 64, "prefill_step": STEP}


@pytest.fixture(scope="module", params=[name for name in BACKENDS if name != "mlx"])
def engine(request: pytest.FixtureRequest, cache: Any) -> Iterator[Engine]:
    with store_of(SMALL, seed=5) as store, Engine.open(store.path, **options(request.param)) as one:
        yield one


def bits(engine: Engine, compute: Callable[[], Any]) -> bytes:
    return engine.logits(compute())[0].tobytes()


def fresh(engine: Engine, ids: list[int]) -> bytes:
    """Logits behind a prompt that nothing came before."""
    return engine.score(ids)[0].tobytes()


def test_a_prompt_that_leaves_the_answer_goes_on_from_its_last_chunk(engine: Engine) -> None:
    other = [*PROMPT[:-2], 9, 8, 7]
    expected = fresh(engine, other)
    engine.score([3])
    list(engine.generate(PROMPT, 4, ignore_eos=True))
    assert engine.cached_prefix(other) == len(PROMPT) - 2
    assert engine.uncached(other) == len(other) - KEPT
    assert bits(engine, lambda: engine.feed(other)) == expected


def test_the_same_prompt_again_computes_its_last_chunk(engine: Engine) -> None:
    expected = fresh(engine, PROMPT)
    assert engine.uncached(PROMPT) == len(PROMPT) - KEPT
    assert bits(engine, lambda: engine.feed(PROMPT)) == expected


def test_a_prompt_that_goes_on_computes_what_is_new(engine: Engine) -> None:
    longer = [*PROMPT, 11, 12, 13]
    expected = fresh(engine, longer)
    engine.feed(PROMPT)
    assert engine.uncached(longer) == 3
    assert bits(engine, lambda: engine.feed(longer)) == expected


def test_a_prompt_that_leaves_before_the_copy_is_computed_anew(engine: Engine) -> None:
    other = [*PROMPT[: KEPT - 1], 9, 8]
    expected = fresh(engine, other)
    engine.feed(PROMPT)
    assert engine.uncached(other) == len(other)
    assert bits(engine, lambda: engine.feed(other)) == expected
    assert engine.uncached(PROMPT) == len(PROMPT), "the copy was of tokens that are gone"
    assert bits(engine, lambda: engine.feed(PROMPT)) == fresh(engine, PROMPT)


class Broken(Exception):
    """What a signal's handler raises."""


def broken(*_: Any) -> None:
    raise Broken


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("how", ["token", "prompt"])
def test_a_pass_that_fails_in_any_layer_leaves_the_engine_as_it_was(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, layer: int, how: str
) -> None:
    expected = fresh(engine, [*PROMPT, 11]), fresh(engine, [*PROMPT, 11, 12, 13])
    engine.feed(PROMPT)
    router: Any = engine._opened.decoder.layers[layer].mlp.router

    works = type(router).__call__
    with monkeypatch.context() as patch:
        patch.setattr(
            type(router),
            "__call__",
            lambda one, *rest: broken() if one is router else works(one, *rest),
        )
        with pytest.raises(Broken):
            engine.feed_token(77) if how == "token" else engine.feed([*PROMPT, 70, 71])
    assert engine.cached_prefix(PROMPT) == len(PROMPT)
    assert bits(engine, lambda: engine.feed_token(11)) == expected[0]
    assert bits(engine, lambda: engine.feed([*PROMPT, 11, 12, 13])) == expected[1]


def test_a_copy_that_was_interrupted_is_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = [4] * KEPT
    expected = fresh(engine, [*begin, 5, 6])
    engine.feed(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(engine._opened.recurrent_states[1], "keep", broken)
        with pytest.raises(Broken):
            engine.feed([*begin, 7, 8])
    engine.feed([*begin, 9])
    assert bits(engine, lambda: engine.feed([*begin, 5, 6])) == expected


def test_going_back_to_a_copy_can_be_interrupted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [*PROMPT[:-2], 9, 8, 7]
    expected = fresh(engine, other)
    engine.feed(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(engine._opened.recurrent_states[1], "restore", broken)
        with pytest.raises(Broken):
            engine.feed([*PROMPT[:KEPT], 5, 6])
    assert bits(engine, lambda: engine.feed(other)) == expected


SOME = st.integers(0, 9)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 45), st.lists(SOME, min_size=1, max_size=20), SOME),
        min_size=1,
        max_size=4,
    )
)
def test_any_conversation_gives_the_bits_of_fresh_prompts(
    engine: Engine, turns: list[tuple[int, list[int], int]]
) -> None:
    """Every turn keeps some of the prompt before and goes on in another way; then tokens follow."""
    ids: list[int] = list(PROMPT)
    found = []
    for keep, more, tokens in turns:
        ids = [*ids[:keep], *more][:50]
        found.append((list(ids), bits(engine, lambda now=ids: engine.feed(now))))
        for token in more[:tokens]:
            ids.append(token)
            found.append((list(ids), bits(engine, lambda t=token: engine.feed_token(t))))
    for prompt, expected in found:
        assert fresh(engine, prompt) == expected


def test_the_plan_counts_states_and_copies_and_the_ledger_what_they_take(engine: Engine) -> None:
    rows = {row.item: row for row in engine.ledger()}
    row = rows["recurrent_state"]
    heads, inputs = 4 * 32 * 32, 3 * (4 * 32 + 4 * 32)
    assert row.planned_nbytes == row.measured_nbytes == 2 * 2 * 4 * (heads + inputs)
    assert rows["kv_cache"].measured_nbytes == 2 * 2 * 64 * 32 * 4, "of one layer"


def test_models_without_such_layers_plan_nothing_for_them() -> None:
    assert dict(plan(cap="300MiB").items)["recurrent_state"] == 0


class Seen:
    """A state that remembers the tokens it has seen."""

    nbytes = 0

    def __init__(self) -> None:
        self.now, self.kept = list[int](), list[int]()

    def keep(self, position: int) -> None:
        assert len(self.now) == position
        self.kept = list(self.now)

    def restore(self) -> None:
        self.now = list(self.kept)


def advance(states: list[Seen], cached: list[int], new: list[int], fails: bool) -> None:
    """A pass over the layers, or over all of them for nothing."""
    for state in states:
        state.now = state.now if cached else []
        assert state.now == cached
        state.now = [*cached, *new]
    if fails:
        raise Broken


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(0, 3))))
def test_states_have_always_seen_what_is_cached(turns: list[tuple[int, int, int]]) -> None:
    states = [Seen(), Seen()]
    recurrence, cached = Recurrence(states), list[int]()
    for number, (wanted, count, failure) in enumerate(turns):
        start = min(wanted, len(cached))
        expected = recurrence.reachable(start)
        found = recurrence.resume(start)
        assert found == expected <= start
        new = cached[found:start] + [number] * count
        del cached[found:]
        if found and count > 1:
            recurrence.keep(found)

        try:
            recurrence.moving(found + len(new), advance, states, cached, new, failure == 1)
        except Broken:
            continue
        cached += new
        assert all(state.now == cached for state in states)
    assert recurrence.reachable(len(cached)) <= len(cached)


@pytest.mark.skipif("mlx" not in BACKENDS, reason="mlx is not there")
def test_on_mlx_too_prompts_go_on_from_their_last_chunk() -> None:
    prompt = [(37 * i + i * i) % 509 for i in range(300)]
    other = [*prompt[:-2], 9, 8, 7]
    with (
        store_of(SMALL, seed=5, layout="row") as store,
        Engine.open(store.path, **options("mlx") | {"context": 320}) as engine,
    ):
        expected = fresh(engine, other)
        list(engine.generate(prompt, 4, ignore_eos=True))
        assert engine.uncached(other) == len(other) - 256
        found = np.frombuffer(bits(engine, lambda: engine.feed(other)), np.float32)
        assert found.tobytes() == expected
