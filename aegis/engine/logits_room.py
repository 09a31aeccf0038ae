"""Room under the cap for logits that a caller keeps: the hot tier gives slots for them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from aegis.errors import UsageError
from aegis.planner import format_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aegis.engine.opening import Opened


class LogitsRoom:
    """Hands out logits arrays; slots released for one come back when the caller has dropped it."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._released_nbytes = 0
        """What slots gave for the arrays that are out; the governor's part is not ours."""
        self._handed: list[weakref.ref[NDArray[np.float32]]] = []

    def array(self, rows: int, vocab_size: int) -> NDArray[np.float32]:
        """float32 [rows, vocab_size], uninitialised.

        Raises:
            UsageError: even without the hot tier the cap has no room for it.
        """
        self.take_back()
        held = [array for ref in self._handed if (array := ref()) is not None]
        needed = rows * vocab_size * 4
        short = needed + sum(array.nbytes for array in held) - self._room()
        if short > 0:
            self._released_nbytes += self._opened.tiers.release_nbytes(short)
            short = needed + sum(array.nbytes for array in held) - self._room()
        if short > 0:
            self.take_back()
            raise UsageError(
                f"{rows} rows of logits take {format_size(needed)}, which is {format_size(short)}"
                " more than the cap leaves; ask for fewer rows with last=, or for likelihoods"
                " with nll()"
            )
        array = np.empty((rows, vocab_size), np.float32)
        self._handed.append(weakref.ref(array))
        return array

    def take_back(self) -> None:
        """Give the hot tier its slots again once every array is gone, if memory allows."""
        self._handed = [ref for ref in self._handed if ref() is not None]
        if not self._handed:
            self._released_nbytes = 0
            self._opened.governor.retake()

    def _room(self) -> int:
        """What the plan leaves, a part of the reserve, and what slots have been released."""
        plan = self._opened.plan
        reserve = dict(plan.items)["runtime_reserve"] // 4
        return plan.unused_nbytes + reserve + self._released_nbytes
