"""The experts block: one row's experts in one call, a chunk's in tiles of equal rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import ExpertsSpec, Routing, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.bank import Bank
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.linear import Linear, SideBySide, activation, gated_sum, halves
from aegis.kernels.mlx.memory import MlxMemory
from aegis.kernels.mlx.router import MlxRouting
from aegis.kernels.mlx.sizes import CALL_TILES, TAKEN_EXPERTS

if TYPE_CHECKING:
    from aegis.kernels.mlx.queue import MlxQueue

I32 = NDArray[np.int32]


class MlxExperts:
    """ExpertsBlock on MLX."""

    unordered_rows = 1

    def __init__(
        self,
        memory: MlxMemory,
        traits: Traits,
        queue: MlxQueue,
        spec: ExpertsSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        if spec.layout != "row":
            raise ValueError(f"the mlx backend reads experts in layout row, not {spec.layout}")
        self._queue, self._multiplier = queue, spec.residual_multiplier
        self._clock = traits.clock
        self._bank = Bank(traits, spec, memory.pools)
        self._swiglu = activation(spec.clamp)
        self._entering: SideBySide | None = None
        if "gate_proj" in weights:
            pair = [weights["gate_proj"], weights["up_proj"]]
            self._entering = SideBySide(memory, traits, pair)
            self._down = Linear(memory, traits, weights["down_proj"])
        gate = weights.get("shared_expert_gate")
        self._gate = None if gate is None else Linear(memory, traits, gate)
        self._tile_rows = traits.tile_rows
        self._call: _Row | _Chunk | None = None
        self._decode = device.compiled(self.one_row)
        self._others = device.compiled(self.shared_expert)

    def __call__(self, x: mx.array, routing: Routing, experts: I32, slots: I32) -> mx.array:
        """All chosen experts at once."""
        self.begin(x, routing)
        self.add(experts, slots)
        return self.finish()

    def queued(self, out: mx.array) -> None:
        """A result of ``one_row`` that was computed outside of a call."""
        self._queue.add(out)

    def begin(self, x: mx.array, routing: Routing) -> None:
        """Queue the shared expert behind the router, so that the device works while the host looks
        at what was chosen."""
        route = cast(MlxRouting, routing)
        compute = self._others if x.shape[0] == 1 else self.shared_expert
        shared = compute(route.normed)
        self._clock.start(*route.pending(), *shared)
        kind = _Row if x.shape[0] == 1 else _Chunk
        self._call = kind(self, x, route, shared)

    def add(self, experts: I32, slots: I32) -> None:
        """A chunk computes these now, a single row once all have come."""
        assert self._call is not None
        self._call.add(experts, slots)

    def expect(self, experts: I32, slots: I32) -> None:
        """See QueuedExpertsBlock."""
        assert isinstance(self._call, _Row)
        self._call.expect(experts, slots)

    def finish(self) -> mx.array:
        """Sum in the order of the routing, then the shared expert, then the residual."""
        assert self._call is not None
        out = self._call.finish()
        self._call = None
        self._queue.add(out)
        self._clock.start(out)
        return out

    def shared_expert(self, normed: mx.array) -> tuple[mx.array, ...]:
        """The shared expert's output and its gate, as far as there are any."""
        if self._entering is None:
            return ()
        out = self._down(self._swiglu(*halves(self._entering(normed))))
        return (out,) if self._gate is None else (out, self._gate(normed))

    def one_row(
        self,
        x: mx.array,
        normed: mx.array,
        weights: mx.array,
        slots: mx.array,
        *shared: mx.array,
    ) -> mx.array:
        """x [1, H] plus the experts in slots [K], mixed by weights [1, K]."""
        return self._summed(x, self._bank.one(normed, weights, slots), shared)

    def _summed(self, x: mx.array, routed: mx.array, shared: tuple[mx.array, ...]) -> mx.array:
        if self._multiplier != 1:
            zero = mx.zeros_like(x)
            return x + self._multiplier * (self._added(zero, routed, shared) if shared else routed)
        return self._added(x, routed, shared)

    @staticmethod
    def _added(x: mx.array, routed: mx.array, shared: tuple[mx.array, ...]) -> mx.array:
        if not shared:
            return x + routed
        if len(shared) == 1:
            return x + (routed + shared[0])
        return gated_sum(x, routed, *shared)


