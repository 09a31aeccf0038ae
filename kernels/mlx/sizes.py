"""Byte counts of the mlx backend (standard library only, for planning)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from aegis.kernels.base import DeltaSpec, Format, KVSpec, Segment, WorkspaceSpec
from aegis.kernels.sizes import GROUPS, RECORD_ALIGN, align_up, row_parts

PREFILL_STEP = 256
"""Rows of a prefill chunk. A constant, on a grid of absolute positions: MLX picks other kernels,
which sum in another order, for other numbers of rows."""

TILE_ROWS = 16
"""Rows of one expert that a prefill chunk computes together."""

CALL_TILES = 128
"""Tiles of one call."""

TAKEN_EXPERTS = 8
"""Experts that are copied out of their slots at once, where kernels need other number formats."""

ATTENTION_ROWS = 64
"""Queries of one call where scores are kept in memory."""

CACHE_NBYTES = 16 << 20
"""Freed buffers that MLX may keep for the next operation."""

ROOM_NBYTES = 512
"""What follows codes in the slots' pools: twice the most that ``inputs_behind`` can be, which is
256, of a byte each."""

_KERNEL_TILES = 3
"""Tiles of inputs that MLX's kernel asks for before it computes,"""
_KERNEL_TILE = 64
"""and the inputs of one, if a group has no more."""
_KERNEL_ROWS = 128
"""It is for matrices of a multiple of so many rows."""
_ROOMS = 3
"""Pools with such room, for the codes of three matrices."""

_POSITIONS = 8
"""KV caches have a multiple of so many positions,"""
_NEVER_POSITIONS = 256
"""and never one of so many: on CUDA, MLX would then take cuDNN's attention for one query, but only
where the cache happens to lie in memory of exactly its size, and bits would depend on that."""
_PAGE = 16 << 10
"""MLX rounds large buffers up to so many bytes."""
_STATES = 4
"""Recurrent states of one layer that are in memory together."""
_LIVE = 3
"""Stages of a block whose results are in memory together: each frees its inputs when it is done."""


def inputs_behind(shape: tuple[int, int], fmt: Format) -> int:
    """How many numbers are read behind a matrix [rows, width], and behind what it multiplies.

    The kernel that MLX has on CUDA for such products of 16-bit numbers (qmm_sm80) asks for three
    tiles of every row before it computes. A row of one tile or two has no third: what follows in
    memory is read, up to two rows of it, and not computed with. Behind the last row that may be
    behind the allocation, an illegal access, after which the process cannot use the GPU any more.
    So it is up to version 0.32.4 at least.
    """
    rows, width = shape
    taken = fmt.kind != "dense" and fmt.bits in (4, 8) and not rows % _KERNEL_ROWS
    return max(0, _KERNEL_TILES * max(_KERNEL_TILE, fmt.group_size) - width) if taken else 0


class SlotRange(NamedTuple):
    """One array of an expert: where a record holds it."""

    offset: int
    nbytes: int


def segment_ranges(segment: Segment) -> tuple[SlotRange, ...]:
    """The arrays of a segment in a row-layout record: codes, scales and, if affine, biases, or the
    numbers."""
    if segment.format.kind == "dense":
        return (SlotRange(segment.offset, segment.nbytes),)
    rows, cols = segment.shape
    parts = row_parts((rows, cols), segment.format, RECORD_ALIGN)
    params = (
        SlotRange(segment.offset + offset, parts.params_nbytes) for offset in parts.params_offsets
    )
    return (SlotRange(segment.offset, parts.codes_nbytes), *params)


def slot_nbytes(segments: Mapping[str, Segment], stride: int) -> int:
    """Memory of one slot: the record without its padding."""
    del stride
    return sum(part.nbytes for segment in segments.values() for part in segment_ranges(segment))


def unsupported(spec: WorkspaceSpec) -> str | None:
    """Why this backend cannot compute such a model: MLX's operations take all sizes."""
    del spec
    return None


def capacity(spec: KVSpec) -> int:
    """Positions that a cache has room for."""
    positions = align_up(spec.context, _POSITIONS)
    return positions if positions % _NEVER_POSITIONS else positions + _POSITIONS


def kv_nbytes(spec: KVSpec) -> int:
    """Keys and values of one layer, each an array of its own, if values are not a part of keys."""
    numbers = spec.num_key_value_heads * capacity(spec) * spec.head_dim
    arrays = 1 if spec.latent_dim else 2
    return arrays * align_up(numbers * spec.number_nbytes, _PAGE)


