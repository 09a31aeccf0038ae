"""Tokenizers of every kind, opened once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import text_kinds
from tokenizers import Tokenizer

from aegis.text import tokenizer as text_tokenizer

GOLDENS = Path(__file__).parent.parent / "goldens"
EMBEDDED = Path(text_tokenizer.__file__).parent.parent / "embedded"


@pytest.fixture(scope="session")
def embedded() -> text_tokenizer.Tokenizer:
    return text_tokenizer.Tokenizer.open(EMBEDDED)


@pytest.fixture(scope="session")
def tokenizers_by_kind(
    tmp_path_factory: pytest.TempPathFactory, embedded: text_tokenizer.Tokenizer
) -> dict[str, text_tokenizer.Tokenizer]:
    opened = {"embedded": embedded}
    opened["qwen2_moe"] = text_tokenizer.Tokenizer.open(GOLDENS / "qwen2_moe")
    for kind, build in text_kinds.KINDS.items():
        config = {"clean_up_tokenization_spaces": True, "bos_token": "<s>", "eos_token": "</s>"}
        if kind in ("no_decoder", "word_pieces"):
            config = {"clean_up_tokenization_spaces": True}
        folder = text_kinds.write_folder(
            tmp_path_factory.mktemp(kind), build(), tokenizer_config=config
        )
        opened[kind] = text_tokenizer.Tokenizer.open(folder)
    return opened


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    return lambda backend=None, **files: text_kinds.write_folder(
        tmp_path / "model", backend, **files
    )


@pytest.fixture
def byte_level() -> Tokenizer:
    return text_kinds.byte_level()


@pytest.fixture
def llama_like() -> Tokenizer:
    return text_kinds.llama_like(False)
