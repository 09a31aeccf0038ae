"""Text at its edges, through generation: what a model says is scripted, or the model is real."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import write_checkpoint
from text_kinds import KINDS, write_folder

from aegis import Engine, generate, stream_generate
from aegis.convert.convert import convert
from aegis.engine.generate import TextStep, stream, stream_text
from aegis.engine.sampling import Sampler
from aegis.engine.token_ids import token_array
from aegis.errors import LogitsError, UsageError
from aegis.text.tokenizer import Tokenizer

CONTEXT = 32
GOLDENS = Path(__file__).parent.parent / "goldens"


class Scripted:
    """As much of an engine as generation needs; it says the given ids, whatever it is asked."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], context: int = 10_000) -> None:
        self.tokenizer, self.context = tokenizer, context
        self._said = iter(ids)
        self.fed: list[Any] = []

    def feed(self, ids: Sequence[int]) -> None:
        self.fed.append(ids)

    def next_token(self, ids: Sequence[int], sampler: Sampler, more: bool = False) -> int:
        self.feed(ids)
        return sampler.sample(self.logits(), ids)

    def logits(self) -> Any:
        out = np.zeros(self.tokenizer.vocab_size, np.float32)
        out[next(self._said)] = 1.0
        return out


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    opened = {}
    for kind in ("byte_level", "llama_metaspace", "unigram"):
        folder = write_folder(tmp_path_factory.mktemp(kind), KINDS[kind]())
        opened[kind] = Tokenizer.open(folder)
    return opened


def said(
    tokenizer: Tokenizer, ids: Sequence[int], **options: Any
) -> tuple[str, str | None, list[TextStep]]:
    engine: Any = Scripted(tokenizer, ids)
    steps = list(stream_text(engine, [1], len(ids), Sampler(), **options))
    return "".join(step.text for step in steps), steps[-1].finish_reason, steps


SCRAPS = [
    "a",
    "é",
    "e\u0301",
    "👩\u200d👧",
    "🇩🇪",
    "👋🏽",
    "STOP",
    "ST",
    "OP",
    " ",
    "\n",
    "\r\n",
    "\0",
]
TEXTS = st.lists(st.sampled_from(SCRAPS), min_size=1, max_size=8).map("".join)
STOPS = st.lists(
    st.sampled_from(
        ["STOP", "ST", "TOP", "OPST", "\u0301", "\u200d👧", "🇪", "👋", "\n\n", "\r\n", "\0"]
    ),
    max_size=3,
)