class _Row:
    """A call for one row."""

    def __init__(
        self, block: MlxExperts, x: mx.array, routing: MlxRouting, shared: tuple[mx.array, ...]
    ) -> None:
        self._block, self._x, self._routing, self._shared = block, x, routing, shared
        self._slot_of: dict[int, int] = {}
        self._built: tuple[list[int], mx.array] | None = None
        """The call for experts in these slots, described to MLX but not started."""

    def expect(self, experts: I32, slots: I32) -> None:
        """Describe the call now, which takes longer than starting it, and while nothing is there to
        be computed."""
        coming = zip(experts.tolist(), slots.tolist(), strict=True)
        self._built = self._described(self._slot_of | dict(coming))

    def add(self, experts: I32, slots: I32) -> None:
        """Remember where these lie."""
        self._slot_of.update(zip(experts.tolist(), slots.tolist(), strict=True))

    def finish(self) -> mx.array:
        """Compute all of them."""
        if self._built is None or self._built[0] != self._places(self._slot_of):
            self._built = self._described(self._slot_of)
        return self._built[1]

    def _places(self, slot_of: Mapping[int, int]) -> list[int]:
        """The slots of the chosen, best last."""
        return [slot_of[expert] for expert in self._routing.ranked[0].tolist()]

    def _described(self, slot_of: Mapping[int, int]) -> tuple[list[int], mx.array]:
        route, places = self._routing, self._places(slot_of)
        slots = mx.array(places, mx.uint32)
        return places, self._block._decode(
            self._x, route.normed, route.weights, slots, *self._shared
        )


class _Chunk:
    """A call for a chunk of rows: pairs of (row, expert) by expert, in tiles of equal rows."""

    def __init__(
        self, block: MlxExperts, x: mx.array, routing: MlxRouting, shared: tuple[mx.array, ...]
    ) -> None:
        self._block, self._x, self._routing, self._shared = block, x, routing, shared
        ids = routing.ranked
        self._choices = ids.shape[1]
        self._pairs = np.argsort(ids.reshape(-1), kind="stable")
        """Flat (row, choice) indices by expert, then by row."""
        self._ends = np.cumsum(np.bincount(ids.reshape(-1), minlength=int(ids.max()) + 1))
        self._outputs: list[mx.array] = []
        """Of consecutive pairs."""

    def add(self, experts: I32, slots: I32) -> None:
        """Compute these experts, whose pairs follow those that came before."""
        step = TAKEN_EXPERTS if self._block._bank.copies else len(experts)
        for first in range(0, len(experts), step):
            part = slice(first, first + step)
            self._compute(experts[part], slots[part])

    def _compute(self, experts: I32, slots: I32) -> None:
        size = self._block._tile_rows
        rows, index, places = self._tiles(experts, size)
        where = mx.array(slots.astype(np.uint32))
        for first in range(0, len(index), CALL_TILES):
            part = slice(first, first + CALL_TILES)
            tiles = self._routing.normed[mx.array(rows[part].reshape(-1))]
            tiles = tiles.reshape(-1, size, tiles.shape[-1])
            out = self._block._bank.tiles(tiles, where, mx.array(index[part]))
            low, high = first * size, (first + len(index[part])) * size
            kept = places[(places >= low) & (places < high)] - low
            out = out.reshape(-1, out.shape[-1])[mx.array(kept.astype(np.uint32))]
            self._outputs.append(out)
        # Results rather than a graph: what they came from is freed, and slots may be reused.
        self._block._clock.start(*self._outputs)
        self._block._queue.add(self._outputs[-1])

    def _tiles(
        self, experts: I32, size: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.intp]]:
        """Rows [tiles, size] to gather (filled up with row 0), which of ``experts`` each tile is
        for, and where each pair's row lies in the tiles."""
        starts = np.where(experts > 0, self._ends[experts - 1], 0)
        counts = self._ends[experts] - starts
        tiles = -(-counts // size)
        index = np.repeat(np.arange(len(experts), dtype=np.uint32), tiles)
        first_tile = np.cumsum(tiles) - tiles
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(first_tile * size, counts) + within
        rows = np.zeros(len(index) * size, np.uint32)
        rows[places] = self._pairs[starts[0] : starts[0] + counts.sum()] // self._choices
        return rows.reshape(-1, size), index, places

    def finish(self) -> mx.array:
        """Bring the outputs into the order of rows and choices, and sum."""
        back = np.empty(len(self._pairs), np.uint32)
        back[self._pairs] = np.arange(len(self._pairs), dtype=np.uint32)
        outputs = mx.concatenate(self._outputs)[mx.array(back)]
        outputs = outputs.reshape(len(self._x), self._choices, -1)
        routed = (self._routing.weights[:, None] @ outputs)[:, 0]
        return self._block._summed(self._x, routed, self._shared)
