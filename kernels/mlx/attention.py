"""The attention block: MLX's rope and attention over a cache of fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import mlx.core as mx
import numpy as np

from aegis.kernels.base import AttentionSpec, KVCache, KVSpec, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.linear import Linear, SideBySide, vector
from aegis.kernels.mlx.memory import MlxMemory
from aegis.kernels.mlx.sizes import ATTENTION_ROWS, capacity, kv_nbytes


class MlxKVCache:
    """keys and values [1, kv_heads, positions, head_dim], written in place."""

    def __init__(self, spec: KVSpec, traits: Traits) -> None:
        shape = (1, spec.num_key_value_heads, capacity(spec), spec.head_dim)
        self.nbytes, self._latent_dim = kv_nbytes(spec), spec.latent_dim
        self.keys = mx.zeros(shape, traits.dtype)
        self.values: mx.array | None = None
        if not spec.latent_dim:
            self.values = mx.zeros(shape, traits.dtype)
            mx.eval(self.values)
        mx.eval(self.keys)

    def append(self, keys: mx.array, values: mx.array | None, start: int) -> None:
        """Write positions start.. ; values where these are not a part of keys."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end] = keys
        if self.values is not None and values is not None:
            self.values[:, :, start:end] = values

    def until(self, end: int, begin: int = 0) -> tuple[mx.array, mx.array]:
        """Keys and values of the positions before ``end``, from ``begin`` on."""
        keys = self.keys[:, :, begin:end]
        if self.values is None:
            return keys, keys[..., : self._latent_dim]
        return keys, self.values[:, :, begin:end]


class Positions:
    """A token's position on the device: one array for all layers."""

    def __init__(self) -> None:
        self._start, self._array = -1, mx.array(-1, mx.int32)

    def at(self, start: int) -> mx.array:
        """The array that holds ``start``."""
        if self._start != start:
            self._start, self._array = start, mx.array(start, mx.int32)
        return self._array


