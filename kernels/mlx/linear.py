"""Products with resident weights, and the small functions that blocks share."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from aegis.kernels.base import Weight
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.memory import Arrays, MlxMemory


class Linear:
    """x [T, in] to x @ weight.T (+ bias), in the numbers of x."""

    def __init__(
        self, memory: MlxMemory, traits: Traits, weight: Weight, bias: Weight | None = None
    ) -> None:
        self._dtype, self._multiple = traits.dtype, traits.row_multiple
        self._format = weight.format
        self._arrays = in_numbers(memory.arrays(weight), weight, traits)
        self._bias = None if bias is None else vector(memory, traits, bias)

    def __call__(self, x: mx.array) -> mx.array:
        """The product; weights of wider numbers than x's are computed with in theirs."""
        rows = x.shape[0]
        if rows > 1 and rows % self._multiple:
            padded = mx.pad(x, [(0, -rows % self._multiple), (0, 0)])
            return self._product(padded)[:rows]
        return self._product(x)

    def _product(self, x: mx.array) -> mx.array:
        if self._format.kind == "dense":
            out = x @ self._arrays[0].T
        else:
            codes, scales, biases = self._arrays
            out = mx.quantized_matmul(
                x,
                codes,
                scales,
                biases,
                transpose=True,
                group_size=self._format.group_size,
                bits=self._format.bits,
            )
        if out.dtype != self._dtype:
            out = out.astype(self._dtype)
        return out if self._bias is None else out + self._bias


def in_numbers(arrays: Arrays, weight: Weight, traits: Traits) -> Arrays:
    """Scales and biases widened once where activations are float32: MLX would do it every call."""
    if weight.format.kind == "dense" or traits.numbers != "f32":
        return arrays
    widened = (arrays[0], *(array.astype(mx.float32) for array in arrays[1:]))
    mx.eval(widened)
    return widened


def vector(memory: MlxMemory, traits: Traits, weight: Weight) -> mx.array:
    """A norm or a bias in the numbers of activations, which it had before it was stored."""
    array = memory.arrays(weight)[0].astype(traits.dtype)
    mx.eval(array)
    return array


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up."""
    return gate * mx.sigmoid(gate) * up


@partial(mx.compile, shapeless=True)
def gated_sum(x: mx.array, routed: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    """x + (routed + sigmoid(gate) * shared)."""
    return x + (routed + mx.sigmoid(gate) * shared)
