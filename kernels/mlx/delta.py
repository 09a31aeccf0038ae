"""The Gated DeltaNet block: MLX's operations around a recurrence over tokens in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import mlx.core as mx

from aegis.kernels.base import DeltaSpec, KVCache, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.delta_rule import recurrence
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.linear import Linear, SideBySide
from aegis.kernels.mlx.linear import vector as in_activations
from aegis.kernels.mlx.memory import MlxMemory
from aegis.kernels.mlx.sizes import recurrent_nbytes

_L2_EPS = 1e-6
State = tuple[mx.array, mx.array]
"""heads [value_heads, value_head_dim, key_head_dim] and the convolution's latest inputs
[conv_kernel_dim - 1, conv_dim], float32."""


class MlxRecurrentState:
    """States by how many tokens they have seen: the latest, and the one that it was made from, for
    a token that was computed ahead and is not wanted. Arrays never change, so a copy is free."""

    def __init__(self, spec: DeltaSpec) -> None:
        self._spec = spec
        self.nbytes = recurrent_nbytes(spec)
        self._states: dict[int, State] = {}
        self._kept: dict[int, State] = {}

    def at(self, position: int) -> State:
        """The state behind so many tokens."""
        if position == 0:
            spec = self._spec
            heads = (spec.num_value_heads, spec.value_head_dim, spec.key_head_dim)
            return mx.zeros(heads), mx.zeros((spec.conv_kernel_dim - 1, spec.conv_dim))
        if position not in self._states:
            raise ValueError(
                f"the recurrent state behind {position} tokens is gone; those there are have seen"
                f" {', '.join(map(str, self._states)) or 'none'}"
            )
        return self._states[position]

    def move(self, start: int, before: State, end: int, after: State) -> None:
        """``end`` tokens have been seen. What they began from may be asked for again if they are
        one token more."""
        self._states = {start: before} if end == start + 1 else {}
        self._states[end] = after

    def keep(self, position: int) -> None:
        """See RecurrentState."""
        self._kept = {position: self.at(position)}

    def restore(self) -> None:
        """See RecurrentState."""
        self._states = dict(self._kept)


class MlxDelta:
    """DeltaBlock on MLX: ``attend`` and ``leave``, as attention has them."""

    def __init__(
        self, memory: MlxMemory, traits: Traits, spec: DeltaSpec, weights: Mapping[str, Weight]
    ) -> None:
        self._spec, self._dtype = spec, traits.dtype
        self._norm = in_activations(memory, traits, weights["norm"])
        names = ("qkv", "z", "b", "a")
        self._inputs = SideBySide(memory, traits, [weights[f"in_proj_{name}"] for name in names])
        self._out = Linear(memory, traits, weights["out_proj"])
        names = ("A_log", "dt_bias", "out_norm", "conv")
        a_log, self._dt_bias, self._out_norm, taps = (
            memory.arrays(weights[name])[0] for name in names
        )
        self._rates = -mx.exp(a_log)
        self._taps = taps.reshape(spec.conv_kernel_dim, spec.conv_dim)
        mx.eval(self._rates, self._taps)
        self._recur = recurrence(traits, spec)
        self._enter_one = device.compiled(self._enter)
        self._leave_one = device.compiled(self.leave)

    def __call__(self, x: mx.array, cache: KVCache, start: int) -> mx.array:
        """x [T, H] at positions start.. to x + the block, the state moved on."""
        parts = self.attend(x, cache, start)
        return self._leave_one(x, *parts) if x.shape[0] == 1 else self.leave(x, *parts)

    def attend(self, x: mx.array, cache: KVCache, start: int) -> tuple[mx.array, mx.array]:
        """What heads read and the gates for it, both [T, value_heads, value_head_dim]."""
        state, rows = cast(MlxRecurrentState, cache), x.shape[0]
        before = state.at(start)
        enter = self._enter_one if rows == 1 else self._enter
        q, k, v, decay, beta, z, inputs = enter(x, before[1])
        read, heads = self._recur(q, k, v, decay, beta, before[0])
        if rows > 1:
            # Computed along, or the whole chunk's inputs would stay in memory until they are.
            inputs = mx.contiguous(inputs)
            read, heads = mx.depends([read, heads], [inputs])
        state.move(start, before, start + rows, (heads, inputs))
        return read, z

    def _enter(self, x: mx.array, latest: mx.array) -> tuple[mx.array, ...]:
        """x [T, H] and the latest inputs to queries, keys, values, decay, beta, gates and the
        inputs that are the latest then."""
        spec, rows = self._spec, x.shape[0]
        out = self._inputs(mx.fast.rms_norm(x, self._norm, spec.rms_norm_eps)).astype(mx.float32)
        ends = [spec.conv_dim, spec.conv_dim + spec.value_dim]
        qkv, z, gates = mx.split(out, ends, axis=1)
        seen = mx.concatenate([latest, qkv])
        mixed = self._taps[0] * seen[:rows]
        for tap in range(1, spec.conv_kernel_dim):
            mixed = mixed + self._taps[tap] * seen[tap : tap + rows]
        mixed = mixed * mx.sigmoid(mixed)
        q, k, v = mx.split(mixed, [spec.key_dim, 2 * spec.key_dim], axis=1)
        # The norm divides by the root of the mean; a sum is that many times as much.
        width = spec.key_head_dim
        q, k = (
            mx.fast.rms_norm(part.reshape(rows, -1, width), None, _L2_EPS / width)
            for part in (q, k)
        )
        beta, a = mx.split(gates, 2, axis=1)
        decay = mx.exp(self._rates * mx.logaddexp(a + self._dt_bias, mx.array(0.0)))
        values = (rows, spec.num_value_heads, spec.value_head_dim)
        return (
            q * (1 / width),
            k * width**-0.5,
            v.reshape(values),
            decay,
            mx.sigmoid(beta),
            z.reshape(values),
            seen[rows:],
        )

    def leave(self, x: mx.array, read: mx.array, z: mx.array) -> mx.array:
        """x [T, H] plus what becomes of what heads have read."""
        out = mx.fast.rms_norm(read, self._out_norm, self._spec.rms_norm_eps)
        out = (out * (z * mx.sigmoid(z))).reshape(x.shape[0], -1)
        return x + self._out(out.astype(self._dtype))
