"""Byte counts of the reference backend (standard library only, for planning)."""

from __future__ import annotations

from collections.abc import Mapping

from aegis.kernels.base import DeltaSpec, KVSpec, Segment, WorkspaceSpec

TILE = 16
"""Rows of one matrix product; every product has exactly this many (see linear.py)."""

_F32 = 4


def kv_nbytes(spec: KVSpec) -> int:
    """Keys and values of one layer, float32, [2, kv_heads, context, head_dim]; keys alone, where
    values are a part of them."""
    both = 1 if spec.latent_dim else 2
    return both * spec.num_key_value_heads * spec.context * spec.head_dim * _F32


def recurrent_nbytes(spec: DeltaSpec) -> int:
    """One layer's recurrent state, float32, and its copy."""
    return 2 * spec.state_numbers * _F32


def workspace_nbytes(spec: WorkspaceSpec) -> int:
    """The widened copy of the resident weights and the largest temporaries of one call."""
    q_dim = spec.num_attention_heads * spec.head_dim * (2 if spec.output_gate else 1)
    inner = max(
        spec.moe_intermediate_size, spec.shared_expert_intermediate_size, spec.intermediate_size
    )
    rows = spec.max_tokens + 2 * TILE
    activations = rows * (8 * spec.hidden_size + 4 * q_dim + 4 * inner + 4 * spec.num_experts)
    delta = 0
    if spec.delta is not None:
        delta = rows * (4 * spec.delta.conv_dim + 6 * spec.delta.value_dim)
        delta += 4 * spec.delta.state_numbers
    scores = 4 * spec.num_attention_heads * spec.context
    expert = 12 * spec.hidden_size * spec.moe_intermediate_size
    logits = (2 * spec.max_logit_rows + 2 * TILE) * spec.vocab_size
    numbers = activations + max(delta, scores) + expert + logits
    return (spec.num_resident_weights + numbers) * _F32


def slot_nbytes(segments: Mapping[str, Segment], stride: int) -> int:
    """Memory of one slot: a whole record."""
    del segments
    return stride


def unsupported(spec: WorkspaceSpec) -> str | None:
    """Why this backend cannot compute such a model: it can compute all."""
    del spec
    return None
