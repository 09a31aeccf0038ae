"""Workspace of the native backend: what lies where, from shapes alone (standard library only).

The C++ experts block carves the same pieces in the same order and refuses a scratch that is too
small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from aegis.kernels.base import DeltaSpec, LatentSizes, Segment, WorkspaceSpec
from aegis.kernels.native.sizes_attention import (
    attention_scratch_nbytes,
    delta_scratch_nbytes,
    head_scratch_nbytes,
    kv_nbytes,
    mlp_scratch_nbytes,
    recurrent_nbytes,
    router_scratch_nbytes,
)

__all__ = [
    "Region",
    "experts_scratch_nbytes",
    "kv_nbytes",
    "recurrent_nbytes",
    "regions",
    "slot_nbytes",
    "unsupported",
    "workspace_nbytes",
]

UNORDERED_ROWS = 8
"""Up to so many rows an experts call keeps every result, so its experts may come in any order."""

ACT_ROWS = 128
"""(row, expert) pairs whose activations are in memory together."""

TILE_ROWS = 64
"""Rows of one expert that are computed together."""

HEAD_DIM_STEP, MOST_HEAD_DIM, MOST_EXPERTS, MOST_TAPS = 16, 256, 4096, 16
MOST_LATENT = (512, 64)
"""What the C++ blocks are written for; they refuse anything else."""

_LINE = 64
_NUMBER = 4


class Region(NamedTuple):
    """A piece of the workspace, in bytes."""

    offset: int
    nbytes: int


def _lines(*counts: int) -> int:
    """Bytes of pieces of so many 4-byte numbers, each rounded up to a cache line."""
    return sum(-(-count * _NUMBER // _LINE) * _LINE for count in counts)


def unsupported(spec: WorkspaceSpec) -> str | None:
    """Why this backend cannot compute such a model; None where it can."""
    if spec.latent is not None:
        reason = _unsupported_latent(spec.latent)
    else:
        reason = _unsupported_head(spec.head_dim)
    if reason is None and spec.delta is not None:
        reason = _unsupported_delta(spec.delta)
    if reason is None and spec.num_experts > MOST_EXPERTS:
        reason = f"it has {spec.num_experts} experts in a layer, and the most is {MOST_EXPERTS}"
    return reason


def _unsupported_head(head_dim: int) -> str | None:
    if head_dim % HEAD_DIM_STEP or head_dim > MOST_HEAD_DIM:
        allowed = f"multiples of {HEAD_DIM_STEP} up to {MOST_HEAD_DIM}"
        return f"its head_dim is {head_dim}, and only {allowed} are implemented"
    return None


def _unsupported_delta(delta: DeltaSpec) -> str | None:
    dims, taps = (delta.key_head_dim, delta.value_head_dim), delta.conv_kernel_dim
    if any(dim % HEAD_DIM_STEP for dim in dims):
        return (
            f"its linear heads have {dims[0]} and {dims[1]} channels, and only multiples of"
            f" {HEAD_DIM_STEP} are implemented"
        )
    if taps > MOST_TAPS:
        return f"its convolution sees {taps} tokens, and the most is {MOST_TAPS}"
    return None


def _unsupported_latent(sizes: LatentSizes) -> str | None:
    most_rank, most_rope = MOST_LATENT
    rank, rope = sizes.kv_lora_rank, sizes.qk_rope_head_dim
    if rank % 64 or rank > most_rank or rope > most_rope:
        return (
            f"its latents have {rank} channels and {rope} rotated ones, and only multiples of 64 up"
            f" to {most_rank} and up to {most_rope} are implemented"
        )
    if sizes.v_head_dim % 16:
        return f"its v_head_dim is {sizes.v_head_dim}, and only multiples of 16 are implemented"
    return None


def experts_scratch_nbytes(spec: WorkspaceSpec) -> int:
    """Row sums, accumulators or kept results, gates, activations, and pairs sorted by expert."""
    tokens, hidden, choices = spec.max_tokens, spec.hidden_size, spec.num_experts_per_tok
    inner, shared = spec.moe_intermediate_size, spec.shared_expert_intermediate_size
    few = min(tokens, UNORDERED_ROWS)
    act_rows = min(ACT_ROWS, tokens * choices)
    shared_rows = min(TILE_ROWS, tokens) if shared else 0
    one_row = choices * (inner + 16) + shared + 16
    return _lines(
        tokens * (hidden // 64),
        max(tokens, few * (choices + 2)) * hidden,
        tokens,
        act_rows * (inner + 16),
        act_rows * (inner // 64),
        shared_rows * (shared + 16),
        shared_rows * (shared // 64),
        hidden,
        one_row,
        choices * (inner // 64) + shared // 64,
        spec.num_experts + 1,
        tokens * choices,
    )


def scratch_nbytes(spec: WorkspaceSpec) -> int:
    """The largest scratch of any block; no block runs inside another."""
    return max(
        experts_scratch_nbytes(spec),
        attention_scratch_nbytes(spec),
        delta_scratch_nbytes(spec),
        mlp_scratch_nbytes(spec),
        router_scratch_nbytes(spec),
        head_scratch_nbytes(spec),
    )


def regions(spec: WorkspaceSpec) -> dict[str, Region]:
    """The workspace's pieces by name, in order."""
    tokens, choices = spec.max_tokens, spec.num_experts_per_tok
    sizes = {
        "hidden": _lines(tokens * spec.hidden_size),
        "normed": _lines(tokens * spec.hidden_size),
        "weights": _lines(tokens * choices),
        "experts": _lines(tokens * choices),
        "guess": _lines(spec.num_experts),
        "logits": _lines(spec.max_logit_rows * spec.vocab_size),
        "scratch": scratch_nbytes(spec),
    }
    found, offset = {}, 0
    for name, nbytes in sizes.items():
        found[name] = Region(offset, nbytes)
        offset += nbytes
    return found


def workspace_nbytes(spec: WorkspaceSpec) -> int:
    """Bytes of the whole workspace, with room to start it on a cache line."""
    last = regions(spec)["scratch"]
    return last.offset + last.nbytes + _LINE


def slot_nbytes(segments: Mapping[str, Segment], stride: int) -> int:
    """Memory of one slot: a whole record."""
    del segments
    return stride
