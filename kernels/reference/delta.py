"""Gated DeltaNet in plain numpy: one token at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from aegis.kernels.reference.linear import F32, linear, rms_norm, sigmoid, silu, widen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from aegis.kernels.base import DeltaSpec, KVCache, Weight

_L2_EPS = F32(1e-6)
_INPUTS = ("qkv", "z", "a", "b")


class ReferenceRecurrentState:
    """heads [value_heads, key_head_dim, value_head_dim] and inputs [conv_kernel_dim - 1, conv_dim],
    float32 over a caller's buffer, with a copy of both behind them."""

    def __init__(self, spec: DeltaSpec, buffer: NDArray[np.uint8]) -> None:
        count = spec.state_numbers
        self.nbytes = 2 * 4 * count
        self._now, self._kept = buffer[: self.nbytes].view(F32).reshape(2, count)
        shape = (spec.num_value_heads, spec.key_head_dim, spec.value_head_dim)
        self.heads = self._now[: int(np.prod(shape))].reshape(shape)
        self.inputs = self._now[self.heads.size :].reshape(spec.conv_kernel_dim - 1, spec.conv_dim)

    def clear(self) -> None:
        """Become the state ahead of the first token."""
        self._now[:] = 0

    def keep(self, position: int) -> None:
        """See RecurrentState."""
        del position  # there is one state only
        self._kept[:] = self._now

    def restore(self) -> None:
        """See RecurrentState."""
        self._now[:] = self._kept


class ReferenceDelta:
    """DeltaBlock in numpy."""

    def __init__(self, spec: DeltaSpec, weights: Mapping[str, Weight]) -> None:
        self._spec = spec
        self._weights = {name: widen(weight) for name, weight in weights.items()}
        self._taps = self._weights["conv"].reshape(spec.conv_kernel_dim, spec.conv_dim)

    def __call__(self, x: NDArray[np.float32], cache: KVCache, start: int) -> NDArray[np.float32]:
        """x [T, H] at positions start.. to x + the block, the state moved on by T tokens."""
        spec, state = self._spec, cast(ReferenceRecurrentState, cache)
        if start == 0:
            state.clear()
        positions, weights = np.arange(start, start + len(x)), self._weights
        normed = rms_norm(x, weights["norm"], spec.rms_norm_eps)
        qkv, z, a, b = (linear(normed, positions, weights[f"in_proj_{n}"]) for n in _INPUTS)
        q, k, v = self._heads(self._convolved(qkv, state))
        decay = np.exp(-np.exp(weights["A_log"]) * np.logaddexp(F32(0), a + weights["dt_bias"]))
        out = self._recur(state, q, k, v, decay, sigmoid(b))
        out = rms_norm(out, weights["out_norm"], spec.rms_norm_eps) * silu(z.reshape(out.shape))
        return x + linear(out.reshape(len(x), -1), positions, weights["out_proj"])

    def _convolved(
        self, qkv: NDArray[np.float32], state: ReferenceRecurrentState
    ) -> NDArray[np.float32]:
        """silu of the causal convolution [T, conv_dim]; the latest inputs go into the state."""
        seen = np.concatenate([state.inputs, qkv])
        state.inputs[:] = seen[len(qkv) :]
        windows = (tap * seen[i : i + len(qkv)] for i, tap in enumerate(self._taps))
        return silu(np.asarray(sum(windows), F32))

    def _heads(self, mixed: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        """Queries and keys of unit length, queries scaled, by value head; and values."""
        spec = self._spec
        parts = np.split(mixed, [spec.key_dim, 2 * spec.key_dim], axis=1)
        q, k = (
            part.reshape(len(mixed), spec.num_key_heads, spec.key_head_dim) for part in parts[:2]
        )
        q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + _L2_EPS) for part in (q, k))
        shared = spec.num_value_heads // spec.num_key_heads
        q, k = (np.repeat(part, shared, axis=1) for part in (q * F32(spec.key_head_dim**-0.5), k))
        return q, k, parts[2].reshape(len(mixed), spec.num_value_heads, spec.value_head_dim)

    def _recur(
        self,
        state: ReferenceRecurrentState,
        q: NDArray[np.float32],
        k: NDArray[np.float32],
        v: NDArray[np.float32],
        decay: NDArray[np.float32],
        beta: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """What every token reads [T, value_heads, value_head_dim]."""
        heads, out = state.heads, np.empty_like(v)
        for t in range(len(v)):
            heads *= decay[t][:, None, None]
            known = (heads * k[t][:, :, None]).sum(axis=1)
            heads += k[t][:, :, None] * ((v[t] - known) * beta[t][:, None])[:, None, :]
            out[t] = (heads * q[t][:, :, None]).sum(axis=1)
        return out
