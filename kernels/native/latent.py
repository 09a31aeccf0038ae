"""The block of latent attention: checks at open, then one call into C++ per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import KVCache, LatentAttentionSpec, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.attention import NativeKVCache
from aegis.kernels.native.descs import linear_desc, vector_address
from aegis.kernels.native.workspace import Workspace

F32 = NDArray[np.float32]


class NativeLatentAttention:
    """AttentionBlock in C++. The residual stream is updated in place."""

    def __init__(
        self,
        pool: _native.Pool,
        workspace: Workspace,
        spec: LatentAttentionSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        _check_norms(spec, weights)
        self._weights, self._workspace = dict(weights), workspace
        sizes, given = spec.sizes, workspace.spec
        low = "q_a_proj" in weights
        names = ["q_a_proj", "q_b_proj"] if low else ["q_proj", "q_proj"]
        names += ["kv_a_proj", "embed_q", "unembed_out", "o_proj"]
        norms = [vector_address(weights[name]) for name in ("norm", "kv_a_norm")]
        norms.append(vector_address(weights["q_a_norm"]) if low else 0)
        self._block = _native.LatentAttention(
            pool,
            shape=(
                spec.hidden_size,
                spec.num_attention_heads,
                sizes.kv_lora_rank,
                sizes.qk_nope_head_dim,
                sizes.qk_rope_head_dim,
                sizes.v_head_dim,
                given.max_tokens,
                given.context,
            ),
            eps=spec.rms_norm_eps,
            lora_eps=spec.lora_norm_eps,
            inv_freq=spec.inv_freq,
            scale=spec.scale,
            rotary_scale=spec.rotary_scale,
            norms=norms,
            linears=[linear_desc(weights[name]) for name in names],
            scratch=workspace.scratch,
            scratch_nbytes=workspace.scratch_nbytes,
        )

    def __call__(self, x: F32, cache: KVCache, start: int) -> F32:
        """x [T, H] at positions start.. is updated in place and returned."""
        self._block(x, cast(NativeKVCache, cache).native, start)
        return x


def _check_norms(spec: LatentAttentionSpec, weights: Mapping[str, Weight]) -> None:
    """Raise unless every norm has as many channels as what it is for."""
    expected = {"norm": spec.hidden_size, "kv_a_norm": spec.sizes.kv_lora_rank}
    if "q_a_proj" in weights:
        expected["q_a_norm"] = weights["q_a_proj"].shape[0]
    for name, channels in expected.items():
        if weights[name].shape != (channels,):
            raise ValueError(
                f"attention {name} has shape {weights[name].shape}, expected ({channels},)"
            )
