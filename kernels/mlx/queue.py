"""What was called and may not be computed yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import (
    AttentionBlock,
    BackendUnavailableError,
    ExpertsBlock,
    RouterBlock,
    Routing,
)
from aegis.kernels.mlx.attention import MlxAttention
from aegis.kernels.mlx.delta import MlxDelta
from aegis.kernels.mlx.device import Clock
from aegis.kernels.mlx.experts import MlxExperts
from aegis.kernels.mlx.latent import MlxLatentAttention
from aegis.kernels.mlx.layer import MlxLayer
from aegis.kernels.mlx.router import MlxRouter, MlxRouting

_NOT_COMPILED = "Failed to compile kernel"
"""How MLX begins to say so; the compiler's whole output follows."""


class MlxQueue:
    """Queue of one backend: a stream that every thread may use, and what was put into it last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # MLX's usual streams belong to the thread that made them.
        self._stream = mx.new_thread_unsafe_stream(mx.default_device())
        self._last: mx.array | None = None
        self._gathered: tuple[list[Routing], mx.array] | None = None
        """Routings that will be read together, and what was chosen in all of them."""

    def stream(self) -> _Stream:
        """See Queue."""
        return _Stream(self._stream)

    def add(self, result: mx.array) -> None:
        """A result whose graph reads from slots. It depends on all results before it, or is
        computed after them: operations of one stream run in order."""
        self._last = result

    def layer(
        self, attention: AttentionBlock, router: RouterBlock, experts: ExpertsBlock
    ) -> MlxLayer:
        """See Queue."""
        return MlxLayer(
            cast(MlxAttention | MlxDelta | MlxLatentAttention, attention),
            cast(MlxRouter, router),
            cast(MlxExperts, experts),
        )

    def start(self, results: Sequence[mx.array], routings: Sequence[Routing] = ()) -> None:
        """See Queue. Chosen experts are gathered into one array, which is one transfer later."""
        if routings:
            together = _together(routings)
            self._gathered = list(routings), together
            results = [*results, together]
        self._clock.start(*results)

    def token(self, best: mx.array) -> int:
        """See Queue."""
        self._clock.wait(best)
        token: Any = best.item()
        return int(token)

    def table(self, slots: NDArray[np.int32]) -> mx.array:
        """See Queue."""
        table = mx.array(slots.astype(np.uint32))
        mx.eval(table)
        return table

    def read(self, routings: Sequence[Routing]) -> NDArray[np.int32]:
        """See Queue."""
        gathered, self._gathered = self._gathered, None
        known = gathered is not None and list(map(id, gathered[0])) == list(map(id, routings))
        with self.stream():  # A model that is closed is not in a call.
            together = gathered[1] if gathered is not None and known else _together(routings)
            return self._clock.on_host(together).astype(np.int32)

    def settle(self) -> None:
        """See Queue."""
        if self._last is not None:
            with self.stream():
                self._clock.wait(self._last)
            self._last = None

    def spent(self) -> tuple[float, float]:
        """See Queue."""
        return self._clock.queued_s, self._clock.waited_s


class _Stream(mx.StreamContext):
    """MLX's context, out of which what MLX says of a kernel comes as a sentence."""

    def __exit__(
        self,
        kind: type | None = None,
        error: object | None = None,
        traceback: object | None = None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        if isinstance(error, RuntimeError) and str(error).startswith(_NOT_COMPILED):
            reason = str(error).removeprefix(_NOT_COMPILED).strip(": ").partition("\n")[0]
            raise BackendUnavailableError(
                f"MLX could not compile a kernel for this GPU ({reason}); `aegis doctor` says"
                " whether CUDA's headers are there, and --backend native needs none"
            ) from error


def _together(routings: Sequence[Routing]) -> mx.array:
    """What single rows chose, uint32 [routings, K]."""
    return mx.concatenate([cast(MlxRouting, routing).ids for routing in routings])
