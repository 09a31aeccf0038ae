"""The head block: final norm and logits."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import HeadSpec, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.linear import Linear, vector
from aegis.kernels.mlx.memory import MlxMemory


class MlxHead:
    """HeadBlock on MLX. Every row alone: kernels for several rows sum in another order."""

    def __init__(
        self, memory: MlxMemory, traits: Traits, spec: HeadSpec, weights: Mapping[str, Weight]
    ) -> None:
        self._clock = traits.clock
        self._eps, self._scaling = spec.rms_norm_eps, spec.logits_scaling
        self._norm = vector(memory, traits, weights["norm"])
        self._lm_head = Linear(memory, traits, weights["lm_head"])
        self._one = device.compiled(self._logits)
        self._best = device.compiled(self._choose)

    def __call__(self, x: mx.array) -> NDArray[np.float32]:
        """x [T, H] to logits [T, vocab_size]."""
        rows = mx.concatenate([self._one(x[row : row + 1]) for row in range(len(x))])
        self._clock.start(rows)
        logits: NDArray[np.float32] = self._clock.on_host(rows)
        return logits

    def best(self, x: mx.array) -> mx.array:
        """See QueuedHeadBlock."""
        return self._best(x)

    def _choose(self, x: mx.array) -> mx.array:
        # In their own numbers: widening a whole vocabulary would change no comparison.
        logits = self._products(x)
        best = mx.argmax(logits, axis=-1).astype(mx.int32)
        return mx.where(mx.isfinite(logits.max(axis=-1)), best, mx.array(-1, mx.int32))

    def _logits(self, x: mx.array) -> mx.array:
        return self._products(x).astype(mx.float32)

    def _products(self, x: mx.array) -> mx.array:
        logits = self._lm_head(mx.fast.rms_norm(x, self._norm, self._eps))
        return logits if self._scaling == 1 else logits / self._scaling
