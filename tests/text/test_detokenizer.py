"""A streamed answer is the decoded answer, cut only between characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.text.detokenizer import Detokenizer
from aegis.text.tokenizer import Tokenizer

KINDS = [
    "embedded",
    "qwen2_moe",
    "byte_level",
    "llama_metaspace",
    "llama_prepend",
    "unigram",
    "no_decoder",
    "word_pieces",
    "word_ends",
    "no_streaming",
]


def pieces(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_decoded_text(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, skip: bool, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    top = tokenizer.vocab_size - 1
    token = st.integers(0, top) | st.integers(0, min(top, 300))
    ids = data.draw(st.lists(token, max_size=40))
    joined = "".join(pieces(tokenizer, ids, skip_special_tokens=skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["embedded", "byte_level", "llama_metaspace", "llama_prepend"])
@given(text=st.text(max_size=60))
def test_text_comes_back_whole_and_no_piece_splits_a_character(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text, parse_special=False)
    parts = pieces(tokenizer, ids)
    # Only the byte-level one here can hold every text: the embedded vocabulary lacks some bytes,
    # and a Metaspace takes a leading blank for its own.
    whole = text if kind == "byte_level" else tokenizer.decode(ids)
    if "\ufffd" not in whole:
        assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == whole


@pytest.mark.parametrize(("kind", "late"), [("word_pieces", 0), ("word_ends", 1)])
def test_words_appear_as_they_come(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, late: int
) -> None:
    ids = tokenizers_by_kind[kind].encode("he he he")
    parts = pieces(tokenizers_by_kind[kind], ids)
    assert sum(not part for part in parts[:-1]) == late
    assert parts[:2] != ["", ""]


def test_an_emoji_appears_with_its_last_byte(embedded: Tokenizer) -> None:
    ids = embedded.encode("👋")
    parts = pieces(embedded, ids)
    assert len(ids) > 1
    assert parts == [""] * (len(ids) - 1) + ["👋", ""]


def test_ascii_is_shown_without_delay(embedded: Tokenizer) -> None:
    ids = embedded.encode("The sky is blue.")
    assert pieces(embedded, ids)[-1] == ""


def test_a_cut_off_character_becomes_one_replacement_character(embedded: Tokenizer) -> None:
    ids = embedded.encode("ok 👋")[:-1]
    assert "".join(pieces(embedded, ids)) == "ok \ufffd"


def test_finish_makes_it_ready_for_another_text(
    tokenizers_by_kind: dict[str, Tokenizer],
) -> None:
    for kind in ("embedded", "llama_metaspace", "no_decoder", "word_pieces", "word_ends"):
        tokenizer = tokenizers_by_kind[kind]
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("hello he")
        runs = ["".join(map(detokenizer.add, ids)) + detokenizer.finish() for _ in range(2)]
        assert runs == [tokenizer.decode(ids)] * 2


def test_ids_outside_the_vocabulary_add_nothing(embedded: Tokenizer) -> None:
    assert "".join(pieces(embedded, [10**6, *embedded.encode("hi")])) == "hi"
