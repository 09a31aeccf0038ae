"""Softmax attention in plain numpy: one query row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from aegis.kernels.reference.linear import F32, linear, rms_norm, sigmoid, widen
from aegis.kernels.reference.sizes import kv_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from aegis.kernels.base import AttentionSpec, KVCache, KVSpec, Weight


class ReferenceKVCache:
    """keys and values [kv_heads, context, head_dim] float32 over a caller's buffer."""

    def __init__(self, spec: KVSpec, buffer: NDArray[np.uint8]) -> None:
        self.nbytes = kv_nbytes(spec)
        shape = (-1, spec.num_key_value_heads, spec.context, spec.head_dim)
        kept = buffer[: self.nbytes].view(F32).reshape(shape)
        self.keys = kept[0]
        self.values = self.keys[..., : spec.latent_dim] if spec.latent_dim else kept[1]


def rotary(
    x: NDArray[np.float32], positions: NDArray[np.int64], inv_freq: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rotate the pairs (i, i + n) of the first 2n channels. x: [T, heads, head_dim]."""
    angle = (positions.astype(F32)[:, None] * inv_freq)[:, None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    n = len(inv_freq)
    low, high = x[..., :n], x[..., n : 2 * n]
    turned = [low * cos - high * sin, high * cos + low * sin, x[..., 2 * n :]]
    return np.concatenate(turned, axis=-1).astype(F32, copy=False)


def attend(
    q: NDArray[np.float32],
    kv: ReferenceKVCache,
    positions: NDArray[np.int64],
    scale: np.float32,
    window: int | None = None,
    sinks: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Queries [T, heads, head_dim] over the positions up to their own, to [T, heads, value_dim].

    window: over so many of them, the last ones. sinks [heads]: a score more in every softmax.
    """
    kv_heads = len(kv.keys)
    out = np.empty((*q.shape[:2], kv.values.shape[-1]), F32)
    for row, position in enumerate(positions):
        seen = slice(max(position + 1 - window, 0) if window else 0, position + 1)
        keys, values = kv.keys[:, seen], kv.values[:, seen]
        grouped = q[row].reshape(kv_heads, -1, q.shape[-1])
        scores = grouped @ keys.transpose(0, 2, 1) * scale
        if sinks is not None:
            scores = np.concatenate([scores, sinks.reshape(kv_heads, -1, 1)], axis=-1)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = scores / scores.sum(axis=-1, keepdims=True)
        mixed = shares[..., : values.shape[1]] @ values
        out[row] = mixed.reshape(out[row].shape)
    return out


class ReferenceAttention:
    """AttentionBlock in numpy."""

    def __init__(self, spec: AttentionSpec, weights: Mapping[str, Weight]) -> None:
        self._spec = spec
        self._weights = {name: widen(weight) for name, weight in weights.items()}
        self._inv_freq = np.array(spec.inv_freq, F32)

    def _project(
        self, normed: NDArray[np.float32], positions: NDArray[np.int64], name: str, heads: int
    ) -> NDArray[np.float32]:
        """Heads [T, heads, head_dim], a query's gate behind it; queries and keys normed, where the
        model does that."""
        spec, norm = self._spec, self._weights.get(f"{name}_norm")
        bias = self._weights.get(f"{name}_bias")
        out = linear(normed, positions, self._weights[f"{name}_proj"], bias)
        if norm is not None and spec.qk_norm == "all":
            out = rms_norm(out, norm, spec.rms_norm_eps)
        out = out.reshape(len(normed), heads, -1)
        if norm is not None and spec.qk_norm == "head":
            out[..., : spec.head_dim] = rms_norm(out[..., : spec.head_dim], norm, spec.rms_norm_eps)
        return out

    def __call__(self, x: NDArray[np.float32], cache: KVCache, start: int) -> NDArray[np.float32]:
        """x [T, H] at positions start.. to x + attention, keys and values appended."""
        spec, kv = self._spec, cast(ReferenceKVCache, cache)
        positions = np.arange(start, start + len(x))
        normed = rms_norm(x, self._weights["norm"], spec.rms_norm_eps)
        q = self._project(normed, positions, "q", spec.num_attention_heads)
        k = self._project(normed, positions, "k", spec.num_key_value_heads)
        v = self._project(normed, positions, "v", spec.num_key_value_heads)
        q, gate = q[..., : spec.head_dim], q[..., spec.head_dim :]
        q = self._turned(q, positions)
        kv.keys[:, positions] = self._turned(k, positions).transpose(1, 0, 2)
        kv.values[:, positions] = v.transpose(1, 0, 2)
        scale = F32(spec.head_dim**-0.5 if spec.scale is None else spec.scale)
        sinks = self._weights.get("sinks")
        mixed = attend(q, kv, positions, scale, spec.window, sinks).reshape(len(x), -1)
        if spec.output_gate:
            mixed = mixed * sigmoid(gate.reshape(mixed.shape))
        out = linear(mixed, positions, self._weights["o_proj"], self._weights.get("o_bias"))
        return x + F32(spec.residual_multiplier) * out

    def _turned(self, x: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Heads [T, heads, head_dim] rotated."""
        turned = rotary(x, positions, self._inv_freq)
        turned[..., : 2 * len(self._inv_freq)] *= F32(self._spec.rotary_scale)
        return turned
