"""The Backend protocol: what a model family may ask of a compute backend.

A family is written once against these blocks. Decode makes at most three block calls per layer
(attention, route, experts); the same calls serve prefill with more rows. Shapes use T for the
rows of one call, H for hidden_size, E for num_experts, K for num_experts_per_tok.

This module imports nothing but the standard library, so planning needs no array library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aegis.kernels.queued import Queue

Array = Any
"""A backend's own array type: numpy.ndarray for native and reference, mx.array for mlx."""

Layout = Literal["il16", "row"]

Numbers = Literal["f32", "bf16", "f16"]
"""What activations are computed in."""

Scoring = Literal["softmax", "sigmoid"]
"""What a router makes of logits."""

QKNorm = Literal["none", "head", "all"]
"""RMS norm of queries and keys ahead of the rotation: of each head, or of all heads together."""


class BackendUnavailableError(RuntimeError):
    """A backend cannot run on this machine; the message says why and what to install."""


@dataclass(frozen=True)
class Format:
    """How the numbers of one tensor are stored.

    ``affine``: integer codes of ``bits`` with one scale and one bias per ``group_size`` inputs,
    ``w = scale * code + bias``, scale and bias stored as ``dtype``.
    ``mxfp4``: codes of 4 bits, each a float of 2 exponent bits and 1 mantissa bit (E2M1), with one
    scale per 32 inputs, ``w = scale * float(code)``. Scales are powers of two, stored as ``e8m0``:
    the exponent plus 127.
    ``dense``: plain numbers of ``dtype`` (bits and group_size are 0).
    """

    kind: Literal["affine", "mxfp4", "dense"]
    dtype: Literal["bf16", "f16", "f32", "e8m0"]
    bits: int = 0
    group_size: int = 0


@dataclass(frozen=True)
class Weight:
    """A tensor in memory: logical shape, format, layout and its raw bytes (a uint8 view)."""

    shape: tuple[int, ...]
    format: Format
    layout: Layout
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class Segment:
    """One expert matrix (out, in) or bias (out,) inside a record: byte range and shape."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    format: Format


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention with grouped KV heads and rotary positions (half-split pairs)."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    inv_freq: tuple[float, ...]
    """Rotary frequencies, float32-representable, length rotary_dim / 2."""
    qk_norm: QKNorm = "none"
    scale: float | None = None
    """What scores are multiplied by; None: head_dim ** -0.5."""
    residual_multiplier: float = 1.0
    """What the block's output is multiplied by before it joins the residual stream."""
    output_gate: bool = False
    """q_proj has a gate behind every head's query; the head's output is multiplied by its sigmoid
    before o_proj."""
    rotary_scale: float = 1.0
    """What rotated channels of queries and keys are multiplied by."""
    window: int | None = None
    """How many positions a query attends to, its own and those before it; None: all."""