def recurrent_nbytes(spec: DeltaSpec) -> int:
    """One layer's recurrent states: the one that is kept, and while tokens are computed ahead those
    behind the last token, the one that is being computed and the next."""
    inputs = (spec.conv_kernel_dim - 1) * spec.conv_dim
    heads = spec.state_numbers - inputs
    return _STATES * (align_up(4 * heads, _PAGE) + align_up(4 * inputs, _PAGE))


def workspace_nbytes(spec: WorkspaceSpec) -> int:
    """The largest temporaries of one block, what MLX keeps for reuse, and widened scales."""
    logits = 3 * spec.max_logit_rows * spec.vocab_size * 4
    largest = max(_attention(spec), _delta(spec), _experts(spec))
    rooms = _ROOMS * align_up(ROOM_NBYTES, _PAGE) + _narrow(spec)
    return largest + logits + _widened(spec) + _kv_copy(spec) + rooms + CACHE_NBYTES + 64 * _PAGE


def _attention(spec: WorkspaceSpec) -> int:
    queries_per_head = 4 if spec.output_gate else 1
    heads = queries_per_head * spec.num_attention_heads + 2 * spec.num_key_value_heads
    width = heads * spec.head_dim
    if spec.latent is not None:
        # Queries before they are mapped to the latents, and heads behind them.
        own = spec.latent.q_lora_rank + spec.num_attention_heads * spec.latent.v_head_dim
        width += own + spec.num_attention_heads * spec.latent.query_dim
    rows = spec.max_tokens * (2 * spec.hidden_size + _LIVE * width) * spec.number_nbytes
    queries = min(spec.max_tokens, ATTENTION_ROWS)
    scores = spec.num_attention_heads * queries * spec.context
    return rows + _LIVE * scores * spec.number_nbytes


def _delta(spec: WorkspaceSpec) -> int:
    """All in float32, but the residual stream."""
    delta = spec.delta
    if delta is None:
        return 0
    rows = spec.max_tokens + delta.conv_kernel_dim
    stage = delta.conv_dim + 2 * delta.value_dim
    return rows * (2 * spec.hidden_size + (_LIVE + 1) * stage) * 4 + _LIVE * delta.state_numbers * 4


def _experts(spec: WorkspaceSpec) -> int:
    inner = spec.moe_intermediate_size
    tile_rows = CALL_TILES * TILE_ROWS
    call = tile_rows * (2 * spec.hidden_size + _LIVE * inner)
    pairs = spec.max_tokens * spec.num_experts_per_tok * spec.hidden_size
    resident = max(spec.shared_expert_intermediate_size, spec.intermediate_size)
    shared = spec.max_tokens * (_LIVE * resident + spec.hidden_size)
    rows = call + 3 * pairs + shared + 4 * spec.max_tokens * spec.hidden_size
    # Codes at up to 8 bits with float32 scales, or plain numbers.
    taken = TAKEN_EXPERTS * 3 * spec.hidden_size * inner * 4
    return rows * spec.number_nbytes + (taken if spec.number_nbytes == 4 else 0)


def _narrow(spec: WorkspaceSpec) -> int:
    """The copy of inputs behind which something may be read, see ``inputs_behind``."""
    if spec.number_nbytes == 4:
        return 0
    tiles, heads = CALL_TILES * TILE_ROWS, spec.num_attention_heads
    inputs = [(tiles, spec.hidden_size), (tiles, spec.moe_intermediate_size)]
    widths = [heads * spec.head_dim, spec.shared_expert_intermediate_size, spec.intermediate_size]
    if spec.delta is not None:
        widths.append(spec.delta.value_dim)
    inputs += [(spec.max_tokens, width) for width in widths]
    if spec.latent is not None:
        widths = [spec.latent.qk_nope_head_dim, spec.latent.kv_lora_rank]
        inputs += [(heads * spec.max_tokens, width) for width in widths]
    most = _KERNEL_TILES * max(GROUPS)
    copies = ((rows + most) * width for rows, width in inputs if width < most)
    return max(copies, default=0) * spec.number_nbytes


def _widened(spec: WorkspaceSpec) -> int:
    """Scales and biases of resident weights as float32."""
    return 2 * 4 * spec.num_resident_groups if spec.number_nbytes == 4 else 0


def _kv_copy(spec: WorkspaceSpec) -> int:
    """While one token still reads keys and values, the next writes to copies, in every layer."""
    latent = spec.latent.kv_lora_rank if spec.latent else 0
    one = KVSpec(spec.num_key_value_heads, spec.head_dim, spec.context, spec.number_nbytes, latent)
    return spec.num_layers * kv_nbytes(one)
