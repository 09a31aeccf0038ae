"""A trace is what routers chose, and taking one changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from synthetic_tools import SMALL, write_shape

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.engine.forced import token_stream
from aegis.kernels.formats import dequantize
from aegis.synthetic.recipe import recipe
from aegis.synthetic.write import make
from aegis.tiers.replay import replay
from aegis.tiers.routing_stats import chosen_again, guessed_right, popular_share
from aegis.tiers.trace import RoutingTrace, ids_digest

VOCABULARY = SMALL["text_config"]["vocab_size"]
LAYERS, EXPERTS, PER_TOKEN = 8, 64, 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("synthetic")
    return make(recipe(write_shape(folder / "shape")), folder / "store", "il16")


def stream(count: int) -> list[int]:
    return list(islice(token_stream(0, VOCABULARY), count))


def traced(engine: Engine, ids: list[int]) -> RoutingTrace:
    with engine.tracing() as tracing:
        for token in ids:
            engine.feed_token(token)
        return tracing.recorder.trace("m", ids)


@pytest.fixture(scope="module")
def long_trace(store: Store) -> Iterator[RoutingTrace]:
    with Engine.open(store.path, cap="1GiB", context=512) as engine:
        yield traced(engine, stream(300))


def test_recording_changes_no_bit_and_ends(store: Store) -> None:
    ids = stream(20)
    hidden = []
    for record in (False, True):
        with Engine.open(store.path, cap="1GiB", context=64) as engine:
            if record:
                trace = traced(engine, ids[:-1])
            else:
                for token in ids[:-1]:
                    engine.feed_token(token)
            hidden.append(np.array(engine.feed_token(ids[-1])).tobytes())
            assert engine._opened.forward.observer is None
    assert hidden[0] == hidden[1]
    assert trace.shape == (19, LAYERS, PER_TOKEN)
    assert trace.ids_sha256 == ids_digest(ids[:-1])


@pytest.mark.parametrize("policy", ["lfu", "lru", "random"])
def test_replaying_hits_what_the_run_hit(store: Store, policy: str) -> None:
    """Exactly: with nothing guessed, the order in which reads end does not matter."""
    ids = stream(40)
    options = {"context": 64, "guess": "none", "max_slots": 100, "policy": policy}
    with Engine.open(store.path, cap="1GiB", **options) as engine:
        slots = engine._opened.tiers.slots.num_slots
        trace = traced(engine, ids)
        counted = engine.stats.totals("decode")
    found = replay(trace, slots, policy=policy)
    exact = ("hits", "hot_hits", "misses", "late")
    assert all(getattr(found, name) == getattr(counted, name) for name in exact)
    assert 0 < found.hits < trace.chosen.size


def test_guesses_are_those_of_the_next_layers_routers(store: Store) -> None:
    ids = stream(6)
    states: list[NDArray[np.float32]] = []
    with Engine.open(store.path, cap="1GiB", context=64) as engine:
        with engine.tracing() as tracing:
            look = tracing.look
            tracing.look = lambda index, x: (states.append(np.array(x[0])), look(index, x))[1]
            for token in ids:
                engine.feed_token(token)
            trace = tracing.recorder.trace("m", ids)
        buffer = np.empty(store.layout.resident_nbytes(), np.uint8)
        weights = store.load_resident(buffer)
        gates = [dequantize(weights[f"layers.{layer}.mlp.gate"]) for layer in range(LAYERS)]
    seen = np.array(states).reshape(len(ids), LAYERS, -1)
    for ahead in (1, 2):
        for layer in range(LAYERS - ahead):
            logits = seen[:, layer] @ gates[layer + ahead].T
            best = np.sort(np.argsort(-logits, axis=-1)[:, :PER_TOKEN], axis=-1)
            found = trace.guesses[ahead - 1][:, layer]
            assert np.array_equal(np.sort(found[:, :PER_TOKEN], axis=-1), best)
            ranked = np.take_along_axis(logits, found.astype(np.intp), axis=-1)
            assert (np.diff(ranked, axis=-1) <= 0).all()


def test_synthetic_routing_has_the_structure_of_real_routing(long_trace: RoutingTrace) -> None:
    """The figures of the 35B shape are in the README; a small one has the same, roughly."""
    one, two = guessed_right(long_trace, 1), guessed_right(long_trace, 2)
    again = chosen_again(long_trace)
    assert one is not None
    assert two is not None
    assert again is not None
    assert 0.72 < one / PER_TOKEN < 0.92
    assert 0.62 < two / PER_TOKEN < one / PER_TOKEN - 0.02
    assert 0.08 < again / PER_TOKEN < 0.4
    assert 0.25 < popular_share(long_trace) < 0.6
    found = replay(long_trace, round(LAYERS * EXPERTS * 890 / 10240), skip=75)
    assert 0.25 < found.hit_rate < 0.6
    useful = [
        replay(long_trace, 45, guess=kind, skip=75).useful for kind in ("cross-layer", "previous")
    ]
    assert useful[0] > 4 * useful[1]


def test_the_residual_stream_stays_sane_in_every_layer(tmp_path: Path) -> None:
    config = SMALL | {"text_config": SMALL["text_config"] | {"num_hidden_layers": 40}}
    made = recipe(write_shape(tmp_path / "shape", config))
    sizes: list[float] = []
    store = make(made, tmp_path / "store", "il16")
    with Engine.open(store.path, cap="1GiB", context=64) as engine:
        with engine.tracing() as tracing:
            tracing.look = lambda index, x: sizes.append(float(np.sqrt((x * x).mean())))  # type: ignore[method-assign,assignment]
            for token in stream(12):
                hidden = engine.feed_token(token)
        assert np.isfinite(engine.logits(hidden)).all()
    by_layer = np.array(sizes).reshape(12, 40).mean(axis=0)
    assert np.isfinite(by_layer).all()
    assert 1.5 < by_layer[-1] / by_layer[0] < 8
    assert (by_layer[1:] / by_layer[:-1] < 1.2).all()
