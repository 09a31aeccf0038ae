"""The attention block: MLX's rope and attention over a cache of fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import mlx.core as mx
import numpy as np

from aegis.kernels.base import AttentionSpec, KVCache, KVSpec, Weight
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.linear import Linear, vector
from aegis.kernels.mlx.memory import MlxMemory
from aegis.kernels.mlx.sizes import ATTENTION_ROWS, capacity, kv_nbytes


class MlxKVCache:
    """keys and values [1, kv_heads, positions, head_dim], written in place."""

    def __init__(self, spec: KVSpec, traits: Traits) -> None:
        shape = (1, spec.num_key_value_heads, capacity(spec), spec.head_dim)
        self.nbytes = kv_nbytes(spec)
        self.keys, self.values = mx.zeros(shape, traits.dtype), mx.zeros(shape, traits.dtype)
        mx.eval(self.keys, self.values)

    def append(self, keys: mx.array, values: mx.array, start: int) -> None:
        """Write positions start.. ."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values


class MlxAttention:
    """AttentionBlock on MLX."""

    def __init__(
        self,
        memory: MlxMemory,
        traits: Traits,
        spec: AttentionSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        self._spec, self._scale = spec, float(spec.head_dim**-0.5)
        self._norm = vector(memory, traits, weights["norm"])
        self._q, self._k, self._v = (
            Linear(memory, traits, weights[f"{name}_proj"], weights.get(f"{name}_bias"))
            for name in ("q", "k", "v")
        )
        self._o = Linear(memory, traits, weights["o_proj"])
        # MLX divides positions by these.
        self._periods = mx.array(1 / np.array(spec.inv_freq, np.float64), mx.float32)
        self._rows = None if traits.attention_is_fused(spec.head_dim) else ATTENTION_ROWS
        self._project_one = mx.compile(self._project)
        self._leave_one = mx.compile(self._leave)

    def __call__(self, x: mx.array, cache: KVCache, start: int) -> mx.array:
        """x [T, H] at positions start.. to x + attention, keys and values appended."""
        kv, one = cast(MlxKVCache, cache), x.shape[0] == 1
        q, k, v = self._project_one(x) if one else self._project(x)
        kv.append(self._rotate(k, start), v, start)
        mixed = self._attend(self._rotate(q, start), kv, start)
        return self._leave_one(x, mixed) if one else self._leave(x, mixed)

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """x [T, H] to queries, keys and values [1, heads, T, head_dim]."""
        spec = self._spec
        normed = mx.fast.rms_norm(x, self._norm, spec.rms_norm_eps)
        kv_heads = spec.num_key_value_heads
        return (
            self._heads(self._q(normed), spec.num_attention_heads),
            self._heads(self._k(normed), kv_heads),
            self._heads(self._v(normed), kv_heads),
        )

    def _heads(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(1, -1, heads, self._spec.head_dim).swapaxes(1, 2)

    def _rotate(self, x: mx.array, start: int) -> mx.array:
        return mx.fast.rope(
            x,
            2 * len(self._spec.inv_freq),
            traditional=False,
            base=None,
            scale=1.0,
            offset=start,
            freqs=self._periods,
        )

    def _attend(self, q: mx.array, kv: MlxKVCache, start: int) -> mx.array:
        """Queries [1, heads, T, head_dim] at positions start.. over all keys up to their own."""
        rows = q.shape[2]
        step = self._rows or rows
        blocks = []
        for first in range(0, rows, step):
            block = q[:, :, first : first + step]
            end = start + min(first + step, rows)
            blocks.append(
                mx.fast.scaled_dot_product_attention(
                    block,
                    kv.keys[:, :, :end],
                    kv.values[:, :, :end],
                    scale=self._scale,
                    mask="causal" if block.shape[2] > 1 else None,
                )
            )
        return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)

    def _leave(self, x: mx.array, mixed: mx.array) -> mx.array:
        return x + self._o(mixed.swapaxes(1, 2).reshape(x.shape[0], -1))
