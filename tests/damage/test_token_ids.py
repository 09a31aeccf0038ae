"""What is no whole number is never taken for one: no token id is cut off in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from small_model import IDS, SMALL, open_small
from strategies import write_choices

from aegis import Engine, generate
from aegis.convert.convert import convert
from aegis.errors import UsageError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("ids")
    with open_small(convert(write_choices(folder / "m", 3, SMALL), folder / "s")) as opened:
        yield opened


NO_IDS = [1.5, 5.0, np.float32(7.25), float("nan"), "5", None, True, [5], np.array([5])]


@pytest.mark.parametrize("bad", NO_IDS, ids=repr)
@pytest.mark.parametrize("at", [0, 4, -1])
def test_an_id_that_is_no_whole_number_is_refused_everywhere(
    engine: Engine, bad: Any, at: int
) -> None:
    engine.score(IDS)
    ids: list[Any] = list(IDS)
    ids[at] = bad
    calls = [
        lambda: engine.score(ids),
        lambda: engine.nll(ids),
        lambda: engine.feed(ids),
        lambda: list(engine.generate(ids, 2)),
        lambda: generate(engine, engine.tokenizer, ids, max_tokens=2),
        lambda: engine.feed_token(bad),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="expected a whole number"):
            call()


def test_a_fraction_behind_a_cached_prefix_is_refused(engine: Engine) -> None:
    engine.feed(IDS[:4])
    with pytest.raises(UsageError, match=r"token id 300\.5 is a float"):
        engine.feed([*IDS[:4], 300.5])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (None, "token ids are a NoneType; give a list"),
        (iter(IDS), "token ids are a list_iterator; give a list"),
        ({5, 6}, "token ids are a set; give a list"),
        ({5: 6}, "token ids are a dict; give a list"),
        (memoryview(b"abc"), "token ids are bytes"),
        (np.array(5), "more or less than one dimension"),
        (np.array([IDS]), "more or less than one dimension"),
        ([10**5000], "token id has 16610 bits; expected at most 256"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_sequence_of_ids_is_refused_everywhere(
    engine: Engine, bad: Any, said: str
) -> None:
    calls = [engine.score, engine.nll, engine.feed, lambda ids: list(engine.generate(ids, 2))]
    for call in calls:
        with pytest.raises(UsageError, match=said):
            call(bad)


def test_numbers_too_long_for_a_message_are_refused_in_one(engine: Engine) -> None:
    huge = 10**5000
    with pytest.raises(UsageError, match="last has 16610 bits"):
        engine.score(IDS, last=huge)
    for name in ("max_tokens", "top_k", "seed"):
        with pytest.raises(UsageError, match=f"{name} has 16610 bits; expected at most 256"):
            list(engine.generate(IDS, **{name: -huge}))
    for name in ("temperature", "top_p", "min_p", "repeat_penalty"):
        with pytest.raises(UsageError, match=f"{name} must be .*, got inf"):
            list(engine.generate(IDS, 1, **{name: huge}))


def test_every_kind_of_integer_is_the_same_id(engine: Engine) -> None:
    expected = engine.score(IDS).tobytes()
    for kind in (np.int64, np.uint16, np.int32):
        ids: Any = np.array(IDS, kind)
        assert engine.score(ids).tobytes() == expected
        assert engine.score(ids, last=np.int64(1)).tobytes() == expected  # type: ignore[arg-type]
        assert generate(engine, engine.tokenizer, ids, max_tokens=2) == generate(
            engine, engine.tokenizer, IDS, max_tokens=2
        )


@pytest.mark.parametrize("bad", [1.5, "1", True])
def test_counts_that_are_no_whole_numbers_are_refused(engine: Engine, bad: Any) -> None:
    with pytest.raises(UsageError, match=r"last .* expected a whole number"):
        engine.score(IDS, last=bad)
    with pytest.raises(UsageError, match=r"max_tokens .* expected a whole number"):
        list(engine.generate(IDS, bad))
