"""The block of latent attention: one key per position for all heads, values its first channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import mlx.core as mx
import numpy as np

from aegis.kernels.base import KVCache, LatentAttentionSpec, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.attention import MlxKVCache, Positions, over_keys
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.linear import ByHead, Linear, SideBySide, vector
from aegis.kernels.mlx.memory import MlxMemory
from aegis.kernels.mlx.sizes import ATTENTION_ROWS


class MlxLatentAttention:
    """AttentionBlock on MLX, in the pieces that ``MlxAttention`` has."""

    def __init__(
        self,
        memory: MlxMemory,
        traits: Traits,
        positions: Positions,
        spec: LatentAttentionSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        self._spec, self._positions, heads = spec, positions, spec.num_attention_heads
        vectors = {n: vector(memory, traits, w) for n, w in weights.items() if n.endswith("norm")}
        self._norm, self._kv_norm = vectors["norm"], vectors["kv_a_norm"]
        self._q_norm = vectors.get("q_a_norm")
        first = weights["q_a_proj" if "q_a_proj" in weights else "q_proj"]
        self._q_width = first.shape[0]
        self._entering = SideBySide(memory, traits, [first, weights["kv_a_proj"]])
        self._q_b = Linear(memory, traits, weights["q_b_proj"]) if "q_b_proj" in weights else None
        self._embed = ByHead(memory, traits, weights["embed_q"], heads)
        self._unembed = ByHead(memory, traits, weights["unembed_out"], heads)
        self._o = Linear(memory, traits, weights["o_proj"])
        # MLX divides positions by these.
        self._periods = mx.array(1 / np.array(spec.inv_freq, np.float64), mx.float32)
        self._enter_one, self._leave_one = device.compiled(self._enter), device.compiled(self.leave)

    def __call__(self, x: mx.array, cache: KVCache, start: int) -> mx.array:
        """x [T, H] at positions start.. to x + attention, latents and keys appended."""
        (mixed,) = self.attend(x, cache, start)
        return self._leave_one(x, mixed) if x.shape[0] == 1 else self.leave(x, mixed)

    def attend(self, x: mx.array, cache: KVCache, start: int) -> tuple[mx.array]:
        """The latents that heads attended to: [1, heads, T, kv_lora_rank]."""
        kv = cast(MlxKVCache, cache)
        enter = self._enter_one if x.shape[0] == 1 else self._enter
        q, k = enter(x, self._positions.at(start))
        kv.append(k, None, start)
        return (over_keys(q, kv, start, self._spec.scale, ATTENTION_ROWS),)

    def _enter(self, x: mx.array, start: mx.array) -> tuple[mx.array, mx.array]:
        """x [T, H] to queries [1, heads, T, key_dim] and keys [1, 1, T, key_dim]."""
        spec, sizes, rows = self._spec, self._spec.sizes, x.shape[0]
        out = self._entering(mx.fast.rms_norm(x, self._norm, spec.rms_norm_eps))
        q, kept = out[:, : self._q_width], out[:, self._q_width :]
        if self._q_b is not None:
            q = self._q_b(mx.fast.rms_norm(q, self._q_norm, spec.lora_norm_eps))
        heads = q.reshape(rows, spec.num_attention_heads, -1).swapaxes(0, 1)
        rank, nope = sizes.kv_lora_rank, sizes.qk_nope_head_dim
        latents = mx.fast.rms_norm(kept[:, :rank], self._kv_norm, spec.lora_norm_eps)
        turned = self._turned(mx.concatenate([heads[..., nope:], kept[None, :, rank:]]), start)
        queries = mx.concatenate([self._embed(heads[..., :nope]), turned[:-1]], axis=-1)
        keys = mx.concatenate([latents[None], turned[-1:]], axis=-1)
        return queries[None], keys[None]

    def _turned(self, x: mx.array, start: mx.array) -> mx.array:
        """Rotated heads [heads, T, qk_rope_head_dim]."""
        rotated = mx.fast.rope(
            x[None],
            x.shape[-1],
            traditional=True,
            base=None,
            scale=1.0,
            offset=start,
            freqs=self._periods,
        )[0]
        return rotated if self._spec.rotary_scale == 1 else rotated * self._spec.rotary_scale

    def leave(self, x: mx.array, mixed: mx.array) -> mx.array:
        """x [T, H] plus what the latents that heads attended to become."""
        out = self._unembed(mixed[0]).swapaxes(0, 1)
        return x + self._o(out.reshape(x.shape[0], -1))
