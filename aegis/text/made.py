"""Makes a tokenizer from the files that some models have in place of tokenizer.json.

Kimi's tiktoken.model lists tokens by rank: of all neighbours whose bytes together are a token,
those of the lowest rank are joined, the leftmost first. The tokenizers library joins by a list of
pairs instead. What is joined within a token's bytes before they are one does not depend on what
stands around them, so it is always the same two that make a token: those become its pair.
vocab.json and merges.txt are what the library reads anyway; only rules are missing. They are known
here by the name of a class: code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import binascii
import io
import json
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.checkpoint.plainfile import shown_name
from aegis.checkpoint.vocabulary import (
    MERGES_TXT,
    TIKTOKEN_MODEL,
    TOKENIZER_CONFIG,
    VOCAB_JSON,
    Rule,
    Vocabulary,
    byte_letters,
)
from aegis.errors import TokenizerError
from aegis.text import loader
from aegis.text.token_files import TokenFiles

if TYPE_CHECKING:
    import tokenizers

_LONGEST = 1024
"""Characters of base64; the longest tokens are a line of blanks."""
_RESERVED = 256
"""Rows that Kimi's vocabulary has behind the ranked tokens; those without a name get one."""

_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"

_PATTERNS: dict[Rule, str] = {
    "kimi": "|".join(
        (
            r"[\p{Han}]+",
            f"{_LEAD}{_UPPER}*{_LOWER}+{_SUFFIX}?",
            f"{_LEAD}{_UPPER}+{_LOWER}*{_SUFFIX}?",
            r"\p{N}{1,3}",
            _SIGNS,
            _ENDS,
        )
    ),
    "qwen2": "|".join((_SUFFIX, _LEAD + r"\p{L}+", r"\p{N}", _SIGNS, _ENDS)),
    "qwen3_5": "|".join(
        (
            _SUFFIX,
            _LEAD + r"[\p{L}\p{M}]+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            _ENDS,
        )
    ),
}
"""How text is cut into words; gpt2's pattern is the library's own."""


def load(
    folder: Path, vocabulary: Vocabulary, files: TokenFiles, rows: int | None
) -> tokenizers.Tokenizer:
    """The tokenizer of a folder without tokenizer.json, added tokens included.

    rows: how many tokens the model has rows for, None where its config does not say.
    TokenizerError names the file that is damaged, or contradicts another.
    """
    path = folder / vocabulary.files[0]
    write = _write_ranked if vocabulary.rule == "kimi" else _write_pairs
    with loader.readable(path):
        try:
            with tempfile.TemporaryDirectory(prefix="aegis-") as temporary:
                write(folder, Path(temporary))
                head = _head(vocabulary.rule, bool(files.config.get("add_prefix_space")))
                backend = loader.assemble(head, Path(temporary))
        except loader.OtherPathError as error:
            raise error.__cause__ or error from None
        except OSError as error:
            raise TokenizerError(
                f"the tokenizer of {folder} cannot be made in a temporary folder"
                f" ({error.strerror}); set TMPDIR to one that has room for it"
            ) from error
        if vocabulary.rule == "kimi":
            _reserve(backend, files, rows)
        files.add_to(backend, rows)
        _check_ids(folder, vocabulary, files, rows, backend)
        if vocabulary.rule != "kimi":
            _surround(backend, files)
        loader.probe(path, backend)
    return backend


def _head(rule: Rule, prefix_space: bool) -> dict[str, Any]:
    """A tokenizer.json without tokens."""
    letters = {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True}
    words: dict[str, Any] = {**letters, "use_regex": rule == "gpt2"}
    if rule != "gpt2":
        cut = {"type": "Split", "pattern": {"Regex": _PATTERNS[rule]}, "behavior": "Isolated"}
        words = {"type": "Sequence", "pretokenizers": [{**cut, "invert": False}, words]}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if rule in ("qwen2", "qwen3_5") else None,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": {**letters, "use_regex": True},
        # A word that is a token is that token, whatever its merges would give.
        "model": {**model, "ignore_merges": True} if rule == "kimi" else model,
    }


def _write_pairs(folder: Path, target: Path) -> None:
    """Copy vocab.json and merges.txt, without the empty lines that the library refuses."""
    (target / VOCAB_JSON).write_bytes(loader.read(folder / VOCAB_JSON))
    with (target / MERGES_TXT).open("wb") as file:
        for line in io.BytesIO(loader.read(folder / MERGES_TXT)):
            if line.strip() and not line.startswith(b"#version"):
                file.write(line.rstrip(b"\r\n") + b"\n")


