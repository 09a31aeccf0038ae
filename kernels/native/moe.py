"""The experts block: checks at open, then one call into C++ per layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import ExpertsSpec, Format, Routing, Segment, SlotMemory, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.descs import linear_desc, located_desc
from aegis.kernels.native.sizes import UNORDERED_ROWS
from aegis.kernels.native.workspace import Workspace

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_VECTOR = Format("dense", "f32")


class NativeExperts:
    """ExpertsBlock over slots. The residual stream is updated in place."""

    unordered_rows = UNORDERED_ROWS

    def __init__(
        self,
        pool: _native.Pool,
        workspace: Workspace,
        slots: SlotMemory,
        spec: ExpertsSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        _check_segments(spec, slots)
        self._weights = dict(weights)
        has_shared = "gate_proj" in weights
        shared = tuple(linear_desc(weights[name]) for name in _PROJECTIONS) if has_shared else None
        gate = weights.get("shared_expert_gate")
        routed = tuple(
            _desc(spec.segments[name], spec.segments.get(f"{name}.bias")) for name in _PROJECTIONS
        )
        shape = (
            spec.hidden_size,
            spec.moe_intermediate_size,
            spec.shared_expert_intermediate_size if has_shared else 0,
            spec.num_experts,
            spec.num_experts_per_tok,
            workspace.spec.max_tokens,
        )
        self._workspace = workspace
        self._block = _native.Experts(
            pool,
            shape,
            slots.base,
            slots.stride,
            slots.num_slots,
            routed,
            shared,
            None if gate is None else linear_desc(gate),
            workspace.scratch,
            workspace.scratch_nbytes,
            spec.residual_multiplier,
            None if spec.clamp is None else (spec.clamp.limit, spec.clamp.alpha),
        )
        self._x: F32 | None = None

    def __call__(self, x: F32, routing: Routing, experts: I32, slots: I32) -> F32:
        """All distinct chosen experts at once, ascending; x [T, H] is updated and returned."""
        self._block.run(x, routing.normed, routing.experts, routing.weights, experts, slots)
        return x

    def begin(self, x: F32, routing: Routing) -> None:
        """Start a call; x and the routing must stay untouched until finish."""
        self._block.begin(x, routing.normed, routing.experts, routing.weights)
        self._x = x

    def add(self, experts: I32, slots: I32) -> None:
        """Compute these experts, each in its slot."""
        self._block.add(experts, slots)

    def finish(self) -> F32:
        """Sum and add to the residual stream."""
        self._block.finish()
        x, self._x = self._x, None
        assert x is not None
        return x


def _desc(matrix: Segment, bias: Segment | None) -> _native.LinearDesc:
    """A matrix and its bias at offsets into a slot."""
    rows, cols = matrix.shape
    return located_desc(matrix.offset, (rows, cols), matrix.format, bias.offset if bias else 0)


def _check_segments(spec: ExpertsSpec, slots: SlotMemory) -> None:
    """Raise unless the record's matrices have the spec's shapes and lie inside a slot."""
    if spec.layout != "il16":
        raise ValueError(f"the native backend reads experts in layout il16, not {spec.layout}")
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    rows = {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}
    for name, part in spec.segments.items():
        count = rows[name.removesuffix(".bias")]
        bias = name.endswith(".bias")
        expected = (count,) if bias else (count, hidden + inner - count)
        if bias and part.format != _VECTOR:
            raise ValueError(f"expert {name} is {part.format}; vectors are stored as float32")
        if tuple(part.shape) != expected:
            raise ValueError(f"expert {name} has shape {part.shape}, expected {expected}")
        if part.offset + part.nbytes > slots.stride:
            raise ValueError(f"expert {name} ends beyond its slot of {slots.stride} bytes")
