"""Stop strings in a stream of text, wherever the token borders fall."""

from __future__ import annotations

from collections.abc import Iterable

from aegis.errors import UsageError


class StopMatcher:
    """Cuts a stream before the first stop string that is complete in it.

    "First" is by where a stop string ends, so the outcome does not depend on how the text is cut
    into pieces; of two that end together the one that starts earlier wins.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        if "" in self.stops:
            raise UsageError("A stop string is empty; give at least one character or leave it out.")
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
        keep = self._pending(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], False

    def finish(self) -> str:
        """Return the text still held back; the stream ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _pending(self, window: str) -> int:
        """Length of the longest end of window that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for size in range(min(longest, len(window)), 0, -1):
            tail = window[len(window) - size :]
            if any(stop.startswith(tail) for stop in self.stops):
                return size
        return 0
