"""The attention block and its cache: checks at open, then one call into C++ per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import AttentionSpec, KVCache, KVSpec, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.descs import linear_desc, vector_address
from aegis.kernels.native.sizes_attention import kv_nbytes, kv_positions
from aegis.kernels.native.workspace import Workspace

F32 = NDArray[np.float32]


class NativeKVCache:
    """One layer's float32 cache: keys [kv_head, position / 16, head_dim, 16], then values
    [kv_head, position, head_dim], or latents, which are kept a second time."""

    def __init__(self, spec: KVSpec, buffer: NDArray[np.uint8]) -> None:
        self.nbytes = kv_nbytes(spec)
        if buffer.nbytes < self.nbytes or not buffer.flags.c_contiguous:
            raise ValueError(
                f"a KV cache of {spec.context} positions needs {self.nbytes} contiguous bytes "
                f"but was given {buffer.nbytes}"
            )
        self._buffer = buffer
        self.native = _native.KVCache(
            buffer.ctypes.data,
            spec.num_key_value_heads,
            kv_positions(spec),
            spec.head_dim,
            spec.latent_dim or spec.head_dim,
        )


class NativeAttention:
    """AttentionBlock in C++. The residual stream is updated in place."""

    def __init__(
        self,
        pool: _native.Pool,
        workspace: Workspace,
        spec: AttentionSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        self._weights = dict(weights)
        _check_vectors(spec, weights)
        qk_norm = (0, 0)
        if spec.qk_norm != "none":
            qk_norm = vector_address(weights["q_norm"]), vector_address(weights["k_norm"])
        q, k, v, o = (linear_desc(weights[f"{n}_proj"], weights.get(f"{n}_bias")) for n in "qkvo")
        self._workspace = workspace
        self._block = _native.Attention(
            pool,
            hidden=spec.hidden_size,
            heads=spec.num_attention_heads,
            kv_heads=spec.num_key_value_heads,
            dim=spec.head_dim,
            max_tokens=workspace.spec.max_tokens,
            context=workspace.spec.context,
            eps=spec.rms_norm_eps,
            inv_freq=spec.inv_freq,
            norm=vector_address(weights["norm"]),
            q=q,
            k=k,
            v=v,
            o=o,
            scratch=workspace.scratch,
            scratch_nbytes=workspace.scratch_nbytes,
            q_norm=qk_norm[0],
            k_norm=qk_norm[1],
            norm_per_head=spec.qk_norm == "head",
            scale=spec.scale,
            residual=spec.residual_multiplier,
            output_gate=spec.output_gate,
            rotary_scale=spec.rotary_scale,
            window=spec.window or 0,
            sinks=vector_address(weights["sinks"]) if "sinks" in weights else 0,
        )

    def __call__(self, x: F32, cache: KVCache, start: int) -> F32:
        """x [T, H] at positions start.. is updated in place and returned."""
        self._block(x, cast(NativeKVCache, cache).native, start)
        return x


def _check_vectors(spec: AttentionSpec, weights: Mapping[str, Weight]) -> None:
    """Raise unless every norm has as many channels as what it is for, and every head a sink."""
    expected = {"norm": spec.hidden_size}
    if spec.qk_norm != "none":
        every = spec.qk_norm == "all"
        expected["q_norm"] = spec.head_dim * (spec.num_attention_heads if every else 1)
        expected["k_norm"] = spec.head_dim * (spec.num_key_value_heads if every else 1)
    if "sinks" in weights:
        expected["sinks"] = spec.num_attention_heads
    for name, channels in expected.items():
        if weights[name].shape != (channels,):
            raise ValueError(
                f"attention {name} has shape {weights[name].shape}, expected ({channels},)"
            )
