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

_HUGE_NBYTES = 2 << 20


class LogitsRoom:
    """Hands out logits arrays; slots released for one come back when the caller has dropped it."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
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
            self._release(short)
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
        """Give the hot tier its slots again once every array is gone."""
        self._handed = [ref for ref in self._handed if ref() is not None]
        slots = self._opened.tiers.slots
        # Fewer slots may be in use with nothing released: only whole 2 MiB ranges go back.
        if not self._handed and slots.capacity < slots.num_slots:
            self._opened.tiers.restore_slots()

    def _room(self) -> int:
        """What the plan leaves, a part of the reserve, and what slots have been released."""
        plan = self._opened.plan
        reserve = dict(plan.items)["runtime_reserve"] // 4
        return plan.unused_nbytes + reserve + self._opened.arena.released_nbytes

    def _release(self, nbytes: int) -> None:
        # Only whole 2 MiB ranges go back, so one more range than the bytes alone would take.
        slots = -(-(nbytes + _HUGE_NBYTES) // self._opened.plan.slot_nbytes)
        self._opened.tiers.release_slots(slots)
