"""The routed experts' matrices in slot pools, and the SwiGLU of some of them.

Shapes never depend on where experts lie or when they came: MLX picks kernels by the rows of a call
and by how many experts it names, and other kernels sum in another order.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from aegis.kernels.base import ExpertsSpec, Segment
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.linear import activation, halves, mixed_swiglu, rows_behind, with_room
from aegis.kernels.mlx.memory import Arrays, quantised
from aegis.kernels.mlx.sizes import ROOM_NBYTES

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Bank:
    """All slots' experts as matrices."""

    def __init__(self, traits: Traits, spec: ExpertsSpec, pools: Mapping[str, Arrays]) -> None:
        gate, up, down = (_Matrix(traits, spec.segments[n], pools[n]) for n in PROJECTIONS)
        together = pools["gate_proj"] is pools["up_proj"]
        self._entering = [gate] if together else [gate, up]
        self._down, self._dtype = down, traits.dtype
        self._mixed = spec.clamp is None
        self._swiglu = activation(spec.clamp)
        self._biases: list[mx.array] = []
        """Of the first two matrices, one behind the other, and of the last, in every slot."""
        if "gate_proj.bias" in pools:
            self._biases = [pools[f"{name}.bias"][0] for name in ("gate_proj", "down_proj")]
        self._made: dict[int, tuple[mx.array, mx.array]] = {}
        self.copies = any(matrix.copies for matrix in (gate, up, down))
        """Chosen experts are copied out of their slots: kernels need other numbers."""

    def one(self, x: mx.array, weights: mx.array, slots: mx.array) -> mx.array:
        """A row x [1, H] through the experts in slots [K], mixed by weights [1, K], to [1, H]."""
        row, each = self._sources(slots.shape[0])
        gate, up = self._enter(x[None], slots, None, row)
        shares = weights.reshape(-1, 1, 1)
        inner = mixed_swiglu(gate, up, shares) if self._mixed else self._swiglu(gate, up) * shares
        out = self._down(inner, slots, None, each)
        if self._biases:
            out = out + self._bias(1, slots, None) * shares
        return out.sum(axis=0)

    def _enter(
        self,
        x: mx.array,
        slots: mx.array,
        index: mx.array | None,
        source: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """What the first two matrices make of x; see _Matrix."""
        outputs = [matrix(x, slots, index, source) for matrix in self._entering]
        gate, up = halves(outputs[0]) if len(outputs) == 1 else (outputs[0], outputs[1])
        if not self._biases:
            return gate, up
        of_gate, of_up = halves(self._bias(0, slots, index))
        return gate + of_gate, up + of_up

    def _bias(self, which: int, slots: mx.array, index: mx.array | None) -> mx.array:
        """Biases [n, 1, out] of the experts in slots[index[i]]."""
        rows = self._biases[which][slots if index is None else slots[index]]
        return rows.astype(self._dtype)[:, None]

    def _sources(self, count: int) -> tuple[mx.array, mx.array]:
        """Which row each of ``count`` products takes: always row 0, and each its own. Given rather
        than left out, since MLX would compute them every time."""
        if count not in self._made:
            each = mx.arange(count, dtype=mx.uint32)
            self._made[count] = (mx.zeros_like(each), each)
            mx.eval(self._made[count])
        return self._made[count]

    def tiles(self, x: mx.array, slots: mx.array, index: mx.array) -> mx.array:
        """x [n, M, H] to [n, M, H]: rows x[i] through the expert in slots[index[i]]."""
        out = self._down(self._swiglu(*self._enter(x, slots, index)), slots, index)
        return out + self._bias(1, slots, index) if self._biases else out


class _Matrix:
    """One of an expert's matrices in every slot."""

    def __init__(self, traits: Traits, segment: Segment, pools: Arrays) -> None:
        self._format, self._pools, self._dtype = segment.format, pools, traits.dtype
        kind = segment.format.kind
        rows = pools[0].shape[1]
        self._behind = rows_behind((rows, *segment.shape[1:]), segment.format, traits)
        expert_nbytes = int(np.prod(pools[0].shape[1:])) * pools[0].itemsize
        self._spare = -(-ROOM_NBYTES // expert_nbytes)
        """How many experts more are copied, to be the room behind those that are computed with."""
        self.copies = kind == "dense" or (kind == "affine" and pools[-1].dtype != traits.dtype)

    def __call__(
        self,
        x: mx.array,
        slots: mx.array,
        index: mx.array | None,
        source: mx.array | None = None,
    ) -> mx.array:
        """x[source[i]] through the expert in slots[index[i]]; both are 0, 1, .. where left out."""
        arrays = self._pools
        if self.copies:
            arrays = self._taken(slots)
            which = mx.arange(slots.shape[0], dtype=mx.uint32) if index is None else index
        else:
            which = slots if index is None else slots[index]
        if self._format.kind == "dense":
            matrices = arrays[0].swapaxes(-1, -2)
            return mx.gather_mm(x, matrices, lhs_indices=source, rhs_indices=which)
        return mx.gather_qmm(
            with_room(x, self._behind),
            *quantised(arrays),
            lhs_indices=source,
            rhs_indices=which,
            transpose=True,
            group_size=self._format.group_size,
            bits=self._format.bits,
            mode=self._format.kind,
        )

    def _taken(self, slots: mx.array) -> Arrays:
        """Copies of the experts in ``slots``, their numbers as activations are."""
        if self._format.kind == "dense":
            return (self._pools[0][slots].astype(self._dtype),)
        codes = self._pools[0][mx.pad(slots, (0, self._spare))][: slots.shape[0]]
        scales, biases = (pool[slots] for pool in self._pools[1:])
        return codes, scales.astype(self._dtype), biases.astype(self._dtype)
