"""Text from token ids as they arrive: only whole characters, and exactly what decode() would give.

The decoder of a tokenizer is a chain of steps over the list of all tokens. Each step here does
the same to a stream, at a cost that does not grow with the text. A chain with a step not listed
here (patterns, CTC) is decoded in one piece at the end, so that the text is still right.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aegis.text.tokenizer import clean_up

if TYPE_CHECKING:
    from aegis.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into text; the pieces joined equal tokenizer.decode(ids)."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        state = tokenizer.backend.decoder
        decoder = None if state is None else json.loads(state.__getstate__())
        self._steps = _steps(decoder)
        self._skip_special_tokens = skip_special_tokens
        self._clean_up = _CleanUp() if tokenizer.cleans_up else None
        self._kept_ids: list[int] = []

    def add(self, token_id: int) -> str:
        """Take the next id; return the text that is now certain, possibly none."""
        if self._steps is None:
            self._kept_ids.append(token_id)
            return ""
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        return self._shown("".join(_through(self._steps, [token])))

    def finish(self) -> str:
        """Return the rest; an incomplete character becomes U+FFFD. The next add starts anew."""
        if self._steps is None:
            ids, self._kept_ids = self._kept_ids, []
            return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        last = "".join(_flushed(self._steps))
        return self._shown(last) + (self._clean_up.finish() if self._clean_up else "")

    def _shown(self, text: str) -> str:
        return self._clean_up.feed(text) if self._clean_up else text


class _Step(Protocol):
    """One step of a decoder over a stream of tokens; finish() also makes it ready to start anew."""

    def feed(self, tokens: list[str]) -> list[str]: ...

    def finish(self) -> list[str]: ...


class _Each:
    """A step that changes every token by itself."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change

    def feed(self, tokens: list[str]) -> list[str]:
        return [self._change(token) for token in tokens]

    def finish(self) -> list[str]:
        return []


class _Joined:
    """No decoder at all: tokens with a blank between them."""

    def __init__(self) -> None:
        self._between = ""

    def feed(self, tokens: list[str]) -> list[str]:
        shown = [self._between + token if i == 0 else " " + token for i, token in enumerate(tokens)]
        self._between = " " if tokens else self._between
        return shown

    def finish(self) -> list[str]:
        self._between = ""
        return []


class _Metaspace:
    """Word marks to blanks; the first token's are dropped where encoding had put one there."""

    def __init__(self, mark: str, drops_first: bool) -> None:
        self._mark = mark
        self._drops_first = self._first = drops_first

    def feed(self, tokens: list[str]) -> list[str]:
        shown = []
        for token in tokens:
            shown.append(token.replace(self._mark, "" if self._first else " "))
            self._first = False
        return shown

    def finish(self) -> list[str]:
        self._first = self._drops_first
        return []


class _WordPieces:
    """A blank before every token but the first and those that go on with a word."""

    def __init__(self, prefix: str, cleanup: bool) -> None:
        self._prefix, self._cleanup = prefix, cleanup
        self._first = True

    def feed(self, tokens: list[str]) -> list[str]:
        shown = []
        for token in tokens:
            if not self._first:
                goes_on = token.startswith(self._prefix)
                token = token.replace(self._prefix, "", 1) if goes_on else " " + token
            self._first = False
            shown.append(_word_clean_up(token) if self._cleanup else token)
        return shown

    def finish(self) -> list[str]:
        self._first = True
        return []


class _WordEnds:
    """Marks at the ends of words to blanks, but not at the end of the text."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: list[str] = []

    def feed(self, tokens: list[str]) -> list[str]:
        *certain, last = [*self._held, *tokens] or [""]
        self._held = [last] if self._held or tokens else []
        return [token.replace(self._suffix, " ") for token in certain]

    def finish(self) -> list[str]:
        held, self._held = self._held, []
        return [token.replace(self._suffix, "") for token in held]


class _StripStart:
    """Takes up to count leading characters from the whole text."""

    def __init__(self, character: str, count: int) -> None:
        self._character = character
        self._count = self._left = count

    def feed(self, tokens: list[str]) -> list[str]:
        text = "".join(tokens)
        while self._left and text:
            if not text.startswith(self._character):
                self._left = 0
            else:
                text = text[1:]
                self._left -= 1
        return [text]

    def finish(self) -> list[str]:
        self._left = self._count
        return []


class _Bytes:
    """Byte-level vocabularies: each letter of a token stands for one byte of UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: list[str]) -> list[str]:
        return [self._utf8.decode(b"".join(map(_token_bytes, tokens)))]

    def finish(self) -> list[str]:
        last = self._utf8.decode(b"", True)
        self._utf8.reset()
        return [last]


