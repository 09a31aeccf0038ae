"""The same bits at every cap, guess, policy, thread count, chunking, placement and processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_tools import Result, Way, difference, prompts, result_of, store_of, ways
from families import FAMILIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import Choices, checkpoint_choices, seeds

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.convert.cache import embedded_path, ensure_store
from aegis.kernels import registry
from aegis.kernels.sizes import CODE_BITS

CONTEXT = 64
PROMPT = 40
NEW_TOKENS = 5
EMBEDDED_TOP_K = 4
PLAIN = Way(options={"guess": "none", "threads": 1, "io_threads": 1, "embedding": "ram"})
"""Everything in memory, nothing guessed, one thread: what all other ways are compared with."""

NO_NATIVE = registry.reason("native")
needs_native = pytest.mark.skipif(NO_NATIVE is not None, reason=str(NO_NATIVE))
native: Any = None if NO_NATIVE else import_module("aegis.kernels.native._native")
ISAS: list[str] = native.isas() if native else []
BEST = native.isa() if native else ""

pytestmark = pytest.mark.usefixtures("quick_open")


@contextmanager
def processor(isa: str | None) -> Iterator[None]:
    """Compute as a processor would that has this instruction set; None: as this one does."""
    if native is None or isa is None:
        yield
        return
    native.select_isa(isa)
    try:
        yield
    finally:
        native.select_isa(BEST)


def run(
    path: Path, top_k: int, way: Way, ids: list[int], rows: int | None = None, **fixed: Any
) -> Result:
    """Open the model this way, warm it up and ask."""
    with processor(way.isa), way.open(path, top_k, **fixed) as engine:
        way.warm_up(engine, ids)
        return result_of(engine, ids, NEW_TOKENS, rows)


def check_ways(
    store: Store, choices: Choices, plan: list[Way], ids: list[int], **fixed: Any
) -> Result:
    """Every way says what the plain one says."""
    top_k, fixed = choices.num_experts_per_tok, {"context": CONTEXT} | fixed
    expected = run(store.path, top_k, PLAIN, ids, **fixed)
    assert np.isfinite(expected.scores).all()
    assert expected.last.tobytes() == expected.scores[len(ids) - 1].tobytes()
    for way in plan:
        found = difference(expected, run(store.path, top_k, way, ids, **fixed))
        assert not found, f"{way}: {found}"
    return expected


def for_model(way: Way, choices: Choices) -> Way:
    """A tied table cannot stay on disk."""
    if choices.tie_word_embeddings and way.options["embedding"] == "disk":
        return replace(way, options=way.options | {"embedding": "auto"})
    return way


several_ways = st.lists(ways(isas=[None, *ISAS]), min_size=2, max_size=4)


@needs_native
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), seeds, several_ways, prompts(PROMPT))
def test_native_gives_the_same_bits_in_every_way(
    model_type: str, data: st.DataObject, seed: int, plan: list[Way], ids: list[int]
) -> None:
    choices = data.draw(checkpoint_choices(model_type=model_type))
    with store_of(choices, seed) as store:
        check_ways(store, choices, [for_model(way, choices) for way in plan], ids, backend="native")


@needs_native
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(st.permutations(CODE_BITS), seeds, several_ways, prompts(PROMPT))
def test_so_it_does_in_groups_of_128(
    bits: list[int], seed: int, plan: list[Way], ids: list[int]
) -> None:
    widths = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 128}
    choices = Choices(bits=tuple(bits), group_size=128, **widths)
    with store_of(choices, seed) as store:
        check_ways(store, choices, [for_model(way, choices) for way in plan], ids, backend="native")


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), seeds, several_ways, prompts(24))
def test_reference_gives_the_same_bits_in_every_way(
    model_type: str, data: st.DataObject, seed: int, plan: list[Way], ids: list[int]
) -> None:
    choices = data.draw(checkpoint_choices(model_type=model_type))
    with store_of(choices, seed) as store:
        ways_here = [for_model(way, choices) for way in plan]
        check_ways(store, choices, ways_here, ids, backend="reference")


@needs_native
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(checkpoint_choices(), seeds, prompts(8))
def test_native_agrees_with_reference(choices: Choices, seed: int, ids: list[int]) -> None:
    # Short prompts: a choice between two experts whose router logits are equal to seven digits
    # may rightly fall either way, and should stay too rare to be met here.
    with store_of(choices, seed) as store:
        results = []
        for backend in ("native", "reference"):
            with PLAIN.open(store.path, 1, context=CONTEXT, backend=backend) as engine:
                results.append(engine.score(ids, last=None))
        one, other = results
        assert np.abs(one - other).max() <= 2e-3 * other.std(), np.abs(one - other).max(axis=1)


@needs_native
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    checkpoint_choices(expert_bits=4, expert_code_bits=3),
    seeds,
    several_ways,
    prompts(24),
)
def test_packed_3bit_experts_equal_3bit_codes_in_nibbles(
    choices: Choices, seed: int, plan: list[Way], ids: list[int]
) -> None:
    plan = [for_model(way, choices) for way in plan]
    with store_of(choices, seed) as store:
        nibbles = check_ways(store, choices, plan[:1], ids, backend="native")
    choices = replace(choices, expert_bits=3)
    with store_of(choices, seed) as store:
        packed = check_ways(store, choices, plan, ids, backend="native")
    found = difference(nibbles, packed)
    assert not found, found


@needs_native
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(checkpoint_choices(expert_bits=4), seeds, several_ways, prompts(24))
def test_experts_requantised_to_3bit_give_the_same_bits_in_every_way(
    choices: Choices, seed: int, plan: list[Way], ids: list[int]
) -> None:
    plan = [for_model(way, choices) for way in plan]
    with store_of(choices, seed, experts3bit=True) as store:
        check_ways(store, choices, plan, ids, backend="native", experts="3bit")


@pytest.fixture(scope="module")
def embedded(cache: Path) -> Path:
    """The embedded model's store."""
    return ensure_store(embedded_path()).path


