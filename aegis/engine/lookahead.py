"""Choosing tokens on the device, and computing the next one before the last was looked at.

Where calls queue and nothing has to wait for a router, a greedy choice needs no host: the token
goes from the head into the embedding, and the host learns of it while the device is busy with what
follows. What was computed in vain, behind an end token say, is forgotten: the cache's next position
is simply written again, and recurrent states are still there as they were before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aegis.engine.forward import Forward
    from aegis.kernels.base import Array
    from aegis.kernels.queued import Queue


@dataclass
class _Computed:
    """A token that is being computed although nobody has asked for it."""

    hidden: Array
    best: Array
    """What the head chooses behind it."""
    token: int | None = None
    """Which one it is, once the host knows."""


class Lookahead:
    """At most one token ahead of what was asked for."""

    def __init__(self, forward: Forward, queue: Queue | None) -> None:
        self._forward, self._queue = forward, queue
        self._ahead: _Computed | None = None
        self._taken: _Computed | None = None

    @property
    def can_choose(self) -> bool:
        """Whether tokens can be chosen on the device at all."""
        return self._queue is not None

    def take(self, token: int) -> Array | None:
        """The hidden state of a token behind everything cached, if it was computed ahead."""
        ahead, self._ahead, self._taken = self._ahead, None, None
        if ahead is None:
            return None
        if ahead.token != token:
            self._forward.forget_ahead()
            return None
        self._taken = ahead
        return ahead.hidden

    def drop(self) -> None:
        """Something else comes behind what is cached."""
        if self._ahead is not None:
            self._forward.forget_ahead()
        self._ahead = self._taken = None

    def choose(self, hidden: Array, position: int | None) -> int:
        """The token with the largest logit behind ``hidden``; -1 where that is not finite.

        position: that token's, where it will probably be asked for and should be begun; or None.
        """
        queue, taken = self._queue, self._taken
        assert queue is not None
        known = taken is not None and taken.hidden is hidden
        best = taken.best if taken is not None and known else self._forward.best(hidden)
        self.drop()
        if position is not None:
            found = self._forward.decode_ahead(best, position)
            self._ahead = None if found is None else _Computed(*found)
        token = queue.token(best)
        if self._ahead is not None:
            self._ahead.token = token
        return token
