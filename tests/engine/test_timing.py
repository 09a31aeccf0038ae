"""Clocks around blocks change nothing, and what they show is all that there is."""

from __future__ import annotations

import numpy as np
import pytest
from engine_tools import store_of
from mlx_tools import PLENTY, mlx_options, needs_mlx
from small_model import IDS, SMALL, open_small
from strategies import Choices

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.engine.timing import Spent

BLOCKS = ("attention", "experts", "head", "router")


def logits_of(engine: Engine) -> list[bytes]:
    """A prompt's, and those of some tokens behind it."""
    found = [np.array(engine.logits(engine.feed(IDS))).tobytes()]
    for token in (3, 1, 4):
        found.append(np.array(engine.logits(engine.feed_token(token))).tobytes())
    return found


def parts(spent: Spent) -> list[float]:
    return [getattr(spent, name) for name in BLOCKS]


def test_clocks_change_no_bit_and_are_gone_afterwards(store: Store) -> None:
    with open_small(store) as engine:
        plain = logits_of(engine)
    with open_small(store) as engine:
        forward, decoder = engine._opened.forward, engine._opened.decoder
        blocks = forward.blocks
        with engine.timing() as timing:
            assert forward.blocks[0] is engine._opened.decoder is not decoder
            assert logits_of(engine) == plain
            spent = timing.spent
        assert forward.blocks == blocks
        assert engine._opened.decoder is decoder
        engine.feed_token(1)
        assert parts(timing.spent) == parts(spent)
    assert all(seconds > 0 for seconds in parts(spent))


def test_clocks_are_gone_after_an_error_too(engine: Engine) -> None:
    decoder = engine._opened.decoder
    with pytest.raises(ZeroDivisionError), engine.timing():
        raise ZeroDivisionError
    assert engine._opened.decoder is decoder


def test_waiting_is_what_the_tiers_waited(streaming: Engine) -> None:
    with streaming.timing() as timing:
        before = timing.spent
        logits_of(streaming)
        spent = timing.spent.since(before)
    assert spent.wait == pytest.approx(streaming.stats.totals().wait_s)
    assert spent.total == pytest.approx(sum(parts(spent)) + spent.wait)
    assert timing.busy_s > 0


def test_a_row_of_the_embedding_that_is_read_from_disk_is_waited_for() -> None:
    untied = Choices(num_hidden_layers=2, tie_word_embeddings=False)
    waits = {}
    with store_of(untied, seed=1) as store:
        for place in ("ram", "disk"):
            with open_small(store, embedding=place) as engine, engine.timing() as timing:
                logits_of(engine)
                waits[place] = timing.spent.wait - engine.stats.totals().wait_s
    assert waits["ram"] == 0 < waits["disk"]


def test_touched_bytes_are_weights_chosen_experts_and_cached_positions(store: Store) -> None:
    with open_small(store) as engine:
        timing, layout = engine.timing(), engine.store.layout
        nothing = timing.touched_nbytes(0, 0)
        assert nothing <= layout.resident_nbytes()
        record = layout.geometry("4bit").record_nbytes
        assert timing.touched_nbytes(0, 6) - nothing == 6 * record
        one, all_of_it = (timing.touched_nbytes(at, 0) - nothing for at in (1, engine.context))
        assert 0 < one < all_of_it == pytest.approx(one * engine.context)


@needs_mlx
def test_where_calls_queue_no_block_has_a_clock() -> None:
    with (
        store_of(SMALL, seed=11, layout="row") as store,
        Engine.open(store.path, cap=PLENTY, **mlx_options("f32")) as engine,
        engine.timing() as timing,
    ):
        logits_of(engine)
        assert not timing.has_blocks
        assert parts(timing.spent) == [0.0] * len(BLOCKS)
