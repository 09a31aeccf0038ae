"""The MLP of layers without experts."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from aegis.kernels.base import MlpSpec, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.linear import Linear, SideBySide, halves, swiglu, vector
from aegis.kernels.mlx.memory import MlxMemory


class MlxMlp:
    """MlpBlock on MLX."""

    def __init__(
        self, memory: MlxMemory, traits: Traits, spec: MlpSpec, weights: Mapping[str, Weight]
    ) -> None:
        self._spec = spec
        self._norm = vector(memory, traits, weights["norm"])
        self._entering = SideBySide(memory, traits, [weights["gate_proj"], weights["up_proj"]])
        self._down = Linear(memory, traits, weights["down_proj"])
        self._one = device.compiled(self._compute)

    def __call__(self, x: mx.array) -> mx.array:
        """x [T, H] after attention to x + mlp."""
        return self._one(x) if x.shape[0] == 1 else self._compute(x)

    def _compute(self, x: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(x, self._norm, self._spec.rms_norm_eps)
        out = self._down(swiglu(*halves(self._entering(normed))))
        multiplier = self._spec.residual_multiplier
        return x + (out if multiplier == 1 else out * multiplier)
