"""What an open engine promises beside identity: refusals, ends, errors, accounts."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from engine_tools import store_of
from small_model import CONTEXT, IDS, MIB, PLENTY, SMALL, open_small
from strategies import Choices

import aegis
from aegis import AegisError, Engine
from aegis.checkpoint.store import Store
from aegis.engine import opening
from aegis.engine.generate import stream, stream_text
from aegis.engine.sampling import Sampler
from aegis.errors import PlanError, UsageError
from aegis.settings import EmbeddingMode, Settings
from aegis.tiers import GUESS_KINDS, POLICIES
from aegis.tiers.guess_width import MAX_WIDTH

pytestmark = pytest.mark.usefixtures("quick_open")

# Scores


def test_nll_is_the_log_softmax_of_score(engine: Engine) -> None:
    logits = engine.score(IDS, last=None).astype(np.float64)
    peak = logits.max(axis=1, keepdims=True)
    logs = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
    expected = -logs[np.arange(len(IDS) - 1), IDS[1:]]
    nll = engine.nll(IDS)
    assert nll.dtype == np.float32
    assert nll.shape == (len(IDS) - 1,)
    np.testing.assert_allclose(nll, expected, rtol=1e-6, atol=1e-6)


def test_nll_of_one_token_is_empty(engine: Engine) -> None:
    assert engine.nll([3]).shape == (0,)


@pytest.mark.parametrize("prefill_step", [1, 3, 4, 64])
def test_score_of_the_last_positions_is_the_tail_of_all(store: Store, prefill_step: int) -> None:
    with open_small(store, prefill_step=prefill_step) as engine:
        everything = engine.score(IDS, last=None)
        assert everything.shape == (len(IDS), SMALL.vocab_size)
        assert everything.dtype == np.float32
        for last in range(1, len(IDS) + 1):
            assert engine.score(IDS, last=last).tobytes() == everything[-last:].tobytes()


def test_scores_stay_what_they_were_when_the_engine_goes_on(engine: Engine) -> None:
    kept = engine.score(IDS, last=2)
    before = kept.copy()
    engine.score(IDS[::-1], last=2)
    list(engine.generate(IDS[::-1], 4, ignore_eos=True))
    np.testing.assert_array_equal(kept, before)


def test_ids_may_be_tuples_or_numpy_arrays(engine: Engine) -> None:
    expected = engine.score(IDS).tobytes()
    assert engine.score(tuple(IDS)).tobytes() == expected
    assert engine.score(np.array(IDS)).tobytes() == expected
    tokens = list(engine.generate(IDS, 3, ignore_eos=True))
    assert list(engine.generate(np.array(IDS), 3, ignore_eos=True)) == tokens


# Refusals


@pytest.mark.parametrize("verb", ["score", "nll", "generate"])
@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "no tokens"),
        ([1] * (CONTEXT + 1), f"{CONTEXT + 1} tokens do not fit the context of {CONTEXT}"),
        ([1, SMALL.vocab_size], f"token id {SMALL.vocab_size} is outside"),
        ([-1, 1], "token id -1 is outside"),
    ],
    ids=["empty", "too long", "above the vocabulary", "negative"],
)
def test_a_prompt_that_cannot_be_computed_is_refused(
    engine: Engine, verb: str, ids: list[int], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        list(getattr(engine, verb)(ids))


@pytest.mark.parametrize("token", [-1, SMALL.vocab_size])
def test_a_next_token_outside_the_vocabulary_is_refused(engine: Engine, token: int) -> None:
    engine.feed(IDS)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        engine.feed_token(token)


@pytest.mark.parametrize("last", [0, -1, len(IDS) + 1])
def test_last_out_of_range_is_refused(engine: Engine, last: int) -> None:
    with pytest.raises(UsageError, match=f"last is {last}; with 10 tokens it can be 1 to 10"):
        engine.score(IDS, last=last)


def test_a_negative_number_of_tokens_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="max_tokens is -1"):
        list(engine.generate(IDS, -1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cap": 0}, "cap_nbytes is 0"),
        ({"cap": -5}, "cap_nbytes is -5"),
        ({"cap": "4"}, "has no unit"),
        ({"context": 0}, "context is 0"),
        ({"context": 4097}, "the context of 4097 tokens is outside this model's 1 to 4096"),
        ({"context": "64"}, "context is '64'"),
        ({"max_slots": 0}, "max_slots is 0"),
        ({"max_slots": 1}, "max_slots is 1: a token needs 2 at once"),
        ({"prefill_step": 0}, "prefill_step is 0"),
        ({"guess_width": 17}, "guess_width is 17; it must be a whole number from 0 to 16"),
        ({"guess_width": -1}, "guess_width is -1"),
        ({"guess": "lucky"}, "guess is 'lucky'; choose one of cross-layer, previous, none"),
        ({"policy": "fifo"}, "policy is 'fifo'; choose one of lfu, lru, random"),
        ({"io_threads": 0}, "io_threads is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": True}, "threads is True"),
        ({"experts": "5bit"}, "experts is '5bit'; choose one of 4bit, 3bit"),
        ({"embedding": "flash"}, "embedding is 'flash'; choose one of auto, ram, disk"),
        ({"colour": "red"}, "there is no option 'colour'; the options are backend, context,"),
        ({"cap": None}, "cap is None; give text, as 4GiB or 512MiB, or whole bytes"),
        ({"cap": 4.5}, "cap is 4.5; give text"),
        ({"cap": b"4GiB"}, "cap is b'4GiB'; give text"),
        ({"cap": 1 << 64}, "cap_nbytes is 18446744073709551616; it must be a whole number"),
        ({"cap": 10**5000}, "cap_nbytes is a number of thousands of digits; it must be"),
        ({"cap": "9" * 39 + "GiB"}, "is more than any memory: write at most"),
        ({"cap": "9" * 5000 + "GiB"}, "999' is not a size: write a number and a unit"),
        ({"context": 10**5000}, "context is a number of thousands of digits"),
        ({"context": np.array([4, 5])}, "context is array([4, 5]); it must be a whole number"),
        ({"experts": np.array([1, 2])}, "experts is array([1, 2]); choose one of 4bit, 3bit"),
        ({"backend": []}, "backend is []; give its name, or auto"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_refused_in_a_sentence(
    store: Store, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "Arena", _must_not_be_called)
    for ask in (open_small, _plan_small):
        with pytest.raises(UsageError) as caught:
            ask(store, **options)
        assert said in str(caught.value)


def test_every_kind_of_integer_is_the_same_setting(store: Store) -> None:
    numbers = {"cap": 300 << 20, "context": 64, "guess_width": 3, "max_slots": 5, "threads": 1}
    others = {name: np.int64(number) for name, number in numbers.items()}
    assert _plan_small(store, **others) == _plan_small(store, **numbers)
    with open_small(store, **others) as opened:
        assert type(opened.plan.cap_nbytes) is int


def _plan_small(store: Store, **options: Any) -> object:
    return aegis.plan(store.path, **({"cap": PLENTY} | options))


def _must_not_be_called(*args: object, **kwargs: object) -> None:
    raise AssertionError("nothing may be allocated or converted")


def test_settings_know_the_names_that_tiers_and_kernels_know() -> None:
    for policy in POLICIES:
        Settings(cap_nbytes=1, policy=policy)
    for guess in GUESS_KINDS:
        Settings(cap_nbytes=1, guess=guess)
    for embedding in get_args(EmbeddingMode):
        Settings(cap_nbytes=1, embedding=embedding)
    Settings(cap_nbytes=1, guess_width=MAX_WIDTH)
    with pytest.raises(ValueError, match=f"from 0 to {MAX_WIDTH}"):
        Settings(cap_nbytes=1, guess_width=MAX_WIDTH + 1)


def test_a_tied_table_cannot_stay_on_disk() -> None:
    choices = Choices(num_hidden_layers=1, tie_word_embeddings=True)
    with store_of(choices, seed=2) as tied, pytest.raises(UsageError, match="tied"):
        open_small(tied, embedding="disk")


def test_a_cap_that_is_too_small_is_refused_before_anything_is_taken(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "Arena", _must_not_be_called)
    monkeypatch.setattr("aegis.convert.cache.ensure_store", _must_not_be_called)
    smallest = aegis.plan(store.path, cap=1, context=CONTEXT).min_cap_nbytes
    cap = smallest - 3 * MIB
    with pytest.raises(PlanError) as caught:
        open_small(store, cap=cap)
    said = str(caught.value)
    for item in ("runtime ", "resident weights", "KV cache", "workspace", "runtime reserve"):
        assert item in said
    assert "3 MiB short" in said
    assert f"the smallest cap that opens is {smallest}B" in said
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"context": 1},
        {"context": 4096, "prefill_step": 512},
        {"embedding": "disk"},
        {"embedding": "ram", "prefill_step": 1},
        {"max_slots": 2},
        {"backend": "reference"},
    ],
    ids=str,
)
def test_the_smallest_cap_opens_and_one_byte_less_does_not(
    store: Store, options: dict[str, Any]
) -> None:
    options = {"context": CONTEXT} | options
    smallest = aegis.plan(store.path, cap=1, **options).min_cap_nbytes
    with pytest.raises(PlanError, match="1 B short"):
        open_small(store, cap=smallest - 1, **options)
    assert not aegis.plan(store.path, cap=smallest - 1, **options).feasible
    with open_small(store, cap=smallest, **options) as engine:
        assert engine.plan.min_cap_nbytes == smallest
        ids = IDS[: engine.context]
        with open_small(store, **options) as roomy:
            assert engine.score(ids).tobytes() == roomy.score(ids).tobytes()


def test_a_closed_engine_says_so(engine: Engine) -> None:
    hidden = engine.feed(IDS)
    generator = engine.generate(IDS, 8, ignore_eos=True)
    next(generator)
    engine.close()
    for use in (
        lambda: engine.score(IDS),
        lambda: engine.nll(IDS),
        lambda: next(engine.generate(IDS)),
        lambda: next(generator),
        lambda: engine.feed(IDS),
        lambda: engine.feed_token(1),
        lambda: engine.logits(hidden),
    ):
        with pytest.raises(AegisError, match="the engine is closed"):
            use()


# Where a generation ends


def finish(engine: Engine, ids: list[int], max_tokens: int, **options: Any) -> tuple[int, str]:
    """How many tokens came, and why no more did."""
    *steps, last = stream(engine, ids, max_tokens, Sampler(), **options)
    assert all(step.finish_reason is None and step.token is not None for step in steps)
    assert last.token is None
    assert last.finish_reason is not None
    return len(steps), last.finish_reason


def test_a_full_context_ends_with_length(engine: Engine) -> None:
    ids = (IDS * 7)[: CONTEXT - 3]
    # The last token is chosen from a full cache and need not be computed itself.
    assert finish(engine, ids, 50, ignore_eos=True) == (4, "length")
    assert finish(engine, (IDS * 7)[:CONTEXT], 50, ignore_eos=True) == (1, "length")
    assert finish(engine, ids, 4, ignore_eos=True) == (4, "length")
    assert finish(engine, ids, 2, ignore_eos=True) == (2, "length")
    assert finish(engine, ids, 0) == (0, "length")


def test_a_full_context_refuses_one_more_token(engine: Engine) -> None:
    engine.feed((IDS * 7)[:CONTEXT])
    with pytest.raises(UsageError, match=f"the context of {CONTEXT} tokens is full"):
        engine.feed_token(1)


def test_generation_ends_before_an_end_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(engine.generate(IDS, 8, ignore_eos=True))
    at = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    monkeypatch.setattr(engine.tokenizer, "eos_token_ids", frozenset({tokens[at], 99999}))
    assert list(engine.generate(IDS, 8)) == tokens[:at]
    assert finish(engine, IDS, 8) == (at, "stop")
    assert list(engine.generate(IDS, 8, ignore_eos=True)) == tokens
    assert finish(engine, IDS, at) == (at, "length")


def test_a_stop_string_ends_the_text_before_itself(engine: Engine) -> None:
    def steps(**options: Any) -> list[Any]:
        return list(stream_text(engine, IDS, 12, Sampler(), ignore_eos=True, **options))

    plain = steps()
    text = "".join(step.text for step in plain)
    assert plain[-1].finish_reason == "length"
    assert sum(step.token is not None for step in plain) == 12
    stop = text[len(text) // 2 :][:3]
    cut = steps(stop=[stop, "never to be seen"])
    assert "".join(step.text for step in cut) == text[: text.index(stop)]
    assert cut[-1].finish_reason == "stop"
    assert all(step.finish_reason is None for step in cut[:-1])


def test_a_seed_repeats_its_tokens_at_any_cap(store: Store, engine: Engine) -> None:
    def draw(on: Engine, seed: int) -> list[int]:
        return list(on.generate(IDS, 12, temperature=1.5, ignore_eos=True, top_p=0.9, seed=seed))

    drawn = [draw(engine, seed) for seed in range(4)]
    assert len({tuple(tokens) for tokens in drawn}) > 1
    assert drawn == [draw(engine, seed) for seed in range(4)]
    with open_small(store, max_slots=2, guess="none", threads=1) as other:
        assert drawn == [draw(other, seed) for seed in range(4)]


def test_two_generations_of_one_engine_do_not_disturb_each_other(engine: Engine) -> None:
    other_ids = IDS[::-1]
    expected = [list(engine.generate(ids, 6, ignore_eos=True)) for ids in (IDS, other_ids)]
    first = engine.generate(IDS, 6, ignore_eos=True)
    second = engine.generate(other_ids, 6, ignore_eos=True)
    found: tuple[list[int], list[int]] = ([], [])
    for _ in range(6):
        found[0].append(next(first))
        engine.score([1, 2, 3])
        found[1].append(next(second))
    assert list(found) == expected


# Accounts


def test_every_choice_is_a_hit_a_miss_or_late(streaming: Engine) -> None:
    prompt, tokens = IDS, 9
    assert len(list(streaming.generate(prompt, tokens, ignore_eos=True))) == tokens
    stats, stride = streaming.stats, streaming.plan.slot_nbytes
    chosen = (tokens - 1) * SMALL.num_experts_per_tok  # the first token comes from prefill
    for counters in stats.decode:
        assert counters.choices == chosen == counters.hits + counters.misses + counters.late
        assert counters.hit_rate == counters.hits / chosen
    for counters in stats.prefill:
        assert SMALL.num_experts_per_tok <= counters.choices <= SMALL.num_experts
    for counters in [*stats.decode, *stats.prefill]:
        assert counters.hot_hits <= counters.hits
        assert counters.useful + counters.wasted + counters.cancelled <= counters.guesses
        assert counters.read_nbytes % stride == 0
        assert counters.wait_s >= 0
    total = stats.totals()
    assert total.read_nbytes == stats.read_nbytes > 0
    # What was missed was read, once; of the guesses those that were not withdrawn.
    assert total.misses * stride <= total.read_nbytes
    assert total.read_nbytes <= (total.misses + total.guesses - total.cancelled) * stride
    stats.reset()
    assert streaming.stats.totals().choices == 0


def test_nothing_is_read_once_every_expert_has_its_slot(engine: Engine) -> None:
    assert engine.plan.total_slots == SMALL.num_hidden_layers * SMALL.num_experts
    rng = np.random.default_rng(0)
    everything = engine.plan.total_slots * engine.plan.slot_nbytes
    for _ in range(20):
        engine.score(rng.integers(0, SMALL.vocab_size, 60).tolist())
        list(engine.generate(IDS, 3, ignore_eos=True))
        if engine.stats.read_nbytes == everything:
            break
    assert engine.stats.read_nbytes == everything
    engine.stats.reset()
    engine.score(IDS)
    list(engine.generate(IDS, 6, ignore_eos=True))
    total = engine.stats.totals()
    assert total.read_nbytes == total.misses == total.late == total.guesses == 0
    assert engine.stats.hit_rate == 1.0


@pytest.mark.parametrize("options", [{}, {"embedding": "disk"}, {"max_slots": 2}], ids=str)
def test_the_ledger_has_every_item_and_none_takes_more_than_planned(
    store: Store, options: dict[str, Any]
) -> None:
    with open_small(store, **options) as engine:
        engine.score(IDS, last=None)
        rows = engine.ledger()
        *items, total = rows
        assert len({row.item for row in rows}) == len(rows)
        assert (total.item, total.planned_nbytes) == ("total", engine.plan.total_nbytes)
        assert total.measured_nbytes is not None
        assert sum(row.planned_nbytes for row in items) == engine.plan.total_nbytes
        measured = {row.item: row.measured_nbytes for row in rows}
        for row in items:
            taken = row.measured_nbytes if row.item != "runtime" else None
            assert taken is None or taken <= row.planned_nbytes, row
        assert measured["kv_cache"] == dict(engine.plan.items)["kv_cache"]
        # The process that runs the tests is no fair measure of the runtime.
        regions = sum(size for _, size in engine._opened.arena.regions().values())
        assert regions <= engine.plan.total_nbytes
        assert engine._opened.arena.nbytes <= engine.plan.total_nbytes


def test_the_plan_is_shown_before_anything_is_taken(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []

    def arena(nbytes: int) -> None:
        assert plans
        assert nbytes <= plans[0].total_nbytes
        raise InterruptedError

    monkeypatch.setattr(opening, "Arena", arena)
    with pytest.raises(InterruptedError):
        open_small(store, on_plan=plans.append)
    assert len(plans) == 1