EMBEDDED_ROWS = 8
"""Rows of logits that fit the smallest cap too."""
EMBEDDED_IDS = [1, 504, 3575, 282, 4649, 314, 260, 2240, 2988, 30, 198, 1, 9690, 198, 7783, 99]


def run_embedded(path: Path, way: Way) -> Result:
    """Ask the embedded model."""
    return run(path, EMBEDDED_TOP_K, way, EMBEDDED_IDS, EMBEDDED_ROWS, context=CONTEXT)


@pytest.fixture(scope="module")
def embedded_result(embedded: Path) -> Result:
    """What the embedded model says, everything in memory."""
    return run_embedded(embedded, PLAIN)


@needs_native
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(way=ways(isas=[isa for isa in ISAS if isa != "scalar"] or [None], tied=True))
def test_the_embedded_model_gives_the_same_bits_in_every_way(
    embedded: Path, embedded_result: Result, way: Way
) -> None:
    found = difference(embedded_result, run_embedded(embedded, way))
    assert not found, f"{way}: {found}"


@pytest.mark.parametrize("isa", ISAS)
def test_the_embedded_model_gives_the_same_bits_on_every_processor(
    embedded: Path, isa: str
) -> None:
    results = []
    with PLAIN.open(embedded, EMBEDDED_TOP_K, context=CONTEXT, threads=2) as engine:
        for chosen in (BEST, isa):
            with processor(chosen):
                results.append(engine.score(EMBEDDED_IDS[:3], last=None))
    assert results[0].tobytes() == results[1].tobytes()


@needs_native
def test_a_conversation_gives_the_same_bits_as_a_fresh_engine(embedded: Path) -> None:
    """Three turns, each behind what the cache holds of the turns before."""
    turns, ids = [], list[int]()
    with Engine.open(embedded, cap="200MiB", context=256) as chat:
        for turn in ([1, 4093, 198], [2, 198, 1, 520, 9531], [2, 198, 1, 30]):
            ids = [*ids, *turn]
            held = chat.cached_prefix(ids)
            logits = chat.logits(chat.feed(ids))[0].tobytes()
            answer = list(chat.generate(ids, 6, ignore_eos=True))
            turns.append((list(ids), logits, answer))
            assert not turns[:-1] or held >= len(turns[-2][0])
            ids += answer
    for ids, logits, answer in turns:
        with Engine.open(embedded, cap="400MiB", context=256) as fresh:
            assert fresh.score(ids)[0].tobytes() == logits
            assert list(fresh.generate(ids, 6, ignore_eos=True)) == answer
