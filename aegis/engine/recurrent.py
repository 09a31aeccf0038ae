"""The recurrent states of a model, and from where a sequence can go on.

Keys and values of a prefix stay what they are when other tokens follow; a state does not, it has
seen all that came. So a prompt that leaves what is cached goes on from a copy of the states, which
is kept ahead of the last chunk of every prompt, or is computed from its first token on.

The copy is not of the prompt's end: a prompt mostly ends in what the next one lacks (the beginning
of an answer), and its last token is always computed again. From the chunk's beginning one chunk
more is computed, on the grid that all chunks are on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from aegis.kernels.base import RecurrentState

P = ParamSpec("P")
R = TypeVar("R")


class Recurrence:
    """All layers' states, which hold the same tokens: those that the cache holds, or unknown ones.

    A pass that fails, or is interrupted, leaves some layers behind it and some ahead of it.
    """

    def __init__(self, states: Sequence[RecurrentState]) -> None:
        self._states = states
        self._seen: int | None = 0
        """Tokens that the states have seen; None: not the same ones in every layer."""
        self._kept = 0
        """Tokens that the copies have seen; 0: there are none."""

    def are_behind(self, tokens: int) -> bool:
        """Whether the states have seen just so many."""
        return not self._states or self._seen == tokens

    def reachable(self, start: int) -> int:
        """How many of the first ``start`` cached tokens need not be computed again."""
        if self.are_behind(start):
            return start
        return self._kept if self._kept <= start else 0

    def resume(self, start: int) -> int:
        """The same; and the cached tokens behind the first ``start`` are gone."""
        found = self.reachable(start)
        if self._kept > start:
            self._kept = 0
        if found and not self.are_behind(found):
            self._all(lambda state: state.restore(), found)
        return found

    def keep(self, start: int) -> None:
        """Copy the states, which have seen the first ``start`` tokens."""
        if self._seen == start != self._kept:
            self._kept = 0
            for state in self._states:
                state.keep(start)
            self._kept = start

    def moving(self, end: int, compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """A pass behind which the states have seen ``end`` tokens."""
        self._seen = None
        result = compute(*args, **kwargs)
        self._seen = end
        return result

    def _all(self, change: Callable[[RecurrentState], None], end: int) -> None:
        self._seen = None
        for state in self._states:
            change(state)
        self._seen = end