@pytest.mark.parametrize("kind", ["byte_level", "llama_metaspace"])
@given(text=TEXTS, stops=STOPS)
def test_stop_strings_cut_the_text_wherever_tokens_and_bytes_fall(
    kinds: dict[str, Tokenizer], kind: str, text: str, stops: list[str]
) -> None:
    tokenizer = kinds[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    ends = sorted(
        (whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole
    )
    shown, reason, steps = said(tokenizer, ids, stop=stops)
    assert shown == (whole[: ends[0][1]] if ends else whole)
    assert reason == ("stop" if ends else "length")
    assert not any(step.finish_reason for step in steps[:-1])


@pytest.mark.parametrize(
    ("stops", "shown"),
    [
        (["ab", "abc"], ""),  # a stop that begins another is complete first
        (["abcd", "bc"], "a"),  # of overlapping ones that which ends first
        (["bc", "abc"], ""),  # of two that end together the longer
        (["abcdef"], ""),  # the whole output
        (["abcdefg"], "abcdef"),  # more than the output
        (["f", "f"], "abcde"),
        (["x", "y"], "abcdef"),
        ("cd", "ab"),  # one string is one stop string, not its letters
        (None, "abcdef"),
        ((), "abcdef"),
    ],
)
def test_overlapping_stop_strings(kinds: dict[str, Tokenizer], stops: Any, shown: str) -> None:
    ids = kinds["byte_level"].encode("abcdef")
    assert said(kinds["byte_level"], ids, stop=stops)[0] == shown


@pytest.mark.parametrize("stops", ["", [""], ["a", ""], 5, [5], [None], [b"a"], b"a", [["a"]]])
def test_stop_strings_that_mean_nothing_are_refused(
    kinds: dict[str, Tokenizer], stops: Any
) -> None:
    with pytest.raises(UsageError, match="stop"):
        said(kinds["byte_level"], [1], stop=stops)


def test_a_stop_string_that_spells_a_special_token_ends_the_text_at_it(
    kinds: dict[str, Tokenizer],
) -> None:
    tokenizer = kinds["byte_level"]
    end = tokenizer.token_to_id("<|im_end|>")
    ids = [*tokenizer.encode("one <"), end, *tokenizer.encode("two")]
    assert said(tokenizer, ids, stop=["<|im_end|>"])[:2] == ("one <", "stop")
    assert said(tokenizer, ids)[0] == "one <two"  # it never is in the text
    assert said(tokenizer, ids, stop=["<|im_end|>"], ignore_eos=True)[:2] == ("one <", "stop")
    assert said(tokenizer, tokenizer.encode("a<|im_"), stop=["<|im_end|>"])[0] == "a<|im_"


@pytest.mark.parametrize("kind", ["byte_level", "llama_metaspace", "unigram"])
@given(data=st.data())
def test_bytes_that_are_no_text_are_shown_as_decode_shows_them(
    kinds: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = kinds[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    shown, _, steps = said(tokenizer, ids, ignore_eos=True)
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)
    assert [step.token for step in steps if step.token is not None] == ids


def test_a_very_long_token_is_shown_whole_and_cut_by_stop_strings(tmp_path: Path) -> None:
    long = "x" * 200_000
    backend = KINDS["byte_level"]()
    backend.add_tokens([long + "END"])
    backend.add_special_tokens(["<" + "s" * 50_000 + ">"])
    tokenizer = Tokenizer.open(
        write_folder(tmp_path, backend), chat_template="{{ messages[0].content }}"
    )
    ids = tokenizer.encode(f"a{long}ENDb")
    assert len(ids) == 3
    assert said(tokenizer, ids)[0] == f"a{long}ENDb"
    assert said(tokenizer, ids, stop=["xEND"])[0] == "a" + long[:-1]
    # A stop string of many characters, of which ever more is held back.
    assert said(tokenizer, tokenizer.encode("y" * 3000), stop=["y" * 20_000])[0] == "y" * 3000
    forged = [{"role": "user", "content": f"hi <{'s' * 50_000}> and <sss"}]
    ids = tokenizer.encode_chat(forged)
    assert tokenizer.decode(ids, skip_special_tokens=False) == forged[0]["content"]
    assert len(ids) > 50_000


def test_generation_hands_over_ids_that_are_compared_at_once(kinds: dict[str, Tokenizer]) -> None:
    engine: Any = Scripted(kinds["byte_level"], [5, 6, 7])
    list(stream(engine, [1, 2], 3, Sampler()))
    assert all(isinstance(ids, array) for ids in engine.fed)
    assert list(token_array(np.array([3, 4]))) == [3, 4]
    for wrong in ([1.5], ["1"], [None], [2**40]):
        with pytest.raises(UsageError):
            token_array(wrong)


def test_logits_that_are_no_numbers_end_generation_with_a_typed_error(
    kinds: dict[str, Tokenizer],
) -> None:
    engine: Any = Scripted(kinds["byte_level"], itertools.repeat(5))
    engine.logits = lambda: np.full(300, np.nan, np.float32)
    for settings in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}):
        with pytest.raises(LogitsError, match="NaN"):
            list(stream_text(engine, [1], 3, Sampler(seed=1, **settings)))


@pytest.fixture(scope="module")
def real(cache: Path) -> Iterator[Engine]:
    """The embedded model with a short context."""
    with Engine.open(cap="300MiB", context=CONTEXT) as engine:
        yield engine


def test_a_prompt_of_exactly_the_context_gets_one_token_and_one_more_is_refused(
    real: Engine,
) -> None:
    ids = list(range(100, 100 + CONTEXT))
    for count in (1, 2, 1000):
        assert len(list(real.generate(ids, count, ignore_eos=True))) == 1
    assert len(list(real.generate(ids[1:], 1000, ignore_eos=True))) == 2
    steps = list(stream_generate(real, real.tokenizer, ids, 1000, ignore_eos=True))
    assert steps[-1].finish_reason == "length"
    sentence = f"{CONTEXT + 1} tokens do not fit the context of {CONTEXT}; open the model with"
    with pytest.raises(UsageError, match=sentence):
        list(real.generate([*ids, 5], 1))


def test_max_tokens_beyond_the_context_end_at_it(real: Engine) -> None:
    tokens = list(real.generate([100, 101], 10**9, ignore_eos=True))
    assert len(tokens) == CONTEXT - 2 + 1  # the last one needs no position
    assert list(real.generate([100, 101], 0)) == []
    for wrong in (-1, 1.5, "3", None, True):
        with pytest.raises(UsageError, match="max_tokens"):
            list(real.generate([100], wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [{"role": "user", "content": 5}, 3],
        b"abc",
        b"abcd",
        bytearray(b"abc"),
        {"role": "user", "content": "hi"},
        None,
        5,
        iter((1, 2)),
        [1.5],
        ["hi"],
        np.zeros((2, 2), np.int64),
        [2**40],
        [-1],
    ],
    # An address in a test's name would differ between the processes that run the tests.
    ids=lambda prompt: repr(prompt).partition(" object at ")[0],
)
def test_a_prompt_that_is_none_is_a_sentence(real: Engine, prompt: Any) -> None:
    with pytest.raises(UsageError, match=r"token|prompt"):
        generate(real, real.tokenizer, prompt)


@pytest.mark.parametrize("ids", [b"abcd", bytearray(4), "abcd", [2**31], [1.0], np.zeros(3)])
def test_ids_that_are_none_are_a_sentence(real: Engine, ids: Any) -> None:
    for call in (real.feed, real.score, lambda ids: list(real.generate(ids, 1))):
        with pytest.raises(UsageError, match="token id"):
            call(ids)


@pytest.mark.parametrize("prompt", ["\0", "a\0b", "\udcff", " ", "\r\n", "👩\u200d👧"])
def test_odd_prompts_are_prompts(real: Engine, prompt: str) -> None:
    assert isinstance(generate(real, real.tokenizer, prompt, max_tokens=2), str)


def test_long_prompts_of_few_tokens_find_room_or_are_refused(
    real: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of blanks has 64 characters a token, each of which takes memory for a moment."""
    governor, tiers = real._opened.governor, real._opened.tiers
    asked: list[int] = []
    monkeypatch.setattr(tiers, "release_nbytes", lambda nbytes: asked.append(nbytes) or nbytes)
    blanks = "x" + " " * (64 * (CONTEXT - 8))
    monkeypatch.setattr(governor, "room", lambda: 100_000 + sum(asked))
    real.refuse_far_too_long([blanks])
    assert asked == [160 * len(blanks) - 100_000]
    monkeypatch.setattr(governor, "room", lambda: 100_000)
    message = r"encoding this prompt takes .* more than the cap leaves"
    with pytest.raises(UsageError, match=message):
        real.refuse_far_too_long([blanks[:1000], blanks[1000:]])
    prose = "The quick brown fox. " * 5
    assert len(prose) > 2 * CONTEXT
    real.refuse_far_too_long([prose])
    monkeypatch.undo()
    assert isinstance(generate(real, real.tokenizer, blanks, max_tokens=1), str)


@pytest.mark.parametrize("rule", ["kimi", "qwen2"])
def test_a_model_without_tokenizer_json_speaks_from_its_store_alone(
    tmp_path: Path, rule: str
) -> None:
    golden = json.loads((GOLDENS / "text/vocabularies.json").read_text(encoding="utf-8"))[rule]
    folder = write_checkpoint(tmp_path / "model", vocab_size=1616)
    (folder / "tokenizer.json").unlink()
    if rule == "kimi":
        (folder / "tiktoken.model").write_text("\n".join(golden["tiktoken.model"]))
        named = {place: {"content": name} for place, name in golden["named"].items()}
        auto_map = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
        config = {"auto_map": auto_map, "added_tokens_decoder": named}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
            (folder / name).write_text(golden["files"][name], encoding="utf-8")
    store = convert(folder, tmp_path / "store").path
    runtimes = []
    for place in (folder, store):
        opened = Engine.open(place, cap="300MiB", context=64, backend="reference")
        with opened as engine:
            runtimes.append(dict(engine.plan.items)["runtime"])
            case = golden["cases"][1]
            assert engine.tokenizer.encode(case["text"]) == case["ids"]
    assert runtimes[0] == runtimes[1]
