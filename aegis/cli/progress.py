"""A progress bar in plain text: it runs inside the cap, so it brings no library."""

from __future__ import annotations

import sys
from collections.abc import Callable

from aegis.cli.streams import tell
from aegis.planner import format_size

_WIDTH = 30


class ProgressBar:
    """Called with (done, total), bytes if not told else; draws on stderr if it is a terminal."""

    def __init__(
        self, what: str, quiet: bool = False, show: Callable[[int], str] = format_size
    ) -> None:
        self._what, self._show = what, show
        self._shown = -1
        self.used = False
        """Whether there was anything to show."""
        self._on = not quiet and sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Draw when the percentage changed."""
        self.used = True
        percent = 100 * done // total if total else 100
        if not self._on or percent == self._shown:
            return
        self._shown = percent
        filled = _WIDTH * done // total if total else _WIDTH
        bar = "#" * filled + "-" * (_WIDTH - filled)
        end = "\n" if done >= total else ""
        sizes = f"{self._show(done)} of {self._show(total)}"
        tell(f"\r{self._what} [{bar}] {percent:3d} %  {sizes:<24}", end)

    def clear(self) -> None:
        """Empty the line for what is written next; the bar comes again with the next call."""
        if self._on and self._shown >= 0:
            self._shown = -1
            tell("\r\x1b[K", "")


class DownloadBar:
    """Called with (done, total, sentence): says the sentence once, then draws."""

    def __init__(self, quiet: bool = False) -> None:
        self._bar = ProgressBar("downloading", quiet)
        self._said = quiet

    def __call__(self, done: int, total: int, what: str) -> None:
        """Say what goes where before the first byte; draw when the percentage changed."""
        if not self._said:
            self._said = True
            tell(what)
        self._bar(done, total)
