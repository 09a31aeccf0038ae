"""What transformers and mlx-lm made of the same tokenizers, texts and ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_kinds import KINDS
from tokenizers import AddedToken, normalizers

from aegis.errors import TokenizerError
from aegis.text.chat_template import ChatTemplate
from aegis.text.detokenizer import Detokenizer
from aegis.text.tokenizer import Tokenizer

GOLDENS = Path(__file__).parent.parent / "goldens/text"
KIND_GOLDEN = json.loads((GOLDENS / "kinds.json").read_text())
FAILURES = json.loads((GOLDENS / "chat.json").read_text())["failures"]


def streamed(tokenizer: Tokenizer, ids: list[int], **options: bool) -> str:
    detokenizer = Detokenizer(tokenizer, **options)
    return "".join(map(detokenizer.add, ids)) + detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_every_script_and_ids_that_are_no_text_stream_as_transformers_decodes_them(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    for case in KIND_GOLDEN["scripts"][kind]:
        assert tokenizer.decode(case["ids"]) == case["skipped"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["shown"]
        assert streamed(tokenizer, case["ids"]) == case["skipped"]
        assert streamed(tokenizer, case["ids"], skip_special_tokens=False) == case["shown"]


@pytest.mark.parametrize("kind", ["byte_level", "llama_metaspace", "llama_prepend"])
def test_every_script_streams_as_in_mlx_lm(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    """Which drops blanks at the beginning of a text, and shows the letter for byte 0 as it is."""
    for case in KIND_GOLDEN["scripts"][kind]:
        if "mlx_lm" in case and "\ufffd" not in case["mlx_lm"]:
            text = streamed(tokenizers_by_kind[kind], case["ids"], skip_special_tokens=False)
            text = text.replace("\0", "Ā" if kind == "byte_level" else "\0")
            assert text.lstrip(" ") == case["mlx_lm"].lstrip(" ")


@pytest.mark.parametrize("case", KIND_GOLDEN["added_tokens"], ids=lambda case: case["kind"])
def test_added_tokens_have_the_flags_names_and_ids_of_transformers(
    make_folder: Callable[..., Path], case: dict[str, Any]
) -> None:
    backend = KINDS[case["kind"]]()
    if case["normalizer"]:
        backend.normalizer = getattr(normalizers, case["normalizer"])()
    backend.add_tokens([AddedToken(**token) for token in case["added"]])
    tokenizer = Tokenizer.open(make_folder(backend, **case["files"]))
    found = tokenizer.backend.get_added_tokens_decoder()
    assert {str(i): token.__getstate__() for i, token in found.items()} == case["tokens"]
    assert tokenizer.special_tokens == case["names"]
    for text in case["texts"]:
        assert tokenizer.encode(text["text"]) == text["ids"]
        # The way for prompts in which something is spelled differs only where it is.
        plain = tokenizer.encode(text["text"], add_special_tokens=False)
        marker = tokenizer.control.free_marker(text["text"])
        assert tokenizer.control.encode(text["text"], marker) == plain


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case["template"])
def test_a_template_that_fails_in_transformers_is_a_sentence_with_the_same_words(
    case: dict[str, str],
) -> None:
    template = ChatTemplate(case["template"], "the test")
    with pytest.raises(TokenizerError) as failure:
        template.render([{"role": "user", "content": "hi"}])
    sentence = str(failure.value)
    said = case["error"].partition(" while calling")[0]  # where the stack ends is chance
    assert " ".join(said.split()) in sentence
    assert sentence.startswith("the chat template in the test ")
    assert "\n" not in sentence
    assert "Error" not in sentence.partition(": ")[0]
    assert not sentence.endswith(":")