class _ByteFallback:
    """Tokens like <0xE2> are bytes. A run of them is text only if all of it is valid UTF-8.

    Otherwise every byte of the run becomes U+FFFD, so nothing of a run is certain before its end.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, tokens: list[str]) -> list[str]:
        shown: list[str] = []
        for token in tokens:
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte:
                self._run.append(int(byte[1], 16))
            else:
                shown += [*self.finish(), token]
        return shown

    def finish(self) -> list[str]:
        run = bytes(self._run)
        self._run.clear()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _CleanUp:
    """clean_up() on a stream: text is certain up to a character that begins no pattern."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        window = self._held + text
        safe = len(window.rstrip(" 'nvr"))
        self._held = window[safe:]
        return clean_up(window[:safe])

    def finish(self) -> str:
        held, self._held = self._held, ""
        return clean_up(held)


def _through(steps: Sequence[_Step], tokens: list[str]) -> list[str]:
    for step in steps:
        tokens = step.feed(tokens)
    return tokens


def _flushed(steps: Sequence[_Step]) -> list[str]:
    """Flush each step in turn through those behind it."""
    tokens: list[str] = []
    for step in steps:
        tokens = [*step.feed(tokens), *step.finish()]
    return tokens


def _steps(decoder: dict[str, Any] | None) -> list[_Step] | None:
    """Return the streaming steps of a decoder, None where one of them cannot stream."""
    if decoder is None:
        return [_Joined()]
    steps: list[_Step] = []
    fused = False
    for spec in _flattened(decoder):
        if spec["type"] == "Fuse":
            fused = True
            continue
        step = _fused_step(spec) if fused else _step(spec)
        if step is None:
            return None
        steps.append(step)
        fused = fused or spec["type"] == "ByteLevel"
    return steps


def _flattened(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [spec for inner in decoder["decoders"] for spec in _flattened(inner)]


def _step(spec: dict[str, Any]) -> _Step | None:
    match spec:
        case {"type": "ByteLevel"}:
            return _Bytes()
        case {"type": "ByteFallback"}:
            return _ByteFallback()
        case {"type": "Metaspace", "replacement": mark}:
            return _Metaspace(mark, spec.get("prepend_scheme", "always") != "never")
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return _WordPieces(prefix, cleanup)
        case {"type": "BPEDecoder", "suffix": suffix} if suffix:
            return _WordEnds(suffix)
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
            return _Each(lambda token: token.replace(old, new))
        case {"type": "Strip", "content": character, "start": start, "stop": stop}:
            return _Each(lambda token: _stripped(token, character, start, stop))
    return None


def _fused_step(spec: dict[str, Any]) -> _Step | None:
    """Return a step behind one that joined all tokens to one text."""
    match spec:
        case {"type": "Strip", "content": character, "start": start, "stop": 0}:
            return _StripStart(character, start)
    return None


def _stripped(token: str, character: str, start: int, stop: int) -> str:
    first = 0
    while first < min(start, len(token)) and token[first] == character:
        first += 1
    last = len(token)
    while last > max(first, len(token) - stop) and token[last - 1] == character:
        last -= 1
    return token[first:last]


def _word_clean_up(token: str) -> str:
    """What the library does to each token of a word-piece vocabulary; in its order."""
    for spaced in (" .", " ?", " !", " ,", " ' ", " n't", " 'm"):
        token = token.replace(spaced, spaced.strip())
    token = token.replace(" do not", " don't")
    for spaced in (" 's", " 've", " 're"):
        token = token.replace(spaced, spaced.strip())
    return token


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _letters() -> dict[str, int]:
    """Map the letters of byte-level vocabularies to bytes.

    Printable Latin-1 stands for itself; the other bytes in order are the letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def _token_bytes(token: str) -> bytes:
    try:
        return bytes(_LETTERS[letter] for letter in token)
    except KeyError:  # an added token with other letters stands for itself
        return token.encode()


_LETTERS = _letters()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
