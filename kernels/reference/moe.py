"""Router, experts and MLP in plain numpy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from aegis.kernels.base import Routing, Weight
from aegis.kernels.reference.linear import F32, linear, rms_norm, sigmoid, silu, widen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from aegis.kernels.base import ExpertsSpec, MlpSpec, RouterSpec, SlotMemory, SwigluClamp


def top_k(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Indices of the k largest per row, best first, ties to the lower index. [T, E] to [T, k]."""
    ranked: NDArray[np.int64] = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    return ranked


def ranks(
    spec: RouterSpec, logits: NDArray[np.float32], correction: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """What the largest are chosen of; -inf in groups that are left out. [T, E]."""
    if spec.scoring == "softmax":
        return logits
    scores = sigmoid(logits)
    if correction is not None:
        scores = scores + correction
    if spec.n_group > 1:
        groups = scores.reshape(len(scores), spec.n_group, -1)
        best = -np.sort(-groups, axis=-1)[..., :2]
        kept = top_k(best.sum(axis=-1, dtype=F32), spec.topk_group)
        left_out = np.ones(groups.shape[:2], np.bool_)
        np.put_along_axis(left_out, kept, False, axis=-1)
        scores = np.where(left_out[..., None], F32(-np.inf), groups).reshape(scores.shape)
    return scores


def mixing_weights(
    spec: RouterSpec, logits: NDArray[np.float32], experts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Weights [T, K] of the chosen."""
    if spec.scoring == "softmax":
        exps = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = exps / exps.sum(axis=-1, keepdims=True, dtype=F32)
    else:
        scores = sigmoid(logits)
    weights = np.take_along_axis(scores, experts, axis=-1)
    if spec.norm_topk_prob:
        total = weights.sum(axis=-1, keepdims=True, dtype=F32)
        # Sigmoids may all be zero.
        weights = weights / (total if spec.scoring == "softmax" else total + F32(1e-20))
    return weights * F32(spec.routed_scaling_factor)


class ReferenceRouter:
    """RouterBlock in numpy. Rows are placed by ``start``, which the backend tracks."""

    def __init__(
        self,
        spec: RouterSpec,
        weights: Mapping[str, Weight],
        next_spec: RouterSpec | None,
        next_weights: Mapping[str, Weight] | None,
        clock: Clock,
    ) -> None:
        self._spec, self._next_spec, self._clock = spec, next_spec, clock
        self._weights = {name: widen(weight) for name, weight in weights.items()}
        self._next = {name: widen(weight) for name, weight in (next_weights or {}).items()}

    def __call__(self, x: NDArray[np.float32], candidates: int) -> Routing:
        """x [T, H] after attention to its routing, and a guess for the next layer."""
        spec, positions = self._spec, self._clock.positions(len(x))
        normed = rms_norm(x, self._weights["norm"], spec.rms_norm_eps)
        logits = linear(normed, positions, self._weights["gate"], self._weights.get("bias"))
        ranked = ranks(spec, logits, self._weights.get("correction"))
        experts = np.sort(top_k(ranked, spec.num_experts_per_tok), axis=-1)
        weights = mixing_weights(spec, logits, experts)
        guess = self._guess(x, positions, candidates)
        return Routing(experts.astype(np.int32), weights.astype(F32), normed, guess)

    def _guess(
        self, x: NDArray[np.float32], positions: NDArray[np.int64], candidates: int
    ) -> NDArray[np.int32]:
        spec = self._next_spec
        if spec is None or candidates == 0:
            return np.empty(0, np.int32)
        normed = rms_norm(x, self._next["norm"], spec.rms_norm_eps)
        logits = linear(normed, positions, self._next["gate"], self._next.get("bias"))
        ranked = ranks(spec, logits, self._next.get("correction"))
        if len(x) == 1:
            best = top_k(ranked, min(candidates, spec.num_experts))
            return np.asarray(best[0], np.int32)
        chosen = top_k(ranked, spec.num_experts_per_tok)
        counts = np.bincount(chosen.reshape(-1), minlength=spec.num_experts)
        by_count: NDArray[np.int64] = np.argsort(-counts, kind="stable")
        return by_count[: np.count_nonzero(counts)].astype(np.int32)


class Clock:
    """Absolute positions of the rows in flight: attention sets them, the other blocks read them."""

    def __init__(self) -> None:
        self.start = 0

    def positions(self, rows: int) -> NDArray[np.int64]:
        """Positions of the current call's rows."""
        return np.arange(self.start, self.start + rows)


class ReferenceMlp:
    """MlpBlock in numpy."""

    def __init__(self, spec: MlpSpec, weights: Mapping[str, Weight], clock: Clock) -> None:
        self._spec, self._clock = spec, clock
        self._weights = {name: widen(weight) for name, weight in weights.items()}

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """x [T, H] after attention to x + mlp."""
        normed = rms_norm(x, self._weights["norm"], self._spec.rms_norm_eps)
        out = swiglu(normed, self._clock.positions(len(x)), self._weights)
        return x + F32(self._spec.residual_multiplier) * out


def swiglu(
    normed: NDArray[np.float32],
    positions: NDArray[np.int64],
    weights: Mapping[str, NDArray[np.float32]],
    clamp: SwigluClamp | None = None,
) -> NDArray[np.float32]:
    """Rows [T, H] at positions [T] through gate_proj, up_proj and down_proj."""

    def product(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        return linear(x, positions, weights[name], weights.get(f"{name}.bias"))

    gate, up = product(normed, "gate_proj"), product(normed, "up_proj")
    if clamp is None:
        return product(silu(gate) * up, "down_proj")
    limit = F32(clamp.limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return product(gate * sigmoid(F32(clamp.alpha) * gate) * (up + F32(1)), "down_proj")


class ReferenceExperts:
    """ExpertsBlock in numpy: every expert's output is kept until ``finish`` sums them in order."""

    unordered_rows = 1 << 30

    def __init__(
        self,
        spec: ExpertsSpec,
        weights: Mapping[str, Weight],
        slots: SlotMemory,
        clock: Clock,
    ) -> None:
        self._spec, self._slots, self._clock = spec, slots, clock
        self._shared = {name: widen(weight) for name, weight in weights.items()}

    def __call__(
        self,
        x: NDArray[np.float32],
        routing: Routing,
        experts: NDArray[np.int32],
        slots: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """All chosen experts at once."""
        self.begin(x, routing)
        self.add(experts, slots)
        return self.finish()

    def begin(self, x: NDArray[np.float32], routing: Routing) -> None:
        """Start a call."""
        self._x, self._routing = x, routing
        self._outputs: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def add(self, experts: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Compute these experts for the rows that chose them."""
        positions = self._clock.positions(len(self._x))
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            rows = np.flatnonzero((self._routing.experts == expert).any(axis=1))
            normed, at = self._routing.normed[rows], positions[rows]
            expert_weights = {name: self._matrix(slot, name) for name in self._spec.segments}
            self._outputs[expert] = rows, swiglu(normed, at, expert_weights, self._spec.clamp)

    def finish(self) -> NDArray[np.float32]:
        """Sum in ascending expert id, then the shared expert, then the residual."""
        total = np.zeros_like(self._x)
        for expert in np.unique(self._routing.experts).tolist():
            rows, output = self._outputs[expert]
            chosen = self._routing.experts[rows] == expert
            total[rows] += output * self._routing.weights[rows][chosen][:, None]
        if self._shared:
            total += self._shared_expert()
        self._outputs = {}
        return self._x + F32(self._spec.residual_multiplier) * total

    def _shared_expert(self) -> NDArray[np.float32]:
        normed, positions = self._routing.normed, self._clock.positions(len(self._x))
        out = swiglu(normed, positions, self._shared, self._spec.clamp)
        if "shared_expert_gate" in self._shared:
            out = out * sigmoid(linear(normed, positions, self._shared["shared_expert_gate"]))
        return out

    def _matrix(self, slot: int, name: str) -> NDArray[np.float32]:
        segment = self._spec.segments[name]
        address = self._slots.base + slot * self._slots.stride + segment.offset
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * segment.nbytes).from_address(address))
        return widen(Weight(segment.shape, segment.format, self._spec.layout, raw))
