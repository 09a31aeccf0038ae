"""Scratch bytes of the native blocks but experts (standard library only, for planning).

The C++ blocks carve the same pieces in the same order and refuse a scratch that is too small.
"""

from __future__ import annotations

from aegis.kernels.base import DeltaSpec, KVSpec, LatentSizes, WorkspaceSpec
from aegis.kernels.sizes import align_up

ROW_TILE = 128
"""Rows that pass through a block's phases together; it bounds scratch, not results."""

POSITION_BLOCK = 256
"""Positions of one softmax block, on a grid from position 0: part of the canonical arithmetic."""

KV_ALIGN = 16
"""Positions of one key vector; a cache holds a multiple of these."""

_LINE = 16
_F32 = 4


def _pieces(*floats: int) -> int:
    """Bytes of pieces of so many floats, each rounded up to a cache line."""
    return sum(-(-count // _LINE) * _LINE for count in floats) * _F32


def _padded(row: int) -> int:
    """Length of a scratch row: 16 more, so that rows do not fall into the same cache sets."""
    return row + _LINE


def kv_positions(spec: KVSpec) -> int:
    """Positions that one layer's cache has room for: the context, rounded up to 16."""
    return align_up(spec.context, KV_ALIGN)


def kv_nbytes(spec: KVSpec) -> int:
    """Keys and values of one layer in float32."""
    dims = spec.head_dim + (spec.latent_dim or spec.head_dim)
    return spec.num_key_value_heads * kv_positions(spec) * dims * _F32


def recurrent_nbytes(spec: DeltaSpec) -> int:
    """One layer's recurrent state in float32, and the copy of it that is kept."""
    return 2 * spec.state_numbers * _F32


def attention_scratch_nbytes(spec: WorkspaceSpec) -> int:
    """Normed rows (later the attended ones), their sums, q, k, v, rotary values, partial results
    of one row."""
    if spec.latent is not None:
        return _latent_scratch_nbytes(spec, spec.latent)
    rows = min(spec.max_tokens, ROW_TILE)
    q_dim = spec.num_attention_heads * spec.head_dim
    kv_dim = spec.num_key_value_heads * spec.head_dim
    q_width = 2 * q_dim if spec.output_gate else q_dim
    widest = max(spec.hidden_size, q_dim)
    blocks = -(-spec.context // POSITION_BLOCK)
    return _pieces(
        rows * _padded(widest),
        rows * (widest // 64),
        rows * _padded(q_width),
        rows * _padded(kv_dim),
        rows * _padded(kv_dim),
        rows * spec.head_dim,
        spec.num_attention_heads * blocks * (spec.head_dim + _LINE),
    )


def delta_scratch_nbytes(spec: WorkspaceSpec) -> int:
    """Normed rows (later what heads read), their sums, queries with keys and values, gates."""
    rows, delta = min(spec.max_tokens, ROW_TILE), spec.delta
    if delta is None:
        return 0
    widest = max(delta.hidden_size, delta.value_dim)
    return _pieces(
        rows * _padded(widest),
        rows * (widest // 64),
        rows * _padded(delta.conv_dim),
        rows * _padded(delta.value_dim),
        rows * _padded(delta.num_value_heads),
        rows * _padded(delta.num_value_heads),
    )


def _latent_scratch_nbytes(spec: WorkspaceSpec, sizes: LatentSizes) -> int:
    """Normed rows (later the heads' values) and their sums; the same of queries between their two
    projections, and of queries; what the cache gets; rotary values; queries over latents (later
    what they attended to) and their sums; partial results of one row."""
    rows, heads = min(spec.max_tokens, ROW_TILE), spec.num_attention_heads
    widest = max(spec.hidden_size, heads * sizes.v_head_dim)
    blocks = -(-spec.context // POSITION_BLOCK)
    return _pieces(
        rows * _padded(widest),
        rows * (widest // 64),
        rows * _padded(sizes.q_lora_rank),
        rows * (sizes.q_lora_rank // 64),
        rows * _padded(heads * sizes.query_dim),
        rows * heads * (sizes.qk_nope_head_dim // 64),
        rows * _padded(sizes.key_dim),
        rows * sizes.qk_rope_head_dim,
        rows * _padded(heads * sizes.key_dim),
        rows * heads * (sizes.kv_lora_rank // 64),
        heads * blocks * (sizes.kv_lora_rank + _LINE),
    )


def router_scratch_nbytes(spec: WorkspaceSpec) -> int:
    """Sums and logits of one router; the same, normed rows and counts of the next one."""
    rows = min(spec.max_tokens, ROW_TILE)
    sums = rows * (spec.hidden_size // 64)
    logits = rows * _padded(spec.num_experts)
    normed = rows * _padded(spec.hidden_size)
    return _pieces(sums, logits, normed, sums, logits, spec.num_experts)


def mlp_scratch_nbytes(spec: WorkspaceSpec) -> int:
    """Normed rows and their sums; gates and what becomes of them, and their sums."""
    if not spec.intermediate_size:
        return 0
    rows, inner = min(spec.max_tokens, ROW_TILE), spec.intermediate_size
    normed, gates = rows * _padded(spec.hidden_size), rows * _padded(inner)
    return _pieces(normed, rows * (spec.hidden_size // 64), gates, gates, rows * (inner // 64))


def head_scratch_nbytes(spec: WorkspaceSpec) -> int:
    """Normed rows and their sums."""
    rows = spec.max_logit_rows
    return _pieces(rows * _padded(spec.hidden_size), rows * (spec.hidden_size // 64))
