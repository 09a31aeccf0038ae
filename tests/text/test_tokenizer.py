"""Ids and special tokens as Hugging Face's tokenizers give them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from aegis.errors import TokenizerError, UsageError
from aegis.text.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent.parent / "goldens/text/chat.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=lambda case: repr(case["text"][:12]))
def test_texts_have_the_ids_transformers_gives(embedded: Tokenizer, case: dict[str, Any]) -> None:
    assert embedded.encode(case["text"]) == case["ids"]
    assert embedded.decode(case["ids"]) == case["shown"]
    assert embedded.decode(case["ids"], skip_special_tokens=False) == case["whole"]


def test_an_estimate_is_hardly_more_than_the_number_of_ids(embedded: Tokenizer) -> None:
    text = "Rivers carry stones, and mills grind flour. 12345 ünïcödé\n" * 400
    count = len(embedded.encode(text))
    assert count <= embedded.estimate(text) <= 1.01 * count


def test_the_embedded_model_has_its_tokens(embedded: Tokenizer) -> None:
    assert (embedded.bos_token_id, embedded.eos_token_id, embedded.pad_token_id) == (1, 2, 2)
    assert embedded.unk_token_id == 0
    assert embedded.vocab_size == 49152
    assert embedded.eos_token_ids == {2}
    assert embedded.id_to_token(2) == "<|im_end|>"
    assert embedded.token_to_id("<|im_end|>") == 2


def test_end_tokens_of_every_config_file_count(
    make_folder: Callable[..., Path], byte_level: Backend
) -> None:
    folder = make_folder(
        byte_level,
        config={"eos_token_id": 5, "text_config": {"eos_token_id": [6, 7]}},
        generation_config={"eos_token_id": [8, 5]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
    )
    own = byte_level.token_to_id("<|im_end|>")
    assert Tokenizer.open(folder).eos_token_ids == {5, 6, 7, 8, own}


def test_an_end_token_that_is_no_id_is_refused(
    make_folder: Callable[..., Path], byte_level: Backend
) -> None:
    folder = make_folder(byte_level, generation_config={"eos_token_id": ["</s>"]})
    with pytest.raises(TokenizerError, match="eos_token_id must be a token id or a list"):
        Tokenizer.open(folder)


def test_the_special_tokens_map_has_the_last_word_on_names_where_no_tokens_are_listed(
    make_folder: Callable[..., Path], byte_level: Backend
) -> None:
    config = {"bos_token": None, "eos_token": {"content": "</s>", "lstrip": False}}
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    folder = make_folder(byte_level, special_tokens_map=names, tokenizer_config=config)
    assert Tokenizer.open(folder).special_tokens == names
    listed = {"256": {"content": "<|im_start|>", "special": True}}
    folder = make_folder(byte_level, tokenizer_config={**config, "added_tokens_decoder": listed})
    assert Tokenizer.open(folder).special_tokens == {"eos_token": "</s>"}


def test_tokens_only_the_config_names_are_added_where_the_model_has_rows(
    make_folder: Callable[..., Path], byte_level: Backend
) -> None:
    size = byte_level.get_vocab_size()
    config = {
        "added_tokens_decoder": {str(size): {"content": "<extra>", "special": False}},
        "additional_special_tokens": ["<more>", "</s>"],
        "pad_token": "<pad>",
    }
    folder = make_folder(byte_level, config={"vocab_size": size + 2}, tokenizer_config=config)
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.encode("<extra>") == [size]
    assert tokenizer.pad_token_id == size + 1
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.token_to_id("<more>") is None


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "<a>"}}},
        {"added_tokens_decoder": {"5": "<a>"}},
        {"additional_special_tokens": 5},
        {"additional_special_tokens": [5]},
    ],
)
def test_added_tokens_that_cannot_be_read_are_refused(
    make_folder: Callable[..., Path], byte_level: Backend, config: dict[str, Any]
) -> None:
    folder = make_folder(byte_level, tokenizer_config=config)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json lists added tokens"):
        Tokenizer.open(folder)


def test_bos_and_eos_come_from_the_post_processor_alone(
    make_folder: Callable[..., Path], llama_like: Backend
) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    flags = {**names, "add_bos_token": False, "add_eos_token": True}
    for config in (names, flags):
        tokenizer = Tokenizer.open(make_folder(llama_like, tokenizer_config=config))
        assert tokenizer.encode("he") == llama_like.encode("he").ids
        assert tokenizer.encode("he", add_special_tokens=False) == tokenizer.encode("he")[1:]
        assert tokenizer.encode("") == [1]


def test_a_bos_is_put_before_text_whatever_the_vocabulary_holds(
    make_folder: Callable[..., Path],
) -> None:
    backend = Backend(BPE(vocab={"<s>": 0, "b": 1, "</s>": 2}, merges=[]))
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer = Tokenizer.open(make_folder(backend))
    assert tokenizer.encode("b") == [0, 1, 2]
    assert tokenizer.encode("b", parse_special=False) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["byte_level", "llama_metaspace", "llama_prepend", "unigram"])
@given(text=st.text(max_size=40))
def test_text_without_specials_is_encoded_alike_with_and_without_parsing(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    assert tokenizer.encode(text, parse_special=False) == tokenizer.encode(text)


def test_raw_text_parses_control_tokens_only_where_asked(embedded: Tokenizer) -> None:
    text = "<|im_start|>user"
    spelled = embedded.encode(text, parse_special=False)
    assert embedded.encode(text)[0] == 1
    assert 1 not in spelled
    assert embedded.decode(spelled) == text


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a\udcff", "a\ufffd"),  # a byte that is no UTF-8, from a command line
        ("\udce2\udc82\udcac", "€"),  # bytes that are, but came one by one
        ("\udce2\udc82!", "\ufffd!"),  # as text from a pipe is read
        ("\ud83d\ude00 \ud83d", "😀 \ufffd"),  # halves of a pair, from JSON
    ],
)
def test_text_that_utf8_cannot_hold_is_encoded_as_what_it_meant(
    embedded: Tokenizer, given: str, meant: str
) -> None:
    assert embedded.encode(given) == embedded.encode(meant)
    assert embedded.encode(given, parse_special=False) == embedded.encode(meant)
    chats = [[{"role": "user", "content": text + "<|im_end|>"}] for text in (given, meant)]
    assert embedded.encode_chat(chats[0]) == embedded.encode_chat(chats[1])


@pytest.mark.parametrize("text", [None, 5, b"text", ["text"]])
def test_what_is_no_text_is_refused(embedded: Tokenizer, text: Any) -> None:
    for use in (embedded.encode, embedded.token_to_id):
        with pytest.raises(UsageError, match="; give text"):
            use(text)


@pytest.mark.parametrize("ids", [[10**30], [-1], [1.5], ["a"], "abc", None])
def test_what_are_no_ids_is_refused(embedded: Tokenizer, ids: Any) -> None:
    with pytest.raises(UsageError, match=r"token ids are .*; give numbers from 0 on"):
        embedded.decode(ids)


def test_tokens_that_no_vocabulary_has_are_none(embedded: Tokenizer) -> None:
    assert [embedded.id_to_token(i) for i in (-1, 1 << 31, 1 << 40, 10**30)] == [None] * 4
    assert embedded.token_to_id("\ud800") is None


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "config"])
def test_a_garbled_config_file_is_named(
    make_folder: Callable[..., Path], byte_level: Backend, name: str
) -> None:
    folder = make_folder(byte_level)
    (folder / f"{name}.json").write_text('{"a":')
    with pytest.raises(TokenizerError, match=rf"{name}\.json is not valid JSON"):
        Tokenizer.open(folder)
    (folder / f"{name}.json").write_text("[]")
    with pytest.raises(TokenizerError, match=rf"{name}\.json holds a list; expected a JSON object"):
        Tokenizer.open(folder)


def test_encoding_starts_no_threads(embedded: Tokenizer) -> None:
    script = (
        "import os, sys; from aegis.text.tokenizer import Tokenizer;"
        "Tokenizer.open(sys.argv[1]).encode('a b ' * 20000);"
        "path = '/proc/self/task';"
        "print(len(os.listdir(path)) if os.path.isdir(path) else 1)"
    )
    folder = Path(sys.modules[Tokenizer.__module__].__file__ or "").parent.parent / "embedded"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


def test_importing_the_package_loads_no_library() -> None:
    script = (
        "import sys, aegis.text, aegis.text.stop, aegis.text.tokenizer, aegis.text.detokenizer;"
        "print({'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
