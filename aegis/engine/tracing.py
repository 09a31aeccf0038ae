"""Recording what routers choose, and what they would have guessed one and two layers before."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from aegis.models import family
from aegis.models.decoder import router_block
from aegis.tiers.guess_width import MAX_WIDTH
from aegis.tiers.trace import AHEAD, TraceRecorder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aegis.engine.opening import Opened
    from aegis.kernels.base import Array


class Tracing:
    """An observer of an open model's passes, while it is entered.

    Guesses are those of routers of its own, which see what the model's see and change nothing.
    """

    def __init__(self, opened: Opened) -> None:
        layout, shape = opened.store.layout, opened.request.shape
        model = family(layout.model_type).describe(layout.config)
        self._forward = opened.forward
        layers = len(shape.moe_layers)
        self._width = min(MAX_WIDTH, shape.num_experts)
        self._guessing = [
            {
                ahead: router_block(model, opened.backend, opened.weights, index, ahead)
                for ahead in AHEAD
                if index + ahead < layers
            }
            for index in range(layers)
        ]
        self.recorder = TraceRecorder(layers, shape.num_experts, self._width)

    def __enter__(self) -> Tracing:
        self._forward.observer = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forward.observer = None
        self._guessing.clear()

    def look(self, index: int, x: Array) -> None:
        """Before the router itself: what routers give lies in the same place."""
        for ahead, router in self._guessing[index].items():
            self.recorder.guessed(ahead, router(x, self._width).guess)

    def chose(self, experts: NDArray[np.int32]) -> None:
        """The router's choice."""
        self.recorder.chose(experts)
