"""Traces that come with aegis are whole, and are of the models that they are named for."""

from __future__ import annotations

from itertools import islice

import pytest

from aegis import Engine
from aegis.engine.forced import token_stream
from aegis.synthetic.shapes import SHAPES
from aegis.synthetic.shipped import SHIPPED, shipped_trace, shortened
from aegis.tiers.replay import replay
from aegis.tiers.routing_stats import chosen_again, guessed_right, popular_share
from aegis.tiers.trace import RoutingTrace, ids_digest


def of(model: str) -> RoutingTrace:
    trace = shipped_trace(model)
    assert trace is not None
    return trace


def test_the_35b_trace_has_the_shape_and_the_routing_that_were_published() -> None:
    trace = of("synthetic:qwen3.6-35b-a3b")
    config = SHAPES["qwen3.6-35b-a3b"]["text_config"]
    assert trace.model == "synthetic:qwen3.6-35b-a3b"
    assert trace.shape == (256, config["num_hidden_layers"], config["num_experts_per_tok"])
    assert trace.num_experts == config["num_experts"]
    assert trace.ids_sha256 == ids_digest(list(islice(token_stream(0, config["vocab_size"]), 256)))
    assert guessed_right(trace, 1) == pytest.approx(6.37, abs=0.15)
    assert guessed_right(trace, 2) == pytest.approx(5.75, abs=0.15)
    again = chosen_again(trace)
    assert again is not None
    assert 1 < again < 1.4
    assert 0.4 < popular_share(trace) < 0.5
    assert 0.33 <= replay(trace, 890, skip=64).hit_rate <= 0.5


def test_the_embedded_models_trace_is_what_it_chooses() -> None:
    trace = of("embedded")
    tokens, layers, _ = trace.shape
    assert (tokens, layers, trace.num_experts) == (128, 30, 16)
    with Engine.open(cap="400MiB", context=64) as engine, engine.tracing() as tracing:
        stream = list(islice(token_stream(0, engine.tokenizer.vocab_size), tokens))
        assert trace.ids_sha256 == ids_digest(stream)
        for token in stream[:12]:
            engine.feed_token(token)
        found = shortened(tracing.recorder.trace(engine.name, stream[:12]), stream[:12], 8)
    expected = shortened(trace, stream[:12], 8)
    assert (found.chosen == expected.chosen).all()
    for here, there in zip(found.guesses, expected.guesses, strict=True):
        assert (here == there).all()
    assert (found.model, found.ids_sha256) == (expected.model, expected.ids_sha256)


def test_other_models_have_none() -> None:
    assert shipped_trace("synthetic:olmoe-1b-7b") is None
    assert all(shipped_trace(model) is not None for model in SHIPPED)
