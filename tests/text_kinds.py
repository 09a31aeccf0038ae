"""Small tokenizers of every kind, built here so that nothing is downloaded.

Also used by tools/make_text_goldens.py, which asks transformers what it makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE, Unigram, WordPiece

_WORDS = [
    "▁the",
    "▁he",
    "llo",
    "▁",
    "h",
    "e",
    "l",
    "o",
    "t",
    "w",
    "▁w",
    "é",
    ".",
    "<",
    "|",
    ">",
    "s",
]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPECIAL = ["<unk>", "<s>", "</s>"]


def llama_like(prepend_by_normalizer: bool) -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate([*_SPECIAL, *_BYTES, *_WORDS, "th", "he"])}
    merges = [("t", "h"), ("h", "e")]
    backend = Tokenizer(
        BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if prepend_by_normalizer:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(_SPECIAL)
    return backend


def _unigram() -> Tokenizer:
    pieces = [(piece, 0.0) for piece in _SPECIAL] + [(piece, -9.0) for piece in _BYTES]
    pieces += [(piece, -float(index) / 8) for index, piece in enumerate(_WORDS)]
    backend = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(_SPECIAL)
    return backend


def _plain_words() -> Tokenizer:
    words = ["[UNK]", "he", "##llo", ".", "'", "s", "n't", ",", "it", "'s", "'ve", "!"]
    words += ["do", "not", " do not", "##'s", "'", "##", "####llo"]
    backend = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def _word_pieces() -> Tokenizer:
    backend = _plain_words()
    backend.decoder = decoders.WordPiece()
    return backend


def _word_ends() -> Tokenizer:
    pieces = ["h", "e", "l", "o", "o</w>", "e</w>", "</w>", "he", "</w></w>x", ".</w>"]
    vocab = {piece: index for index, piece in enumerate(["<unk>", *pieces])}
    model = BPE(vocab=vocab, merges=[("h", "e")], unk_token="<unk>", end_of_word_suffix="</w>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    backend.add_special_tokens(["<unk>"])
    return backend


def _no_streaming() -> Tokenizer:
    """A decoder with a pattern, which cannot be applied to a stream."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex("e+l"), "E")])
    return backend


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "</s>"])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>")])
    backend.add_tokens([AddedToken("€uro", normalized=False)])
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama_metaspace": lambda: llama_like(False),
    "llama_prepend": lambda: llama_like(True),
    "unigram": _unigram,
    "no_decoder": _plain_words,
    "word_pieces": _word_pieces,
    "word_ends": _word_ends,
    "no_streaming": _no_streaming,
}


def write_folder(folder: Path, backend: Tokenizer | None = None, **files: Any) -> Path:
    """Write a model folder: tokenizer.json and the named JSON files (name without ending)."""
    folder.mkdir(parents=True, exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
