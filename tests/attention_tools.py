"""Small attention, router, embedding and head blocks of the native backend, and numpy oracles."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from native_tools import aligned, fmt_of, normal, random_weight

from aegis.kernels import formats
from aegis.kernels.base import AttentionSpec, Format, KVSpec, QKNorm, Weight, WorkspaceSpec
from aegis.kernels.native import _native, sizes
from aegis.kernels.native.attention import NativeAttention, NativeKVCache
from aegis.kernels.native.workspace import Workspace

VECTOR = Format("dense", "f32")


def vector(values: Any) -> Weight:
    """A stored float32 vector."""
    data = aligned(4 * len(values))
    data[:] = np.asarray(values, np.float32).view(np.uint8)
    return Weight((len(values),), VECTOR, "il16", data)


def values_of(weight: Weight) -> Any:
    """A stored vector as float64."""
    return weight.data.view(np.float32).astype(np.float64)


def workspace(**changes: Any) -> Workspace:
    """A workspace filled with NaN, small unless ``changes`` say otherwise."""
    base: dict[str, Any] = {
        "max_tokens": 64,
        "context": 64,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 0,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "vocab_size": 64,
        "max_logit_rows": 1,
        "threads": 2,
    }
    spec = WorkspaceSpec(**(base | changes))
    buffer = aligned(sizes.workspace_nbytes(spec))
    buffer.view(np.uint8)[:] = 0xFF
    return Workspace(spec, buffer)


def norm_rows(x: Any, weight: Weight, eps: float) -> Any:
    """RMS norm in float64."""
    x = x.astype(np.float64)
    return values_of(weight) * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


@dataclass
class Attention:
    """One random attention layer: spec, weights, and how to run and check it."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    rotary: int = 32
    context: int = 64
    max_tokens: int = 64
    bits: int = 4
    biases: bool = True
    seed: int = 0
    qk_norm: QKNorm = "none"
    scale: float | None = None
    residual: float = 1.0
    gate: bool = False
    rotary_scale: float = 1.0
    window: int | None = None
    sinks: bool = False
    """And a bias behind the heads."""
    spec: AttentionSpec = field(init=False)
    weights: dict[str, Weight] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        freqs = 1.0 / 10000.0 ** (np.arange(0, self.rotary, 2) / max(self.rotary, 1))
        inv_freq = tuple(float(f) for f in freqs.astype(np.float32))
        self.spec = AttentionSpec(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.dim,
            1e-6,
            inv_freq,
            self.qk_norm,
            self.scale,
            self.residual,
            self.gate,
            self.rotary_scale,
            self.window,
        )
        width = self.heads * self.dim
        out = {"q": width * (2 if self.gate else 1), "k": self.kv_heads * self.dim}
        out["v"] = out["k"]
        fmt = fmt_of(self.bits)
        self.weights = {"norm": vector(1 + 0.1 * normal(rng, self.hidden))}
        for name, rows in out.items():
            self.weights[f"{name}_proj"] = random_weight(rng, (rows, self.hidden), fmt)
            if self.biases:
                self.weights[f"{name}_bias"] = vector(normal(rng, rows))
        self.weights["o_proj"] = random_weight(rng, (self.hidden, width), fmt)
        for name in "qk" if self.qk_norm != "none" else "":
            channels = self.dim if self.qk_norm == "head" else min(out[name], width)
            self.weights[f"{name}_norm"] = vector(1 + 0.1 * normal(rng, channels))
        if self.sinks:
            self.weights["sinks"] = vector(1 + normal(rng, self.heads))
            self.weights["o_bias"] = vector(normal(rng, self.hidden))

    def block(self, pool: Any) -> NativeAttention:
        """The native block with a workspace of its own."""
        space = workspace(
            max_tokens=self.max_tokens,
            context=self.context,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.dim,
            output_gate=self.gate,
        )
        return NativeAttention(pool, space, self.spec, self.weights)

    def cache(self, fill: float = float("nan")) -> NativeKVCache:
        """A cache whose unused positions hold ``fill``."""
        spec = KVSpec(self.kv_heads, self.dim, self.context)
        buffer = aligned(sizes.kv_nbytes(spec))
        buffer.view(np.float32)[:] = fill
        return NativeKVCache(spec, buffer)

    def run(self, x: Any, pool: Any, chunks: list[int], fill: float = float("nan")) -> Any:
        """x [T, H] through the block in chunks of rows from position 0."""
        block, cache, parts, start = self.block(pool), self.cache(fill), [], 0
        for rows in chunks:
            parts.append(block(x[start : start + rows].copy(), cache, start))
            start += rows
        return np.concatenate(parts)

    def oracle(self, x: Any) -> Any:
        """The block in float64."""
        count = len(x)
        normed = norm_rows(x, self.weights["norm"], 1e-6)
        q = self._turned(self._project(normed, "q"))
        k, v = self._turned(self._project(normed, "k")), self._project(normed, "v")
        repeat = self.heads // self.kv_heads
        k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
        scale = self.dim**-0.5 if self.scale is None else self.scale
        scores = np.einsum("thd,shd->hts", q, k) * scale
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        if self.window:
            scores[:, np.tril(np.ones((count, count), bool), -self.window)] = -np.inf
        if self.sinks:
            sinks = np.repeat(values_of(self.weights["sinks"])[:, None, None], count, axis=1)
            scores = np.concatenate([scores, sinks], axis=-1)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = (scores / scores.sum(axis=-1, keepdims=True))[..., :count]
        mixed = np.einsum("hts,shd->thd", shares, v)
        if self.gate:
            mixed = mixed / (1 + np.exp(-self._gates(normed)))
        o_proj = formats.dequantize(self.weights["o_proj"]).astype(np.float64)
        out = mixed.reshape(count, -1) @ o_proj.T
        if "o_bias" in self.weights:
            out = out + values_of(self.weights["o_bias"])
        return x.astype(np.float64) + self.residual * out

    def _project(self, normed: Any, name: str) -> Any:
        out = normed @ formats.dequantize(self.weights[f"{name}_proj"]).astype(np.float64).T
        if self.biases:
            out = out + values_of(self.weights[f"{name}_bias"])
        if name == "q" and self.gate:
            out = out.reshape(len(normed), self.heads, 2, self.dim)[:, :, 0].reshape(
                len(normed), -1
            )
        norm = self.weights.get(f"{name}_norm")
        if norm is not None and self.qk_norm == "all":
            out = norm_rows(out, norm, 1e-6)
        out = out.reshape(len(normed), -1, self.dim)
        return out if norm is None or self.qk_norm == "all" else norm_rows(out, norm, 1e-6)

    def _gates(self, normed: Any) -> Any:
        """What heads' outputs are multiplied by the sigmoid of [T, heads, dim]."""
        out = normed @ formats.dequantize(self.weights["q_proj"]).astype(np.float64).T
        if self.biases:
            out = out + values_of(self.weights["q_bias"])
        return out.reshape(len(normed), self.heads, 2, self.dim)[:, :, 1]

    def _turned(self, heads: Any) -> Any:
        """Rotary positions, from float32 angles as the definition has them."""
        positions = np.arange(len(heads), dtype=np.float32)[:, None]
        angle = (positions * np.array(self.spec.inv_freq, np.float32)).astype(np.float64)
        cos, sin, half = np.cos(angle)[:, None], np.sin(angle)[:, None], len(self.spec.inv_freq)
        low, high = heads[..., :half], heads[..., half : 2 * half]
        parts = [low * cos - high * sin, high * cos + low * sin]
        parts = [*(self.rotary_scale * part for part in parts), heads[..., 2 * half :]]
        return np.concatenate(parts, axis=-1)


def same_bits(a: Any, b: Any) -> bool:
    """Equal as raw float32 words."""
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def chunkings(total: int, cuts: list[int]) -> list[int]:
    """Lengths of the pieces that ``cuts`` divide ``total`` rows into."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < total}), total]
    return [b - a for a, b in pairwise(edges)]


POOLS = [_native.Pool(threads) for threads in (1, 2, 4)]
