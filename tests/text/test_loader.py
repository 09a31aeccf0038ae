"""The low-memory reader gives the tokenizer that the library's own reader gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from aegis.checkpoint.vocabulary import tokenizer_nbytes
from aegis.errors import TokenizerError
from aegis.text import loader

GOLDENS = Path(__file__).parent.parent / "goldens"
EMBEDDED = Path(loader.__file__).parent.parent / "embedded"


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} went through the library's reader")

    monkeypatch.setattr(loader, "_load_whole", refuse)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("folder", [EMBEDDED, GOLDENS / "qwen2_moe"])
def test_real_files_load_alike_with_little_memory(folder: Path) -> None:
    path = folder / "tokenizer.json"
    assert loader.load(path).to_str() == Tokenizer.from_file(str(path)).to_str()


@pytest.mark.usefixtures("no_fallback")
def test_escapes_and_old_merges_load_alike(
    make_folder: Callable[..., Path], byte_level: Tokenizer
) -> None:
    content = json.loads(byte_level.to_str())
    vocab = content["model"]["vocab"]
    for token in ('"\\', 'a"', '{"', "[]", "Ġ}"):
        vocab[token] = len(vocab) + 100
    content["model"]["merges"] = ['" \\', 'a "', '{ "', "[ ]", "Ġ }"]
    for token in content["added_tokens"]:
        vocab[token["content"]] = token["id"]
    path = make_folder() / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=True))
    assert loader.load(path).to_str() == Tokenizer.from_file(str(path)).to_str()
    assert loader.load(path).encode("[]").tokens == ["[]"]


_HALF = st.text(st.sampled_from('[],"\\a{}Ġ'), min_size=1, max_size=4)


@given(st.lists(st.tuples(_HALF, _HALF)), st.booleans(), st.integers(0, 40), st.booleans())
def test_merges_are_the_same_wherever_they_are_cut(
    merges: list[tuple[str, str]], pairs: bool, size: int, ascii_only: bool
) -> None:
    """Some hold what stands between merges, too."""
    lines = [f"{left} {right}" for left, right in merges]
    data = json.dumps(merges if pairs else lines, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_MERGES_NBYTES", size)
        found = b"".join(loader._merge_lines(data, 0, len(data)))
    assert found.decode() == "".join(line + "\n" for line in lines)


@pytest.mark.parametrize(
    "merges",
    [
        '["ab"]',
        '[["a"]]',
        '[["a", "b", "c"]]',
        '[["a b", "c"]]',
        '[["a", "b"], ["a\\n", "c"]]',
        '["a b c", "ab"]',
        '[["a", "b\\r"]]',
        '[["#version:", "2"]]',
        '[["a", 1]]',
        "[1]",
        "[null]",
        '[{"a": 1, "b": 2}]',
        '[["a", "\\ud800"]]',
        '[["a", "b"],]',
        '[["a" "b"]]',
    ],
)
def test_merges_that_do_not_fit_the_scheme_are_left_to_the_library(merges: str) -> None:
    data = merges.encode()
    with pytest.raises(loader.OtherPathError):
        list(loader._merge_lines(data, 0, len(data)))


@pytest.mark.parametrize("kind", ["unigram", "word_pieces", "llama_metaspace"])
def test_other_models_load_alike(
    make_folder: Callable[..., Path], tokenizers_by_kind: dict[str, object], kind: str
) -> None:
    backend = tokenizers_by_kind[kind].backend  # type: ignore[attr-defined]
    path = make_folder(backend) / "tokenizer.json"
    assert loader.load(path).to_str() == Tokenizer.from_file(str(path)).to_str()


def test_merges_with_blanks_load_alike(
    make_folder: Callable[..., Path], byte_level: Tokenizer
) -> None:
    content = json.loads(byte_level.to_str())
    content["model"]["vocab"].update({" ": 900, "\n": 901, " \n": 902})
    content["model"]["merges"] = [[" ", "\n"]]
    path = make_folder() / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert loader.load(path).to_str() == Tokenizer.from_file(str(path)).to_str()


def test_truncation_and_padding_saved_in_the_file_are_off(
    make_folder: Callable[..., Path], byte_level: Tokenizer, llama_like: Tokenizer
) -> None:
    for backend in (byte_level, llama_like):
        backend.enable_truncation(2)
        backend.enable_padding(length=9)
        loaded = loader.load(make_folder(backend) / "tokenizer.json")
        assert len(loaded.encode("hellohello", add_special_tokens=False).ids) == 10 or (
            loaded.padding is None and loaded.truncation is None
        )


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing; .* copy or download"):
        tokenizer_nbytes(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing; copy or download"):
        loader.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("other", ["tokenizer.model", "vocab.json", "tiktoken.model"])
def test_other_vocabularies_are_named_with_a_way_to_a_tokenizer_json(
    tmp_path: Path, other: str
) -> None:
    (tmp_path / other).touch()
    with pytest.raises(TokenizerError, match=rf"write it from {other} with transformers: Auto"):
        tokenizer_nbytes(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 3000, -20])
def test_a_cut_off_file_is_refused(
    make_folder: Callable[..., Path], byte_level: Tokenizer, keep: int
) -> None:
    path = make_folder(byte_level) / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer .* download"):
        loader.load(path)
