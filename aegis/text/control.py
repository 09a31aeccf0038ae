"""Keeps text that merely spells a control token from becoming one.

Only what the chat template itself writes may become a control token. Where a message spells one,
a character that the text does not contain, the marker, is put behind the first character of that
spelling before rendering. It survives what templates do with text (trim, split, join, tojson).
The rendered prompt goes through the tokenizer as it is, which finds no broken spelling, and the
marker is taken out behind the step that looks for added tokens.

Which spellings count depends on who wrote the text. From a user or a tool: special tokens, and
other added tokens that look like markup (<think>, [TOOL]). From the assistant, the system or a
tool's description: special tokens only, since <think> there is the model's own past output, or an
instruction by whoever runs the model. Added tokens that do not look like markup (runs of blanks)
are ordinary vocabulary and are matched everywhere. A control token of one character cannot be
broken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from aegis.errors import UsageError

if TYPE_CHECKING:
    import tokenizers

# Private use, and for normalizers that drop these (as BERT's), Braille: what JSON writes as \uXXXX.
_MARKERS = (*range(0xF8FF, 0xDFFF, -1), *range(0x28FF, 0x27FF, -1))
_TRUSTED = ("assistant", "model", "system", "developer")  # any other role is a user's or tool's


@dataclass(frozen=True)
class AddedToken:
    """An added token of the tokenizer, as far as it matters who may write it."""

    content: str
    special: bool
    normalized: bool

    @property
    def is_control(self) -> bool:
        """Whether text by users must not become this token."""
        return self.special or bool(re.fullmatch(r"<.+>|\[.+\]", self.content, re.DOTALL))


class Spellings:
    """Finds and breaks the spellings of some control tokens in text."""

    def __init__(
        self,
        tokens: Iterable[AddedToken],
        marker: str,
        normalizer: tokenizers.normalizers.Normalizer | None = None,
    ) -> None:
        """normalizer: the tokenizer's, which can make a token out of another spelling (<THINK>)."""
        contents = {t.content: t.normalized for t in tokens if len(t.content) > 1}
        self._contents = sorted(contents, key=len, reverse=True)
        either = "|".join(map(re.escape, self._contents)) or "(?!)"
        firsts = "".join(re.escape(first) for first in sorted({c[0] for c in self._contents}))
        # The set of first characters alone rules out nearly every position.
        beginning = f"(?=[{firsts}])" if firsts else ""
        self._start = re.compile(f"{beginning}(?=(?:{either}))(.)", re.DOTALL)
        self._marker = marker
        self._normalizer = normalizer
        self._normalized = [
            normalizer.normalize_str(content)
            for content in self._contents
            if normalizer is not None and contents[content]
        ]

    def broken(self, text: str) -> str:
        """Return text with the marker inside every spelling.

        An end of the text that begins a spelling is broken too: the template may put another
        string right behind it.
        """
        cut = self._open_end(text)
        text = text[:cut] + self._marker + text[cut:] if cut else text
        return self._variants_broken(self._start.sub(rf"\1{self._marker}", text))

    def _open_end(self, text: str) -> int:
        """Where to cut the shortest end of text that begins a spelling; 0: there is none.

        Longer ends that begin one are cut there as well.
        """
        found = 0
        for content in self._contents:
            at = len(text)
            least = max(found, len(text) - len(content) + 1, 0)
            while (at := text.rfind(content[0], least, at)) >= 0:
                if content.startswith(text[at:]):
                    found = at + 1
                    break
        return found

    def _variants_broken(self, text: str) -> str:
        if not self._normalized:
            return text
        from tokenizers import NormalizedString

        for content in self._normalized:
            normal = NormalizedString(text)
            self._normalizer.normalize(normal)  # type: ignore[union-attr]
            if content and content in normal.normalized:
                text = "".join(
                    piece.original[:1] + self._marker + piece.original[1:]
                    if piece.normalized == content
                    else piece.original
                    for piece in normal.split(content, "isolated")
                )
        return text

    def broken_in(self, value: Any) -> Any:
        """Apply broken() to every string inside lists and mappings, keys included."""
        if isinstance(value, str):
            return self.broken(value)
        if isinstance(value, Mapping):
            return {self.broken_in(key): self.broken_in(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken_in(item) for item in value]
        return value


class ControlTokens:
    """The added tokens of a tokenizer, and encoding that tells them from their spellings."""

    def __init__(self, backend: tokenizers.Tokenizer, also_special: Collection[int] = ()) -> None:
        """also_special: ids of tokens that count as special whatever tokenizer.json says."""
        self._backend = backend
        self._added = dict(sorted(backend.get_added_tokens_decoder().items()))
        self._tokens = [
            AddedToken(t.content, t.special or i in also_special, t.normalized)
            for i, t in self._added.items()
            if t.content
        ]
        self._encoder: tuple[str, tokenizers.Tokenizer] | None = None

    def free_marker(self, *texts: str) -> str:
        """Return a character that none of the texts contains, and no JSON string in them either."""
        used = set(chain.from_iterable(map(set, texts)))
        for code in _MARKERS:
            marker = chr(code)
            if marker not in used and not any(_escape(marker) in text for text in texts):
                normalizer = self._backend.normalizer
                if normalizer is None or marker in normalizer.normalize_str(f"a{marker}a"):
                    return marker
        raise UsageError(
            "the prompt contains every private-use character of Unicode, so that what it spells "
            "cannot be told from control tokens; take some of them out"
        )

    def break_spellings(
        self,
        messages: Sequence[Mapping[str, Any]],
        others: Any,
        marker: str,
    ) -> tuple[list[dict[str, Any]], Any]:
        """Return messages and others (tools, documents) with the marker in every spelling."""
        every, special = self._spellings(marker), self._spellings(marker, special_only=True)
        broken = [
            (special if message.get("role") in _TRUSTED else every).broken_in(message)
            for message in messages
        ]
        return broken, special.broken_in(others)

    def break_text(self, text: str, marker: str) -> str:
        """Return text with the marker in the spelling of every control token."""
        return self._spellings(marker).broken(text)

    def _spellings(self, marker: str, special_only: bool = False) -> Spellings:
        tokens = [t for t in self._tokens if (t.special if special_only else t.is_control)]
        return Spellings(tokens, marker, self._backend.normalizer)

    def encode(self, text: str, marker: str) -> list[int]:
        """Encode text: unbroken spellings are tokens, broken ones plain text without marker."""
        text = text.replace(_escape(marker), marker)  # a template's tojson in ASCII
        encoder = self._without(marker)
        ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _without(self, marker: str) -> tokenizers.Tokenizer:
        """Return the same tokenizer, but the marker disappears before words become tokens.

        Vocabulary and merges are shared, not copied. The marker is taken out where the words are
        already cut, so that no merge joins what it keeps apart.
        """
        if self._encoder is None or self._encoder[0] != marker:
            from tokenizers import Tokenizer
            from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

            encoder, source = Tokenizer(self._backend.model), self._backend
            if source.normalizer is not None:
                encoder.normalizer = source.normalizer
            [(letters, _)] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
                marker
            )
            own = [] if source.pre_tokenizer is None else [source.pre_tokenizer]
            encoder.pre_tokenizer = Sequence(
                [*own, Split(marker, "removed"), Split(letters, "removed")]
            )
            encoder.add_tokens(list(self._added.values()))
            self._encoder = (marker, encoder)
        return self._encoder[1]


def _escape(marker: str) -> str:
    return f"\\u{ord(marker):04x}"
