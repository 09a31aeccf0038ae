"""Reads tokenizer.json with little memory: the library alone peaks at a dozen times the file size.

The library parses the vocabulary and merges of a BPE model into a tree of JSON values first. It
also reads them from a vocab.json and a merges.txt, line by line; so the two sections are cut out
of the file as bytes, handed over that way, and the small rest is parsed as usual. Whatever does
not fit this scheme (other models, merges that contain blanks) goes through the library's reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.checkpoint.plainfile import FileDamageError, read_regular
from aegis.checkpoint.vocabulary import vocabulary_nbytes
from aegis.errors import TokenizerError
from aegis.text import library

# A thread pool would take memory outside the plan; both are read when tokenizers first needs one.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

if TYPE_CHECKING:
    import tokenizers

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_VOCAB = re.compile(rb'"vocab"\s*+:\s*+(\{(?:[^"{}]++|' + _STRING + rb")*+\})", re.DOTALL)
_MERGES = re.compile(
    rb'"merges"\s*+:\s*+(\[(?:[^"\[\]]++|%b|\[(?:[^"\[\]]++|%b)*+\])*+\])' % (_STRING, _STRING),
    re.DOTALL,
)
_BETWEEN = re.compile(rb'(?<=[\]"])\s*+,\s*+(?=[\["])')
"""What may be between two merges; also between the halves of one, or inside of a string."""
_OPTIONS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
_ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_CACHED_WORDS = 1024  # the library's default of 10000 is some MiB; a prompt is encoded once
_MERGES_NBYTES = 128 << 10
"""Of the merges so much is parsed at once."""
_PROBE = "Two words, \n é 🎉 12"


class OtherPathError(Exception):
    """The file does not fit the low-memory scheme; the library's own reader takes it."""


def load(path: Path) -> tokenizers.Tokenizer:
    """Load tokenizer.json; TokenizerError where it is missing or damaged."""
    data = read(path)
    with readable(path):
        try:
            with tempfile.TemporaryDirectory(prefix="aegis-") as folder:
                head = _split(data, Path(folder))
                del data
                tokenizer = assemble(head, Path(folder))
        except (OtherPathError, OSError):
            tokenizer = _load_whole(path)
        probe(path, tokenizer)
        return tokenizer


def read(path: Path) -> bytes:
    """All of a file of a vocabulary; TokenizerError where it is missing or cannot be one."""
    try:
        return read_regular(path, vocabulary_nbytes(path))
    except (FileNotFoundError, FileDamageError) as error:
        raise TokenizerError(f"{path} {error}; download it again") from error


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Make a TokenizerError of what the library raises; it prints nothing."""
    what = f"{path} is not a tokenizer that can be read"
    with library.quiet(), library.failures_say(what, "download it again"):
        yield


def probe(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Encode and decode a little: some damage shows only then."""
    if not tokenizer.get_vocab_size():
        raise TokenizerError(f"{path} has no tokens; download it again")
    tokenizer.decode(tokenizer.encode(tokenizer.id_to_token(0) or "a").ids)
    with contextlib.suppress(Exception):  # a vocabulary may lack these; a panic passes
        tokenizer.encode_batch_fast([_PROBE], add_special_tokens=False)


def _load_whole(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _split(data: bytes, folder: Path) -> dict[str, Any]:
    """Write vocab.json and merges.txt; return the rest of the file, with both sections empty."""
    model = re.search(rb'"model"\s*+:\s*+\{', data)
    vocab = _VOCAB.search(data, model.end()) if model else None
    merges = _MERGES.search(data, vocab.end()) if vocab else None
    if vocab is None or merges is None:
        raise OtherPathError
    before, between = data[: vocab.start(1)], data[vocab.end(1) : merges.start(1)]
    rest = b"".join((before, b"{}", between, b"[]", data[merges.end(1) :]))
    head = _parse(rest)
    view = memoryview(data)
    (folder / "vocab.json").write_bytes(view[vocab.start(1) : vocab.end(1)])
    with (folder / "merges.txt").open("wb") as file:
        for lines in _merge_lines(data, *merges.span(1)):
            file.write(lines)
    return head


def _parse(rest: bytes) -> dict[str, Any]:
    try:
        head = json.loads(rest)
        model = head["model"]
        known = model["type"] == "BPE" and set(model) <= {"type", "vocab", "merges", *_OPTIONS}
        emptied = model["vocab"] == {} and model["merges"] == []
    except (ValueError, LookupError, TypeError) as error:
        raise OtherPathError from error
    if not (known and emptied):
        raise OtherPathError
    return dict(head)


def _merge_lines(data: bytes, start: int, end: int) -> Iterator[bytes]:
    """Yield the merges as lines "left right", a few thousand at a time."""
    at, end = start + 1, end - 1
    while at < end:
        stop, merges = _some_merges(data, at, end)
        try:
            lines = [merge if isinstance(merge, str) else _joined(merge) for merge in merges]
            text = "".join([line + "\n" for line in lines])
            encoded = text.encode()
        except (TypeError, ValueError) as error:
            raise OtherPathError from error
        # A blank and a line's end for each, and no others.
        fits = text.count(" ") == text.count("\n") == len(lines) and "\r" not in text
        if not fits or not all(" " in line for line in lines) or "\n#version" in f"\n{text}":
            raise OtherPathError
        yield encoded
        at = stop


def _joined(merge: Any) -> str:
    """A pair as a line, or one that does not fit."""
    if not isinstance(merge, list) or len(merge) != 2:
        return ""
    left, right = merge
    return f"{left} {right}" if isinstance(left, str) and isinstance(right, str) else ""


def _some_merges(data: bytes, at: int, end: int) -> tuple[int, list[Any]]:
    """Merges from ``at`` on, and where the next ones begin."""
    size = _MERGES_NBYTES
    while True:
        cut = _BETWEEN.search(data, at + size, end) if at + size < end else None
        until, after = cut.span() if cut else (end, end)
        try:
            return after, json.loads(b"[%b]" % data[at:until])
        except ValueError as error:
            if cut is None:
                raise OtherPathError from error
        size = after - at  # It was cut inside of a merge.


def assemble(head: dict[str, Any], folder: Path) -> tokenizers.Tokenizer:
    """Build the tokenizer as the library's reader would: model first, then the added tokens.

    head: a tokenizer.json without tokens; folder has them in vocab.json and merges.txt.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE

    declared = head["added_tokens"] or []
    settings = head["model"]
    options = {name: settings[name] for name in _OPTIONS if settings.get(name) is not None}
    bare = {**head, "added_tokens": [], "truncation": None, "padding": None}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(bare))
        tokenizer.model = BPE.from_file(
            str(folder / "vocab.json"),
            str(folder / "merges.txt"),
            cache_capacity=_CACHED_WORDS,
            **options,
        )
        tokenizer.add_tokens(
            [AddedToken(**{k: token[k] for k in _ADDED if k in token}) for token in declared]
        )
        moved = any(tokenizer.token_to_id(token["content"]) != token["id"] for token in declared)
    except BaseException as error:
        if not library.is_failure(error):
            raise
        raise OtherPathError from error  # its own reader has the say
    if moved:
        raise OtherPathError
    return tokenizer
