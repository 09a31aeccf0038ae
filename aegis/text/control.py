"""Keeps text that merely spells a control token from becoming one.

Only what the chat template itself writes may become a control token. Where a message spells one,
a private-use character is put behind the first character of that spelling before rendering. It
survives what templates do with text (trim, split, join, tojson), and the spelling it breaks is
never found again in the rendered prompt; what is found there was written by the template.

Which spellings count depends on who wrote the text. From a user or a tool: special tokens, and
other added tokens that look like markup (<think>, [TOOL]). From the assistant, the system or a
tool's description: special tokens only, since <think> there is the model's own past output, or an
instruction by whoever runs the model. Added tokens that do not look like markup (runs of blanks)
are ordinary vocabulary and are matched everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MARKERS = range(0xF8FF, 0xF000, -1)
_UNTRUSTED = ("user", "tool", "function", "ipython", "observation")


@dataclass(frozen=True)
class AddedToken:
    """An added token of the tokenizer, with the flags that say how it is matched."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool

    @property
    def is_control(self) -> bool:
        """Whether text by users must not become this token."""
        return self.special or bool(re.fullmatch(r"<.+>|\[.+\]", self.content, re.DOTALL))


class Spellings:
    """Finds and breaks the spellings of some control tokens in text."""

    def __init__(self, contents: Iterable[str], marker: str) -> None:
        longest_first = sorted((c for c in contents if len(c) > 1), key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._start = re.compile(f"(?=(?:{either}))(.)", re.DOTALL)
        self._beginnings = {c[:size] for c in longest_first for size in range(1, len(c))}
        self._longest = max(map(len, longest_first), default=1)
        self._marker = marker

    def broken(self, text: str) -> str:
        """Return text with the marker inside every spelling.

        An end of the text that begins a spelling is broken too: the template may put another
        string right behind it.
        """
        for size in range(1, min(self._longest, len(text) + 1)):
            cut = len(text) - size
            if text[cut:] in self._beginnings:
                text = text[: cut + 1] + self._marker + text[cut + 1 :]
                break
        return self._start.sub(rf"\1{self._marker}", text)

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
    """The added tokens of a tokenizer, and encoding that tells them from their spellings.

    plain(text, at_start) must encode text with no added token recognised.
    """

    def __init__(self, tokens: Sequence[AddedToken], plain: Callable[[str, bool], list[int]]):
        self._by_content = {token.content: token for token in tokens if token.content}
        self._ids = frozenset(token.id for token in tokens if token.is_control)
        self._plain = plain
        longest_first = sorted(self._by_content, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def break_spellings(
        self,
        messages: Sequence[Mapping[str, Any]],
        others: Any,
        marker: str,
    ) -> tuple[list[dict[str, Any]], Any]:
        """Return messages and others (tools, documents) with the marker in every spelling."""
        tokens = self._by_content.values()
        every = Spellings((t.content for t in tokens if t.is_control), marker)
        special = Spellings((t.content for t in tokens if t.special), marker)
        broken = [
            (every if message.get("role") in _UNTRUSTED else special).broken_in(message)
            for message in messages
        ]
        return broken, special.broken_in(others)

    def break_text(self, text: str, marker: str) -> str:
        """Return text with the marker in the spelling of every control token."""
        tokens = self._by_content.values()
        return Spellings((t.content for t in tokens if t.is_control), marker).broken(text)

    def encode(self, text: str, marker: str) -> list[int]:
        """Encode text: unbroken spellings are tokens, broken ones plain text without marker."""
        text = text.replace(f"\\u{ord(marker):04x}", marker)  # a template's tojson in ASCII
        ids: list[int] = []
        end, strip = 0, False
        for found in self._any.finditer(text):
            token = self._by_content[found.group()]
            run = text[end : found.start()]
            run = run.lstrip() if strip else run
            ids += self._encode_run(run.rstrip() if token.lstrip else run, marker, end == 0)
            ids.append(token.id)
            end, strip = found.end(), token.rstrip
        run = text[end:]
        return ids + self._encode_run(run.lstrip() if strip else run, marker, end == 0)

    def _encode_run(self, run: str, marker: str, at_start: bool) -> list[int]:
        ids = self._plain(run.replace(marker, ""), at_start)
        if self._ids.isdisjoint(ids):
            return ids
        # The model's own vocabulary builds the token from its letters: keep the pieces apart.
        ids = []
        for index, piece in enumerate(run.split(marker)):
            ids += self._plain(piece, at_start and index == 0)
        return ids


def free_marker(*texts: str) -> str:
    """Return a private-use character that none of the texts contains."""
    return next(chr(code) for code in _MARKERS if all(chr(code) not in text for text in texts))
