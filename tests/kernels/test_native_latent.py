"""Native latent attention: right, and never dependent on how it was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from attention_tools import (
    POOLS,
    chunkings,
    norm_rows,
    same_bits,
    values_of,
    vector,
    workspace,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from native_tools import aligned, fmt_of, isa, normal, random_weight

from aegis.kernels import formats
from aegis.kernels.base import KVSpec, LatentAttentionSpec, LatentSizes, Weight
from aegis.kernels.native import _native, sizes
from aegis.kernels.native.attention import NativeKVCache
from aegis.kernels.native.latent import NativeLatentAttention


@dataclass
class Latent:
    """One random layer: spec, weights, and how to run and check it."""

    hidden: int = 64
    heads: int = 4
    rank: int = 64
    rope: int = 32
    nope: int = 64
    value: int = 32
    low: int = 128
    context: int = 64
    bits: int = 4
    rotary_scale: float = 1.0
    seed: int = 0
    spec: LatentAttentionSpec = field(init=False)
    weights: dict[str, Weight] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        freqs = (1 / 10000 ** (np.arange(0, self.rope, 2) / self.rope)).astype(np.float32)
        sizes_ = LatentSizes(self.low, self.rank, self.nope, self.rope, self.value)
        self.spec = LatentAttentionSpec(
            self.hidden,
            self.heads,
            sizes_,
            1e-5,
            tuple(float(f) for f in freqs),
            0.1,
            self.rotary_scale,
        )
        queries = self.heads * sizes_.query_dim
        shapes = {"q_proj": (queries, self.hidden)}
        if self.low:
            shapes = {"q_a_proj": (self.low, self.hidden), "q_b_proj": (queries, self.low)}
        shapes |= {
            "kv_a_proj": (sizes_.key_dim, self.hidden),
            "embed_q": (self.heads * self.rank, self.nope),
            "unembed_out": (self.heads * self.value, self.rank),
            "o_proj": (self.hidden, self.heads * self.value),
        }
        self.weights = {n: random_weight(rng, s, fmt_of(self.bits)) for n, s in shapes.items()}
        norms = {"norm": self.hidden, "kv_a_norm": self.rank}
        norms |= {"q_a_norm": self.low} if self.low else {}
        self.weights |= {n: vector(1 + 0.1 * normal(rng, size)) for n, size in norms.items()}

    def block(self, pool: Any) -> NativeLatentAttention:
        """The native block with a workspace of its own."""
        space = workspace(
            max_tokens=self.context,
            context=self.context,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            head_dim=self.spec.sizes.key_dim,
            latent=self.spec.sizes,
        )
        return NativeLatentAttention(pool, space, self.spec, self.weights)

    def cache(self) -> NativeKVCache:
        """A cache whose unused positions are NaN."""
        spec = KVSpec(1, self.spec.sizes.key_dim, self.context, latent_dim=self.rank)
        buffer = aligned(sizes.kv_nbytes(spec))
        buffer.view(np.float32)[:] = np.nan
        return NativeKVCache(spec, buffer)

    def run(self, x: Any, pool: Any, chunks: list[int]) -> Any:
        """x [T, H] through the block in chunks of rows from position 0."""
        block, cache, parts, start = self.block(pool), self.cache(), [], 0
        for rows in chunks:
            parts.append(block(x[start : start + rows].copy(), cache, start))
            start += rows
        return np.concatenate(parts)

    def matrix(self, name: str) -> Any:
        return formats.dequantize(self.weights[name]).astype(np.float64)

    def oracle(self, x: Any) -> Any:
        """The block in float64, with the keys and values of every head."""
        count, own = len(x), self.spec.sizes
        normed = norm_rows(x, self.weights["norm"], 1e-5)
        if self.low:
            low = norm_rows(normed @ self.matrix("q_a_proj").T, self.weights["q_a_norm"], 1e-6)
            q = low @ self.matrix("q_b_proj").T
        else:
            q = normed @ self.matrix("q_proj").T
        q = q.reshape(count, self.heads, own.query_dim)
        kept = normed @ self.matrix("kv_a_proj").T
        latents = norm_rows(kept[:, : self.rank], self.weights["kv_a_norm"], 1e-6)
        to_key = self.matrix("embed_q").reshape(self.heads, self.rank, self.nope)
        keys = np.einsum("sr,hrn->shn", latents, to_key)
        values = np.einsum(
            "sr,hvr->shv", latents, self.matrix("unembed_out").reshape(self.heads, -1, self.rank)
        )
        turned = self.turned(kept[:, None, self.rank :])[:, 0]
        scores = np.einsum("thn,shn->hts", q[..., : self.nope], keys)
        scores += np.einsum("thr,sr->hts", self.turned(q[..., self.nope :]), turned)
        scores *= self.spec.scale
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hts,shv->thv", scores / scores.sum(axis=-1, keepdims=True), values)
        return x.astype(np.float64) + mixed.reshape(count, -1) @ self.matrix("o_proj").T

    def turned(self, heads: Any) -> Any:
        """Pairs of neighbours as complex numbers, from float32 angles as the definition has it."""
        positions = np.arange(len(heads), dtype=np.float32)[:, None]
        angle = (positions * np.array(self.spec.inv_freq, np.float32)).astype(np.float64)
        pairs = (heads[..., 0::2] + 1j * heads[..., 1::2]) * np.exp(1j * angle)[:, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1) * self.rotary_scale


def rows(layer: Latent, count: int | None = None) -> Any:
    return normal(np.random.default_rng(7), count or layer.context, layer.hidden)


SHAPES: list[dict[str, Any]] = [
    {},
    {"low": 0},
    {"rotary_scale": 1.3, "heads": 2},
    {"rank": 128, "rope": 16, "value": 64, "bits": 8},
    {"heads": 9, "rank": 192, "value": 64, "bits": 0},
    {"rank": 512, "rope": 64, "nope": 128, "value": 128, "heads": 3, "hidden": 128},
    {"context": 300, "heads": 20, "bits": 3, "value": 16},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(shape: dict[str, Any]) -> None:
    layer = Latent(**shape)
    x = rows(layer)
    exact = layer.oracle(x)
    single = 3 if layer.context > 256 else 1
    found = layer.run(x, POOLS[1], [layer.context - single, *([1] * single)])
    np.testing.assert_allclose(found, exact, atol=3e-5)
    assert np.abs(exact - x).max() > 0.02


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5], SHAPES[6]])
@given(cuts=st.lists(st.integers(1, 299), max_size=6), name=st.sampled_from(_native.isas()))
@settings(max_examples=6)
def test_chunks_threads_and_instruction_sets_never_change_a_bit(
    shape: dict[str, Any], cuts: list[int], name: str
) -> None:
    layer = Latent(**shape)
    x = rows(layer)
    whole = layer.run(x, POOLS[0], [layer.context])
    with isa(name):
        for pool in POOLS[1:]:
            assert same_bits(layer.run(x, pool, chunkings(layer.context, cuts)), whole)


def test_one_token_at_a_time_gives_the_bits_of_one_pass() -> None:
    layer = Latent(context=280)
    x = rows(layer)
    assert same_bits(layer.run(x, POOLS[1], [1] * 280), layer.run(x, POOLS[2], [280]))


def test_what_does_not_fit_is_refused() -> None:
    layer = Latent()
    block, cache = layer.block(POOLS[0]), layer.cache()
    with pytest.raises(ValueError, match="do not fit a context of"):
        block(rows(layer, 4), cache, 253)
    with pytest.raises(ValueError, match="other key/value heads"):
        block(rows(layer, 4), Latent(rank=128).cache(), 0)
    with pytest.raises(ValueError, match=r"kv_a_norm has shape \(128,\), expected \(64,\)"):
        NativeLatentAttention(
            POOLS[0],
            workspace(),
            layer.spec,
            layer.weights | {"kv_a_norm": layer.weights["q_a_norm"]},
        )


@pytest.mark.parametrize("name", ["q_a_proj", "q_b_proj", "kv_a_proj", "embed_q", "o_proj"])
def test_projections_that_do_not_fit_each_other_are_refused(name: str) -> None:
    layer, other = Latent(low=64), Latent(low=64, heads=3, rank=128, value=64, hidden=128)
    layer.weights[name] = other.weights[name]
    with pytest.raises(ValueError, match="latent attention of 4 heads do not fit"):
        layer.block(POOLS[0])


def test_the_norms_weights_are_those_of_the_layer() -> None:
    layer = Latent()
    x = rows(layer)
    before = layer.run(x, POOLS[0], [layer.context])
    for name in ("norm", "kv_a_norm", "q_a_norm"):
        changed = Latent()
        changed.weights[name] = vector(values_of(changed.weights[name])[::-1])
        assert not same_bits(changed.run(x, POOLS[0], [layer.context]), before), name