def _write_ranked(folder: Path, target: Path) -> None:
    """Write vocab.json and merges.txt that join as the ranks of tiktoken.model do."""
    path = folder / TIKTOKEN_MODEL
    tokens = _ranked(path)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) < len(tokens):
        raise TokenizerError(f"{path} lists a token twice; download it again")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise TokenizerError(f"{path} has no token for the byte {byte}; download it again")
    letters = dict(enumerate(byte_letters()))

    def spelled(token: bytes) -> str:
        return token.decode("latin-1").translate(letters)

    with (target / VOCAB_JSON).open("w", encoding="utf-8") as file:
        for rank, token in enumerate(tokens):
            file.write(
                f"{',' if rank else '{'}{json.dumps(spelled(token), ensure_ascii=False)}:{rank}"
            )
        file.write("}")
    with (target / MERGES_TXT).open("w", encoding="utf-8") as file:
        for token in tokens:
            if at := _cut(token, ranks):
                file.write(f"{spelled(token[:at])} {spelled(token[at:])}\n")


def _cut(token: bytes, ranks: Mapping[bytes, int]) -> int:
    """Where the last two parts of a token meet when its bytes are joined; 0: they never get there.

    Such a token is one only where it is a whole word.
    """
    never = len(ranks)
    parts = [token[at : at + 1] for at in range(len(token))]
    joints = [ranks.get(left + right, never) for left, right in pairwise(parts)]
    while len(parts) > 2:
        lowest = min(joints)
        if lowest == never:
            return 0
        at = joints.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del joints[at]
        for joint in range(max(at - 1, 0), min(at + 1, len(joints))):
            joints[joint] = ranks.get(parts[joint] + parts[joint + 1], never)
    return len(parts[0]) if len(parts) == 2 else 0


def _ranked(path: Path) -> list[bytes]:
    """The tokens of a tiktoken.model by rank; ranks are 0, 1, 2 and so on, in any order."""
    data = loader.read(path)
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            tokens[int(rank)] = binascii.a2b_base64(token, strict_mode=True)
            if len(token) > _LONGEST:
                raise ValueError("no vocabulary has such long tokens")
        except ValueError as error:
            raise TokenizerError(
                f"line {number} of {path} is not a token in base64 and its rank; download it again"
            ) from error
    try:
        return [tokens[rank] for rank in range(len(tokens))]
    except KeyError as error:
        raise TokenizerError(
            f"{path} has no token of rank {error.args[0]}, though later ones; download it again"
        ) from error


def _reserve(backend: tokenizers.Tokenizer, files: TokenFiles, rows: int | None) -> None:
    """Add the tokens behind the ranked ones, which have their places whether named or not."""
    from tokenizers import AddedToken

    first = backend.get_vocab_size()
    last = first + _RESERVED if rows is None else min(first + _RESERVED, rows)
    for place in range(first, last):
        named = files.listed.get(place)
        content = f"<|reserved_token_{place}|>" if named is None else named.content
        backend.add_tokens([AddedToken(content, special=True, normalized=False)])


def _check_ids(
    folder: Path,
    vocabulary: Vocabulary,
    files: TokenFiles,
    rows: int | None,
    backend: tokenizers.Tokenizer,
) -> None:
    """Added tokens get the next id there is; nothing but this says that it is theirs."""
    for place, token in files.listed.items():
        own = backend.token_to_id(token.content)
        if own != place and (rows is None or place < rows):
            raise TokenizerError(
                f"{folder / TOKENIZER_CONFIG} gives {shown_name(token.content)} the id {place}, but"
                f" with {' and '.join(vocabulary.files)} it is {own}; download them again"
            )


def _surround(backend: tokenizers.Tokenizer, files: TokenFiles) -> None:
    """Put a BOS before every text, or an EOS behind it, where the config asks for that."""
    from tokenizers.processors import TemplateProcessing

    def named(name: str) -> list[str]:
        token = files.names.get(f"{name}_token")
        return [token] if token is not None and files.config.get(f"add_{name}_token") else []

    before, after = named("bos"), named("eos")
    if before or after:
        backend.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, backend.token_to_id(token)) for token in (*before, *after)],
        )
