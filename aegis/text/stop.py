"""Stop strings in a stream of text, wherever the token borders fall."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aegis.errors import UsageError, shown


def stop_strings(stops: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return stop strings as users give them: none, one, or several, each at least a character.

    Raises:
        UsageError: one of them is empty or no string.
    """
    given: tuple[Any, ...] = () if stops is None else (stops,)
    if isinstance(stops, Iterable) and not isinstance(stops, str):
        given = tuple(stops)
    for stop in given:
        if not isinstance(stop, str):
            raise UsageError(f"stop must be a string or several strings, got {shown(stop)}")
        if not stop:
            raise UsageError("a stop string is empty; give at least one character or leave it out")
    return tuple(dict.fromkeys(given))


def overlap(text: str, wholes: Iterable[str]) -> int:
    """Length of the longest end of text that begins one of wholes without being all of it."""
    longest = 0
    for whole in wholes:
        at = max(0, len(text) - len(whole) + 1)
        while len(text) - at > longest and (at := text.find(whole[0], at)) >= 0:
            if whole.startswith(text[at:]):
                longest = max(longest, len(text) - at)
            at += 1
    return longest


class StopMatcher:
    """Cuts a stream before the first stop string that is complete in it.

    "First" is by where a stop string ends, so the outcome does not depend on how the text is cut
    into pieces; of two that end together the one that starts earlier wins.
    """

    def __init__(self, stops: str | Iterable[str] | None = ()) -> None:
        self.stops = stop_strings(stops)
        self.matched: str | None = None
        """The stop string that ended the stream, once one did."""
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown now and whether a stop string ended it."""
        if self.matched is not None:
            return "", True
        window = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self.stops
            if (start := window.find(stop)) >= 0
        ]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return window[:start], True
        keep = overlap(window, self.stops)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], False

    def finish(self) -> str:
        """Return the text still held back; the stream ended without completing a stop string."""
        held, self._held = self._held, ""
        return held