class MlxAttention:
    """AttentionBlock on MLX: ``enter``, ``attend`` and ``leave``, of which the first and the last
    depend on no length, so that they can be compiled."""

    def __init__(
        self,
        memory: MlxMemory,
        traits: Traits,
        positions: Positions,
        spec: AttentionSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        self._spec = spec
        self._scale = float(spec.head_dim**-0.5 if spec.scale is None else spec.scale)
        self._positions = positions
        self._norm = vector(memory, traits, weights["norm"])
        biases = [weights[f"{name}_bias"] for name in "qkv" if f"{name}_bias" in weights]
        self._qkv = SideBySide(memory, traits, [weights[f"{n}_proj"] for n in "qkv"], biases)
        bias = vector(memory, traits, weights["o_bias"]) if "o_bias" in weights else None
        self._o = Linear(memory, traits, weights["o_proj"], bias)
        self._sinks = vector(memory, traits, weights["sinks"]) if "sinks" in weights else None
        self._qk_norms: list[mx.array] = []
        if spec.qk_norm != "none":
            self._qk_norms = [vector(memory, traits, weights[f"{name}_norm"]) for name in "qk"]
        if spec.qk_norm == "head":
            self._qk_norms = [_for_heads(spec, *self._qk_norms)]
        # MLX divides positions by these.
        self._periods = mx.array(1 / np.array(spec.inv_freq, np.float64), mx.float32)
        scales = np.ones(spec.head_dim, np.float32)
        scales[: 2 * len(spec.inv_freq)] = spec.rotary_scale
        self._turned = mx.array(scales).astype(traits.dtype)
        """What every channel is multiplied by when it has been rotated."""
        self._rows = None if traits.attention_is_fused(spec.head_dim) else ATTENTION_ROWS
        self._enter_one, self._leave_one = device.compiled(self._enter), device.compiled(self.leave)

    def __call__(self, x: mx.array, cache: KVCache, start: int) -> mx.array:
        """x [T, H] at positions start.. to x + attention, keys and values appended."""
        parts = self.attend(x, cache, start)
        return self._leave_one(x, *parts) if x.shape[0] == 1 else self.leave(x, *parts)

    def attend(self, x: mx.array, cache: KVCache, start: int) -> tuple[mx.array, ...]:
        """The same without what comes behind the heads: their outputs, and gates for these where
        the model has some, all [1, heads, T, head_dim]."""
        kv = cast(MlxKVCache, cache)
        enter = self._enter_one if x.shape[0] == 1 else self._enter
        q, k, v, *gates = enter(x, self._positions.at(start))
        kv.append(k, v, start)
        window = self._spec.window
        mixed = over_keys(q, kv, start, self._scale, self._rows, window, self._sinks)
        return mixed, *gates

    def _enter(self, x: mx.array, start: mx.array) -> tuple[mx.array, ...]:
        """x [T, H] to queries, keys and values [1, heads, T, head_dim], rotated; and gates."""
        spec, rows = self._spec, x.shape[0]
        out = self._qkv(mx.fast.rms_norm(x, self._norm, spec.rms_norm_eps))
        gates: list[mx.array] = []
        if spec.output_gate:
            out, gates = self._without_gates(out)
        if spec.qk_norm == "all":
            out = self._normed_projections(out)
        if rows == 1:
            heads = out.reshape(1, -1, 1, spec.head_dim)
        else:
            heads = out.reshape(1, rows, -1, spec.head_dim).swapaxes(1, 2)
        queries = spec.num_attention_heads
        values = queries + spec.num_key_value_heads
        turning = heads[:, :values]
        if spec.qk_norm == "head":
            turning = mx.fast.rms_norm(turning, None, spec.rms_norm_eps) * self._qk_norms[0]
        rotated = mx.fast.rope(
            turning,
            2 * len(spec.inv_freq),
            traditional=False,
            base=None,
            scale=1.0,
            offset=start,
            freqs=self._periods,
        )
        if spec.rotary_scale != 1:
            rotated = rotated * self._turned
        return rotated[:, :queries], rotated[:, queries:], heads[:, values:], *gates

    def _without_gates(self, out: mx.array) -> tuple[mx.array, list[mx.array]]:
        """The projections as if there were no gates, and these."""
        spec, rows = self._spec, out.shape[0]
        width = 2 * spec.num_attention_heads * spec.head_dim
        pairs = out[:, :width].reshape(rows, spec.num_attention_heads, 2, spec.head_dim)
        gates = pairs[:, :, 1].swapaxes(0, 1)[None]
        queries = pairs[:, :, 0].reshape(rows, -1)
        return mx.concatenate([queries, out[:, width:]], axis=-1), [gates]

    def _normed_projections(self, out: mx.array) -> mx.array:
        """Queries, keys and values [T, width], the first two normed over all of their heads."""
        spec = self._spec
        queries = spec.num_attention_heads * spec.head_dim
        values = queries + spec.num_key_value_heads * spec.head_dim
        q_norm, k_norm = self._qk_norms
        q = mx.fast.rms_norm(out[:, :queries], q_norm, spec.rms_norm_eps)
        k = mx.fast.rms_norm(out[:, queries:values], k_norm, spec.rms_norm_eps)
        return mx.concatenate([q, k, out[:, values:]], axis=-1)

    def leave(self, x: mx.array, mixed: mx.array, *gates: mx.array) -> mx.array:
        """x [T, H] plus what the heads' outputs become."""
        rows = x.shape[0]
        for gate in gates:
            mixed = mixed * mx.sigmoid(gate)
        out = self._o((mixed if rows == 1 else mixed.swapaxes(1, 2)).reshape(rows, -1))
        multiplier = self._spec.residual_multiplier
        return x + (out if multiplier == 1 else out * multiplier)


def over_keys(
    q: mx.array,
    kv: MlxKVCache,
    start: int,
    scale: float,
    step: int | None,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Queries [1, heads, T, head_dim] at positions start.. over the keys up to their own, ``step``
    of them at once (None: all). window: over so many keys, the last ones. sinks [heads]."""
    rows = q.shape[2]
    step = step or rows
    blocks = []
    for first in range(0, rows, step):
        block = q if rows <= step else q[:, :, first : first + step]
        count, end = block.shape[2], start + min(first + step, rows)
        # The window of the first query begins here.
        begin = max(end - count + 1 - window, 0) if window else 0
        keys, values = kv.until(end, begin)
        mask: mx.array | str | None = None
        if count > 1:
            mask = "causal"
            if window is not None and end - begin > window:
                mask = _in_window(count, end - begin, window)
        blocks.append(
            mx.fast.scaled_dot_product_attention(
                block, keys, values, scale=scale, mask=mask, sinks=sinks
            )
        )
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def _in_window(queries: int, keys: int, window: int) -> mx.array:
    """Which keys the last positions' queries see, bool [queries, keys]."""
    own = mx.arange(keys - queries, keys)[:, None]
    key = mx.arange(keys)[None]
    return (key <= own) & (key > own - window)


def _for_heads(spec: AttentionSpec, q_norm: mx.array, k_norm: mx.array) -> mx.array:
    """The norm weights of query and key heads, one behind the other [heads, 1, head_dim]."""
    counts = (spec.num_attention_heads, spec.num_key_value_heads)
    norms = [
        mx.broadcast_to(norm, (count, 1, spec.head_dim))
        for norm, count in zip((q_norm, k_norm), counts, strict=True)
    ]
    joined = mx.concatenate(norms)
    mx.eval(joined)
    return joined
