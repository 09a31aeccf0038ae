"""Multi-head latent attention in plain numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from aegis.kernels.reference.attention import ReferenceKVCache, attend, rotary
from aegis.kernels.reference.linear import F32, linear, rms_norm, widen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from aegis.kernels.base import KVCache, LatentAttentionSpec, Weight


def neighbours(
    x: NDArray[np.float32], positions: NDArray[np.int64], inv_freq: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rotate the pairs (2i, 2i + 1), which come out as (i, i + n). x: [T, heads, 2n]."""
    return rotary(np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), positions, inv_freq)


class ReferenceLatentAttention:
    """AttentionBlock of latent attention in numpy."""

    def __init__(self, spec: LatentAttentionSpec, weights: Mapping[str, Weight]) -> None:
        self._spec = spec
        self._weights = {name: widen(weight) for name, weight in weights.items()}
        self._inv_freq = np.array(spec.inv_freq, F32)

    def __call__(self, x: NDArray[np.float32], cache: KVCache, start: int) -> NDArray[np.float32]:
        """x [T, H] at positions start.. to x + attention, latents and keys appended."""
        spec, kv = self._spec, cast(ReferenceKVCache, cache)
        positions = np.arange(start, start + len(x))
        normed = rms_norm(x, self._weights["norm"], spec.rms_norm_eps)
        q = self._queries(normed, positions)
        kv.keys[0, positions] = self._keys(normed, positions)
        mixed = attend(q, kv, positions, F32(spec.scale))
        out = self._by_head(mixed, positions, "unembed_out").reshape(len(x), -1)
        return x + linear(out, positions, self._weights["o_proj"])

    def _queries(
        self, normed: NDArray[np.float32], positions: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Queries over the latents, then their rotated part: [T, heads, key_dim]."""
        spec, weights, nope = self._spec, self._weights, self._spec.sizes.qk_nope_head_dim
        if "q_proj" in weights:
            q = linear(normed, positions, weights["q_proj"])
        else:
            low = linear(normed, positions, weights["q_a_proj"])
            low = rms_norm(low, weights["q_a_norm"], spec.lora_norm_eps)
            q = linear(low, positions, weights["q_b_proj"])
        q = q.reshape(len(normed), spec.num_attention_heads, -1)
        return np.concatenate(
            [
                self._by_head(q[..., :nope], positions, "embed_q"),
                self._turned(q[..., nope:], positions),
            ],
            axis=-1,
        )

    def _keys(
        self, normed: NDArray[np.float32], positions: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Latents, then the rotated part of keys: [T, key_dim]."""
        spec, weights, rank = self._spec, self._weights, self._spec.sizes.kv_lora_rank
        kept = linear(normed, positions, weights["kv_a_proj"])
        latents = rms_norm(kept[:, :rank], weights["kv_a_norm"], spec.lora_norm_eps)
        turned = self._turned(kept[:, None, rank:], positions)
        return np.concatenate([latents, turned[:, 0]], axis=-1)

    def _turned(self, x: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        return neighbours(x, positions, self._inv_freq) * F32(self._spec.rotary_scale)

    def _by_head(
        self, x: NDArray[np.float32], positions: NDArray[np.int64], name: str
    ) -> NDArray[np.float32]:
        """Each head [T, heads, in] through a matrix of its own."""
        matrices = self._weights[name].reshape(x.shape[1], -1, x.shape[2])
        products = [linear(x[:, n], positions, matrix) for n, matrix in enumerate(matrices)]
        return np.stack(products, axis=1)