@dataclass(frozen=True)
class DeltaSpec:
    """Gated DeltaNet: a causal convolution over queries, keys and values, then for every value head
    a state [key_head_dim, value_head_dim] that each token decays, corrects and reads."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads; neighbours share one."""
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    """Tokens that a convolution sees, its own included."""
    rms_norm_eps: float

    @property
    def key_dim(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def state_numbers(self) -> int:
        """Numbers of one layer's state: the heads', then the convolution's latest inputs."""
        heads = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return heads + (self.conv_kernel_dim - 1) * self.conv_dim


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of multi-head latent attention, in Hugging Face's names."""

    q_lora_rank: int
    """0: queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def key_dim(self) -> int:
        """What a position keeps for all heads: its latent, then its rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_dim(self) -> int:
        """Of a head before its first part is mapped to the latents."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Softmax attention whose heads share one key per position and attend to its latent.

    A head's query is mapped to the latents' space, and what it attended to back, so that keys and
    values of the heads are never made. Rotary positions turn pairs of neighbouring channels.
    """

    hidden_size: int
    num_attention_heads: int
    sizes: LatentSizes
    rms_norm_eps: float
    inv_freq: tuple[float, ...]
    """Rotary frequencies, float32-representable, length qk_rope_head_dim / 2."""
    scale: float
    """What scores are multiplied by."""
    rotary_scale: float = 1.0
    """What rotated channels of queries and keys are multiplied by."""
    lora_norm_eps: float = 1e-6
    """Of the norms between two projections."""


@dataclass(frozen=True)
class RouterSpec:
    """Router over E experts behind a post-attention RMS norm.

    ``softmax``: the largest probabilities are chosen. ``sigmoid``: the largest of each logit's
    sigmoid plus the expert's correction, in those ``topk_group`` of ``n_group`` equal groups whose
    two best sum to most; what is mixed are the sigmoids alone.
    """

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    rms_norm_eps: float
    scoring: Scoring = "softmax"
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    """What mixing weights are multiplied by, after they are normalised."""


@dataclass(frozen=True)
class MlpSpec:
    """SwiGLU for all rows behind a post-attention RMS norm."""

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    residual_multiplier: float = 1.0
    """What the block's output is multiplied by before it joins the residual stream."""


@dataclass(frozen=True)
class SwigluClamp:
    """(up + 1) * gate * sigmoid(alpha * gate) of a gate of at most ``limit`` and an ``up`` from
    -limit to limit, in place of silu(gate) * up."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class ExpertsSpec:
    """Routed SwiGLU experts in slots, with an optional (gated) shared expert in memory."""

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    shared_expert_intermediate_size: int
    layout: Layout
    segments: Mapping[str, Segment]
    """gate_proj, up_proj, down_proj of one expert record; where experts have biases, gate_proj.bias
    and so on too."""
    residual_multiplier: float = 1.0
    """What the experts' sum is multiplied by before it joins the residual stream."""
    clamp: SwigluClamp | None = None
    """How SwiGLU is clamped; None: it is the plain one."""


@dataclass(frozen=True)
class HeadSpec:
    """Final RMS norm and the projection to the vocabulary."""

    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    logits_scaling: float = 1.0
    """What logits are divided by."""


@dataclass(frozen=True)
class KVSpec:
    """One layer's key/value cache: positions are rounded up to ``kv_align`` of the backend."""

    num_key_value_heads: int
    head_dim: int
    context: int
    number_nbytes: int = 4
    """Bytes of an activation, for backends that keep keys and values as they come."""
    latent_dim: int = 0
    """Above 0: values are the first so many channels of the only head's keys."""


@dataclass(frozen=True)
class WorkspaceSpec:
    """The largest call a backend will see; it sizes every scratch buffer from this."""

    max_tokens: int
    context: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    vocab_size: int
    max_logit_rows: int
    threads: int
    num_resident_weights: int = 0
    """Elements of all resident 2-D weights, for backends that keep a widened copy."""
    num_resident_groups: int = 0
    """Groups of inputs of these that share a scale, for backends that widen scales; what has none
    counts as groups of 64."""
    number_nbytes: int = 4
    """Bytes of an activation."""
    num_layers: int = 1
    """Layers with a key/value cache, for backends that begin the next token before they are done
    with one."""
    output_gate: bool = False
    """Queries bring gates, as in ``AttentionSpec``."""
    delta: DeltaSpec | None = None
    """Of the layers that have one."""
    intermediate_size: int = 0
    """Of layers without experts; 0: there are none."""
    latent: LatentSizes | None = None
    """Of latent attention; there is then one head of keys, of its ``key_dim``."""


class Routing:
    """What the router decided for T rows, for the experts block of the same layer.

    weights: [T, K], the mixing weights. normed: [T, H], the experts' input.
    """

    def __init__(
        self,
        experts: NDArray[np.int32],
        weights: Array,
        normed: Array,
        guess: NDArray[np.int32],
    ) -> None:
        self._experts, self._guess = experts, guess
        self.weights, self.normed = weights, normed

    @property
    def experts(self) -> NDArray[np.int32]:
        """int32 [T, K], ascending per row. A backend that queues waits here for its device."""
        return self._experts

    @property
    def guess(self) -> NDArray[np.int32]:
        """Expert ids of the next MoE layer, best first (for T = 1 by router logit; for T > 1 by how
        many rows chose them); empty when not asked. Known when ``experts`` is."""
        return self._guess


class KVCache(Protocol):
    """One layer's keys and values for one sequence. Positions >= length are garbage."""

    nbytes: int


class RecurrentState(KVCache, Protocol):
    """One layer's state behind a sequence. Unlike keys and values it cannot be cut back, only put
    back to where a copy was kept."""

    def keep(self, position: int) -> None:
        """Copy the state, which is behind so many tokens, in place of the copy before."""

    def restore(self) -> None:
        """Become what the copy is."""


class AttentionBlock(Protocol):
    """x + m * o_proj(attention(rope(qk_norm(qkv(rms_norm(x)))))), m the residual multiplier."""

    def __call__(self, x: Array, cache: KVCache, start: int) -> Array:
        """x: [T, H] residual stream at absolute positions start..start+T-1, which are written to
        the cache. Returns the new residual stream; x's memory may be reused."""


class DeltaBlock(AttentionBlock, Protocol):
    """x + out_proj(gated_norm(delta_rule(silu(conv(qkv(rms_norm(x))))))), a token after the other,
    whatever rows a call has. Takes the place of attention.

    ``cache`` is a ``RecurrentState`` behind exactly the first ``start`` tokens; at 0 it begins
    empty, whatever it held. Where calls queue, it may also be one token further, computed by the
    latest call.
    """


class MlpBlock(Protocol):
    """x + m * mlp(rms_norm(x)), m the residual multiplier, in a layer without experts."""

    def __call__(self, x: Array) -> Array:
        """x: [T, H] after attention. Returns the new residual stream; x's memory may be reused.
        Never waits where the backend queues."""


class RouterBlock(Protocol):
    """Post-attention norm, router, top-k; optionally the guess for the next MoE layer."""

    def __call__(self, x: Array, candidates: int) -> Routing:
        """x: [T, H] after attention. candidates: how many experts to guess for T = 1 (0: none).
        Never waits where the backend queues."""


class ExpertsBlock(Protocol):
    """Routed experts from slots plus the shared expert, added to the residual stream.

    The sum over a row's experts runs in ascending expert id from zero, then the shared expert,
    then (times the residual multiplier) the residual, so neither arrival order nor call splitting
    can change a bit.
    """

    def __call__(
        self, x: Array, routing: Routing, experts: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> Array:
        """Everything at once: ``experts`` are the distinct chosen ids (ascending) and ``slots``
        where each lies. Returns the new residual stream [T, H]."""

    def begin(self, x: Array, routing: Routing) -> None:
        """Start a call whose experts arrive over time; computes the shared expert."""

    def add(self, experts: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Compute these experts now. Any order when T <= ``unordered_rows``; otherwise each call's
        ids are ascending and above those of the calls before."""

    def finish(self) -> Array:
        """Sum, add to the residual stream and return it; every chosen expert was added."""

    @property
    def unordered_rows(self) -> int:
        """Up to how many rows experts may be added in any order; decode needs at least 1."""


class EmbeddingBlock(Protocol):
    """Token id to row of the embedding table."""

    row_nbytes: int
    """Bytes that hold one id's row and start at ``row_offset(id)`` of the stored table."""

    def row_offset(self, token_id: int) -> int:
        """Byte offset in the stored table of the range that holds this id's row."""

    def __call__(self, ids: NDArray[np.int32] | Array) -> Array:
        """ids [T], of the backend's own too, to [T, H], from the table in memory."""

    def from_rows(self, ids: NDArray[np.int32], rows: NDArray[np.uint8]) -> Array:
        """The same from ranges read from disk: rows is [T, row_nbytes]."""


class HeadBlock(Protocol):
    """Final norm and logits."""

    def __call__(self, x: Array) -> NDArray[np.float32]:
        """x [T, H], T <= max_logit_rows, to logits [T, vocab_size]; valid until the next call."""


@dataclass(frozen=True)
class SlotPart:
    """A range of an expert's record, and where slots keep it: slot ``n`` at base + n * stride."""

    offset: int
    nbytes: int
    base: int
    stride: int
    direct: bool = True
    """Whether a direct read may put bytes there; if not, they are copied once they have come."""


class SlotMemory(Protocol):
    """Where experts lie: equal slots addressed by number."""

    num_slots: int
    stride: int
    """Bytes of a record; also the distance of slots, where these are not in parts."""
    base: int
    """Address of slot 0."""
    parts: tuple[SlotPart, ...]
    """Where a slot is not one range: its pieces, in the order of the record. Else empty."""


class OwnMemory(Protocol):
    """Memory that a backend allocates in place of the engine's arena."""

    def resident(self, nbytes: int) -> NDArray[np.uint8]:
        """Where resident weights are read to, once."""

    def slots(self, num_slots: int, segments: Mapping[str, Segment]) -> tuple[SlotPart, ...]:
        """Allocate the slots, once."""

    def measured(self) -> Mapping[str, int]:
        """Bytes now, by what they are for: ``slots``, ``resident_weights``, ``kv_cache``,
        ``recurrent_state``, ``workspace`` (its peak)."""

    def apart(self, resident: int, shared: int) -> tuple[int, int]:
        """What the process takes of the host's memory, and what its arrays take of a device that
        has its own (0 where there is none). From what the system says of the process: its resident
        size, and the part of that which lies in files."""


class Backend(Protocol):
    """A compute backend. Weights are bound at open; calls allocate nothing large."""

    @property
    def name(self) -> str:
        """The name that ``--backend`` takes."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """Store layouts it can read, preferred first."""

    @property
    def owned(self) -> Collection[str]:
        """The plan's items that it allocates itself: planned like any other, not in the arena."""

    @property
    def memory(self) -> OwnMemory | None:
        """Allocates weights and slots; None where they lie in the engine's arena."""

    @property
    def queue(self) -> Queue | None:
        """What was called and is not computed yet; None where calls return when they are done."""

    def describe(self) -> str:
        """One line for people: instruction set, threads, device."""

    def workspace_nbytes(self, spec: WorkspaceSpec) -> int:
        """Scratch bytes that ``open_workspace`` needs, the logits rows included."""

    def kv_nbytes(self, spec: KVSpec) -> int:
        """Bytes of one layer's cache."""

    def recurrent_nbytes(self, spec: DeltaSpec) -> int:
        """Bytes of one layer's recurrent state, the copy that is kept included."""

    def open_workspace(self, spec: WorkspaceSpec, buffer: NDArray[np.uint8]) -> None:
        """Bind the scratch memory (empty if owned); comes before any block."""

    def kv_cache(self, spec: KVSpec, buffer: NDArray[np.uint8]) -> KVCache:
        """A cache over ``buffer`` (kv_nbytes, 64-byte aligned; empty if owned)."""

    def recurrent_state(self, spec: DeltaSpec, buffer: NDArray[np.uint8]) -> RecurrentState:
        """A state over ``buffer`` (recurrent_nbytes, 64-byte aligned; empty if owned)."""

    def bind_slots(self, slots: SlotMemory) -> None:
        """Tell the backend where slots lie; must come before any experts block is made."""

    def attention(self, spec: AttentionSpec, weights: Mapping[str, Weight]) -> AttentionBlock:
        """weights: norm [H], q_proj, k_proj, v_proj, o_proj, optional q_bias, k_bias, v_bias,
        o_bias; with a qk_norm q_norm and k_norm, of one head's channels or of the whole
        projection's; optional sinks [num_attention_heads], each a score more in its head's softmax,
        of a position without value."""

    def delta(self, spec: DeltaSpec, weights: Mapping[str, Weight]) -> DeltaBlock:
        """weights: norm [H], in_proj_qkv, in_proj_z, in_proj_a, in_proj_b, out_proj; conv, the
        convolution's taps [conv_kernel_dim * conv_dim], oldest first; A_log and dt_bias
        [num_value_heads]; out_norm [value_head_dim]."""

    def latent_attention(
        self, spec: LatentAttentionSpec, weights: Mapping[str, Weight]
    ) -> AttentionBlock:
        """weights: norm [H]; q_proj, or q_a_proj, q_a_norm and q_b_proj; kv_a_proj, kv_a_norm,
        o_proj; embed_q (heads * kv_lora_rank, qk_nope_head_dim) and unembed_out (heads *
        v_head_dim, kv_lora_rank), head by head."""

    def router(
        self,
        spec: RouterSpec,
        weights: Mapping[str, Weight],
        next_spec: RouterSpec | None,
        next_weights: Mapping[str, Weight] | None,
    ) -> RouterBlock:
        """weights: norm [H], gate (E, H), optional bias [E] of the logits, with sigmoid scores
        optional correction [E]. next_*: the following MoE layer's, for the guess."""

    def mlp(self, spec: MlpSpec, weights: Mapping[str, Weight]) -> MlpBlock:
        """weights: norm [H], gate_proj and up_proj (I, H), down_proj (H, I)."""

    def experts(self, spec: ExpertsSpec, weights: Mapping[str, Weight]) -> ExpertsBlock:
        """weights: optional shared expert: gate_proj, up_proj, down_proj, shared_expert_gate
        (1, H; absent: ungated)."""

    def embedding(
        self,
        shape: tuple[int, int],
        fmt: Format,
        layout: Layout,
        table: Weight | None,
        multiplier: float = 1.0,
    ) -> EmbeddingBlock:
        """table None: rows come from disk. multiplier: what every row is multiplied by."""

    def head(self, spec: HeadSpec, weights: Mapping[str, Weight]) -> HeadBlock:
        """weights: norm [H], lm_head (vocab, H)."""

    def close(self) -> None:
        """Stop worker threads."""
