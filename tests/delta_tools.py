"""Small Gated DeltaNet blocks of the native backend, and the same in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from attention_tools import norm_rows, values_of, vector, workspace
from native_tools import aligned, fmt_of, normal, random_weight

from aegis.kernels import formats
from aegis.kernels.base import DeltaSpec, Weight
from aegis.kernels.native import sizes
from aegis.kernels.native.delta import NativeDelta, NativeRecurrentState


@dataclass
class Delta:
    """One random layer: spec, weights, and how to run and check it."""

    hidden: int = 64
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    taps: int = 4
    max_tokens: int = 64
    bits: int = 4
    seed: int = 0
    spec: DeltaSpec = field(init=False)
    weights: dict[str, Weight] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        spec = DeltaSpec(
            self.hidden,
            self.key_heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
            self.taps,
            1e-6,
        )
        self.spec, fmt = spec, fmt_of(self.bits)
        rows = {"qkv": spec.conv_dim, "z": spec.value_dim, "a": self.value_heads}
        rows["b"] = self.value_heads
        self.weights = {
            f"in_proj_{name}": random_weight(rng, (count, self.hidden), fmt)
            for name, count in rows.items()
        }
        self.weights |= {
            "norm": vector(1 + 0.1 * normal(rng, self.hidden)),
            "conv": vector(0.5 + 0.3 * normal(rng, self.taps * spec.conv_dim)),
            "A_log": vector(-2 + normal(rng, self.value_heads)),
            "dt_bias": vector(normal(rng, self.value_heads)),
            "out_norm": vector(1 + 0.1 * normal(rng, self.value_dim)),
            "out_proj": random_weight(rng, (self.hidden, spec.value_dim), fmt),
        }

    def block(self, pool: Any) -> NativeDelta:
        """The native block with a workspace of its own."""
        space = workspace(max_tokens=self.max_tokens, hidden_size=self.hidden, delta=self.spec)
        return NativeDelta(pool, space, self.spec, self.weights)

    def state(self) -> NativeRecurrentState:
        """A state of garbage."""
        buffer = aligned(sizes.recurrent_nbytes(self.spec))
        buffer[:] = 0xFF
        return NativeRecurrentState(self.spec, buffer)

    def run(self, x: Any, pool: Any, chunks: list[int]) -> Any:
        """x [T, H] through the block in chunks of rows from position 0."""
        block, state, parts, start = self.block(pool), self.state(), [], 0
        for rows in chunks:
            parts.append(block(x[start : start + rows].copy(), state, start))
            start += rows
        return np.concatenate(parts)

    def oracle(self, x: Any) -> Any:
        """The block in float64, as its definition has it."""
        spec, count = self.spec, len(x)
        normed = norm_rows(x, self.weights["norm"], 1e-6)
        qkv, z, a, b = (self._product(normed, f"in_proj_{name}") for name in ("qkv", "z", "a", "b"))
        padded = np.concatenate([np.zeros((self.taps - 1, spec.conv_dim)), qkv])
        taps = values_of(self.weights["conv"]).reshape(self.taps, spec.conv_dim)
        mixed = sum(taps[i] * padded[i : i + count] for i in range(self.taps))
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = np.split(mixed, [spec.key_dim, 2 * spec.key_dim], axis=1)
        q, k = (self._of_unit_length(part) for part in (q, k))
        v = v.reshape(count, self.value_heads, self.value_dim)
        rate = np.exp(values_of(self.weights["A_log"]))
        decay = np.exp(-rate * np.logaddexp(0, a + values_of(self.weights["dt_bias"])))
        beta = 1 / (1 + np.exp(-b))
        read = np.empty_like(v)
        for head in range(self.value_heads):
            key_head = head * self.key_heads // self.value_heads
            state = np.zeros((self.key_dim, self.value_dim))
            for t in range(count):
                key, query = k[t, key_head], q[t, key_head] * self.key_dim**-0.5
                state *= decay[t, head]
                state += np.outer(key, beta[t, head] * (v[t, head] - key @ state))
                read[t, head] = query @ state
        out = norm_rows(read, self.weights["out_norm"], 1e-6)
        z = z.reshape(out.shape)
        out = out * z / (1 + np.exp(-z))
        return x.astype(np.float64) + self._product(out.reshape(count, -1), "out_proj")

    def _product(self, x: Any, name: str) -> Any:
        return x @ formats.dequantize(self.weights[name]).astype(np.float64).T

    def _of_unit_length(self, part: Any) -> Any:
        heads = part.reshape(len(part), self.key_heads, self.key_dim)
        return heads / np.sqrt((heads * heads).sum(-1, keepdims=True) + 1e-6)
