"""Router and experts in plain numpy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from aegis.kernels.base import Routing, Weight
from aegis.kernels.reference.linear import F32, linear, rms_norm, sigmoid, silu, widen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from aegis.kernels.base import ExpertsSpec, RouterSpec, SlotMemory


def top_k(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Indices of the k largest per row, best first, ties to the lower index. [T, E] to [T, k]."""
    ranked: NDArray[np.int64] = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    return ranked


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
        logits = linear(normed, positions, self._weights["gate"])
        exps = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probabilities = exps / exps.sum(axis=-1, keepdims=True, dtype=F32)
        experts = np.sort(top_k(logits, spec.num_experts_per_tok), axis=-1)
        weights = np.take_along_axis(probabilities, experts, axis=-1)
        if spec.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True, dtype=F32)
        guess = self._guess(x, positions, candidates)
        return Routing(experts.astype(np.int32), weights.astype(F32), normed, guess)

    def _guess(
        self, x: NDArray[np.float32], positions: NDArray[np.int64], candidates: int
    ) -> NDArray[np.int32]:
        spec = self._next_spec
        if spec is None or candidates == 0:
            return np.empty(0, np.int32)
        normed = rms_norm(x, self._next["norm"], spec.rms_norm_eps)
        logits = linear(normed, positions, self._next["gate"])
        if len(x) == 1:
            best = top_k(logits, min(candidates, spec.num_experts))
            return np.asarray(best[0], np.int32)
        chosen = top_k(logits, spec.num_experts_per_tok)
        counts = np.bincount(chosen.reshape(-1), minlength=spec.num_experts)
        ranked: NDArray[np.int64] = np.argsort(-counts, kind="stable")
        return ranked[: np.count_nonzero(counts)].astype(np.int32)


class Clock:
    """Absolute positions of the rows in flight: attention sets them, the other blocks read them."""

    def __init__(self) -> None:
        self.start = 0

    def positions(self, rows: int) -> NDArray[np.int64]:
        """Positions of the current call's rows."""
        return np.arange(self.start, self.start + rows)


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
            gate, up, down = (self._matrix(slot, n) for n in ("gate_proj", "up_proj", "down_proj"))
            inner = silu(linear(normed, at, gate)) * linear(normed, at, up)
            self._outputs[expert] = rows, linear(inner, at, down)

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
        gate = linear(normed, positions, self._shared["gate_proj"])
        up = linear(normed, positions, self._shared["up_proj"])
        out = linear(silu(gate) * up, positions, self._shared["down_proj"])
        if "shared_expert_gate" in self._shared:
            out = out * sigmoid(linear(normed, positions, self._shared["shared_expert_gate"]))
        return out

    def _matrix(self, slot: int, name: str) -> NDArray[np.float32]:
        segment = self._spec.segments[name]
        address = self._slots.base + slot * self._slots.stride + segment.offset
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * segment.nbytes).from_address(address))
        return widen(Weight(segment.shape, segment.format, self._spec.layout, raw))
