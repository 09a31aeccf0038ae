"""load, generate and stream_generate as mlx-lm's users know them."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_model import PLENTY

import aegis
from aegis import Engine, GenerationResponse, generate, load, stream_generate
from aegis.convert.cache import cache_folder
from aegis.engine.generate import Clock
from aegis.engine.sampling import Sampler
from aegis.errors import CheckpointError, PlanError, UsageError
from aegis.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parents[1] / "goldens" / "qwen2_moe"
TEXT = "Once upon a time"

Loaded = tuple[Engine, Tokenizer]

pytestmark = pytest.mark.usefixtures("quick_open")


@pytest.fixture(scope="module")
def loaded(cache: Path) -> Iterator[Loaded]:
    """The small random checkpoint, converted into the cache on the way."""
    model, tokenizer = load(CHECKPOINT, cap="300MiB", context=128)
    with model:
        yield model, tokenizer


@pytest.fixture(scope="module")
def chat(cache: Path) -> Iterator[Loaded]:
    """The embedded model, which has a chat template."""
    model, tokenizer = load(cap=PLENTY, context=256)
    with model:
        yield model, tokenizer


def test_load_takes_a_checkpoint_or_a_store_and_returns_model_and_tokenizer(
    loaded: Loaded, cache: Path
) -> None:
    model, tokenizer = loaded
    assert isinstance(model, Engine)
    assert tokenizer is model.tokenizer
    # Other tests of this session may have converted it for other backends.
    there, store = sorted(cache_folder().glob("qwen2_moe-*")), model.store.path
    assert store in there
    again, _ = load(str(store), cap="300MiB", context=128)
    with again:
        ids = tokenizer.encode(TEXT)
        assert again.score(ids).tobytes() == model.score(ids).tobytes()
    assert sorted(cache_folder().glob("qwen2_moe-*")) == there


def test_load_refuses_what_is_no_model_and_what_does_not_fit(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(tmp_path)
    with pytest.raises(PlanError, match="the smallest cap that opens is"):
        load(CHECKPOINT, cap="16MiB")
    with pytest.raises(UsageError, match="has no unit"):
        load(CHECKPOINT, cap="4")


def test_generate_returns_the_text_that_stream_generate_yields(loaded: Loaded) -> None:
    model, tokenizer = loaded
    responses = list(stream_generate(model, tokenizer, TEXT, max_tokens=12, ignore_eos=True))
    text = generate(model, tokenizer, TEXT, max_tokens=12, ignore_eos=True)
    assert text == "".join(response.text for response in responses)
    tokens = [response.token for response in responses if response.token is not None]
    assert tokens == list(model.generate(tokenizer.encode(TEXT), 12, ignore_eos=True))
    assert text == tokenizer.decode(tokens, skip_special_tokens=False)


def test_prompts_are_text_or_ids_or_messages(chat: Loaded) -> None:
    model, tokenizer = chat
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.encode_chat(messages)
    expected = generate(model, tokenizer, ids, max_tokens=8)
    assert expected
    assert generate(model, tokenizer, messages, max_tokens=8) == expected
    assert generate(model, tokenizer, tuple(ids), max_tokens=8) == expected
    plain = generate(model, tokenizer, TEXT, max_tokens=8)
    assert generate(model, tokenizer, tokenizer.encode(TEXT), max_tokens=8) == plain


@pytest.mark.parametrize("prompt", ["", [], ()], ids=["text", "list", "tuple"])
def test_an_empty_prompt_is_refused(loaded: Loaded, prompt: Any) -> None:
    model, tokenizer = loaded
    if tokenizer.encode(""):
        pytest.skip("this tokenizer begins every text with a token")
    with pytest.raises(UsageError, match="no tokens"):
        generate(model, tokenizer, prompt)


def test_a_mix_of_ids_and_messages_is_refused(loaded: Loaded) -> None:
    model, tokenizer = loaded
    with pytest.raises(UsageError, match="messages"):
        generate(model, tokenizer, [{"role": "user", "content": "a"}, 5])  # type: ignore[list-item]


def test_responses_have_the_fields_of_mlx_lm(loaded: Loaded) -> None:
    model, tokenizer = loaded
    prompt = tokenizer.encode(TEXT)
    *running, last = stream_generate(model, tokenizer, prompt, max_tokens=5, ignore_eos=True)
    assert isinstance(last, GenerationResponse)
    assert [response.generation_tokens for response in running] == [1, 2, 3, 4, 5]
    assert all(response.finish_reason is None for response in running)
    assert last.finish_reason == "length"
    assert last.token is None
    for response in [*running, last]:
        assert response.prompt_tokens == len(prompt)
        assert response.prompt_tps > 0
        assert response.generation_tps >= 0
        # GB, as in mlx-lm: this process holds at least an interpreter and less than a server.
        assert 0.01 < response.peak_memory < 64
    assert last.generation_tokens == 5


def test_prompt_speed_does_not_count_what_the_cache_holds(loaded: Loaded) -> None:
    model, tokenizer = loaded
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 2
    model.score([ids[0] + 1])
    assert model.uncached(ids) == len(ids)
    model.score(ids)
    assert Clock.start(model, ids).computed == model.uncached(ids) == 1
    assert Clock.start(model, [*ids, 3, 4]).computed == 2


def test_an_end_token_ends_with_stop_and_is_not_shown(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    tokens = list(model.generate(tokenizer.encode(TEXT), 8, ignore_eos=True))
    at = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    monkeypatch.setattr(tokenizer, "eos_token_ids", frozenset({tokens[at]}))
    responses = list(stream_generate(model, tokenizer, TEXT, max_tokens=8))
    assert [r.token for r in responses if r.token is not None] == tokens[:at]
    assert responses[-1].finish_reason == "stop"


def test_stop_strings_cut_the_text(loaded: Loaded) -> None:
    model, tokenizer = loaded
    text = generate(model, tokenizer, TEXT, max_tokens=12, ignore_eos=True)
    stop = text[4:7]
    cut = generate(model, tokenizer, TEXT, max_tokens=12, ignore_eos=True, stop=[stop])
    assert cut == text[: text.index(stop)]
    assert cut == generate(model, tokenizer, TEXT, max_tokens=12, ignore_eos=True, stop=stop)


def test_sampling_is_by_options_or_by_a_sampler(loaded: Loaded) -> None:
    model, tokenizer = loaded

    def ask(**options: Any) -> str:
        return generate(model, tokenizer, TEXT, max_tokens=12, ignore_eos=True, **options)

    drawn = ask(temperature=1.2, top_p=0.95, seed=3)
    assert drawn == ask(temperature=1.2, top_p=0.95, seed=3)
    assert drawn == ask(sampler=Sampler(temperature=1.2, top_p=0.95, seed=3))
    assert drawn != ask()
    assert ask() == ask(temperature=0.0, seed=9)
    with pytest.raises(UsageError, match="top_p"):
        ask(top_p=2.0)
    with pytest.raises(UsageError, match="no option 'temp'; those of sampling are temperature"):
        ask(temp=1.2)
    with pytest.raises(UsageError, match=r"give an aegis\.engine\.sampling\.Sampler, or temp"):
        ask(sampler=lambda logits: 3)
    with pytest.raises(UsageError, match="no option 'temp'"):
        list(model.generate([3], temp=1.2))


def test_a_long_generation_never_shows_half_a_character(chat: Loaded) -> None:
    model, tokenizer = chat
    prompt = "日本語 🙂 Ünïcödé 日本語 🙂 Ünïcödé 日本語"
    ids = tokenizer.encode(prompt)
    pieces = [
        r.text for r in stream_generate(model, tokenizer, ids, max_tokens=24, ignore_eos=True)
    ]
    tokens = list(model.generate(ids, 24, ignore_eos=True))
    whole = tokenizer.decode(tokens, skip_special_tokens=False)
    assert "".join(pieces) == whole
    assert sum("\ufffd" in piece for piece in pieces[:-1]) <= whole.count("\ufffd")


def test_verbose_prints_text_and_figures(
    loaded: Loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = loaded
    text = generate(model, tokenizer, TEXT, max_tokens=6, verbose=True, ignore_eos=True)
    printed = capsys.readouterr().out
    assert printed.startswith(text + "\nPrompt: ")
    assert "Generation: 6 tokens, " in printed
    generate(model, tokenizer, TEXT, max_tokens=6, ignore_eos=True)
    assert capsys.readouterr().out == ""


def test_the_plan_is_the_one_that_opening_carries_out(cache: Path) -> None:
    planned = aegis.plan(CHECKPOINT, cap="80MiB", context=100)
    with Engine.open(CHECKPOINT, cap="80MiB", context=100) as engine:
        assert engine.plan == planned
        assert engine.context == 100


def test_planning_converts_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "none"))
    assert aegis.plan(CHECKPOINT, cap="300MiB").feasible
    assert not aegis.plan(CHECKPOINT, cap="1MiB").feasible
    assert aegis.plan(cap=PLENTY, context=512).feasible
    assert not (tmp_path / "none").exists()


def test_importing_aegis_loads_nothing_heavy() -> None:
    heavy = ("numpy", "tokenizers", "jinja2", "mlx", "click", "aegis.engine.engine")
    code = f"import sys, aegis; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in aegis.__all__:
        if name != "__version__":  # needs the distribution installed
            assert getattr(aegis, name) is not None
    assert set(aegis.__all__) <= set(dir(aegis))
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        aegis.magic  # noqa: B018


def test_the_first_arguments_are_those_of_mlx_lm() -> None:
    for function in (generate, stream_generate):
        assert list(inspect.signature(function).parameters)[:3] == ["model", "tokenizer", "prompt"]


LONG = "The quick brown fox jumps over the lazy dog. " * 20_000


def test_a_prompt_far_too_long_is_refused_before_it_is_encoded(
    chat: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = chat
    longest = total = 0
    encode = Tokenizer.encode

    def measured(self: Tokenizer, text: str, **options: Any) -> list[int]:
        nonlocal longest, total
        longest, total = max(longest, len(text)), total + len(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", measured)
    prompts: list[Any] = [
        LONG,
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": LONG}],
        [{"role": "user", "content": [{"type": "text", "text": LONG}]}],
        [{"role": "user", "content": [LONG, None]}],
    ]
    for prompt in prompts:
        with pytest.raises(UsageError, match=r"about \d+ tokens do not fit the context of 256"):
            generate(model, tokenizer, prompt, max_tokens=1)
    assert longest <= 1 << 14
    assert total < len(LONG)


@pytest.mark.parametrize("many", [257, 10_000_000])
def test_more_token_ids_than_the_context_are_refused_before_they_are_copied(
    chat: Loaded, many: int
) -> None:
    model, tokenizer = chat
    ids = range(many)  # a copy of these would take 80 MB and more
    for call in (
        lambda: generate(model, tokenizer, ids),
        lambda: list(model.generate(ids)),
        lambda: model.score(ids),
        lambda: model.nll(ids),
        lambda: model.feed(ids),
    ):
        with (
            peak_of_python(2 << 20),
            pytest.raises(UsageError, match=f"^{many} tokens do not fit the context of 256"),
        ):
            call()


@contextlib.contextmanager
def peak_of_python(bound: int) -> Iterator[None]:
    """Python allocates less than ``bound`` at any time in the block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < bound
    finally:
        tracemalloc.stop()


def test_about_how_long_a_refused_prompt_is_comes_close(chat: Loaded) -> None:
    model, tokenizer = chat
    for text in (LONG, LONG[:6000] + "\u4e16\u754c" * 3000):
        exact = len(tokenizer.encode(text))
        with pytest.raises(UsageError) as told:
            model.refuse_far_too_long([text])
        about = int(str(told.value).split()[1])
        assert 0.5 * exact < about < 2 * exact
    model.refuse_far_too_long(["ab" * 256])
    model.refuse_far_too_long(["a" * 800])
