"""What the engine holds: experts by key in, slots with their bytes out.

Not thread-safe: one thread calls it, the read pool's threads only fill memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, sleep
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from aegis.tiers.acquisition import Acquisition
from aegis.tiers.errors import TiersError
from aegis.tiers.guess import Guesser
from aegis.tiers.hot_tier import HotTier
from aegis.tiers.policy import open_policy
from aegis.tiers.prefetch import ReadQueue
from aegis.tiers.read_pool import ReadPool, open_read_pool
from aegis.tiers.scatter import Scatter
from aegis.tiers.slots import NOWHERE, READING, SlotPool
from aegis.tiers.staging import LayerVisit, Staging
from aegis.tiers.stats import TierStats
from aegis.tiers.store import ExpertFiles

_SILENCE_S = 5


class ExpertTiers:
    """Experts in slots, fetched on demand, guessed ahead, kept by a policy."""

    def __init__(
        self,
        files: ExpertFiles,
        slots: SlotPool,
        *,
        num_experts_per_tok: int,
        staging_slots: int,
        policy: str = "lfu",
        guess: str = "cross-layer",
        guess_width: int | None = None,
        io_threads: int = 2,
        pool: ReadPool | None = None,
        seed: int = 0,
    ) -> None:
        """slots: all of them, hot and staging together. ``staging_slots`` of these serve prefill
        and belong to the hot tier otherwise. policy: lfu, lru, random. guess: cross-layer,
        previous, none. guess_width: reads per layer; None adapts. pool: shared (stays open at
        close); None opens one of ``io_threads``."""
        _check_sizes(files, slots, num_experts_per_tok, staging_slots)
        self.files = files
        self.slots = slots
        self.stats = TierStats(files.num_layers)
        self._num_experts = files.num_experts
        self._num_experts_per_tok = num_experts_per_tok
        self._guesser = Guesser(
            guess, guess_width, files.num_layers, files.num_experts, num_experts_per_tok
        )
        self._policy = open_policy(policy, files.num_layers * files.num_experts)
        self._hot = HotTier(slots, self._policy, 0, seed)
        self._owns_pool = pool is None
        self._io_threads = io_threads
        self._staging_slots = staging_slots
        self._last_layer = -1
        self._closed = False
        slots.on_waste = self._count_waste
        slots.experts_per_layer = files.num_experts
        self._tables: dict[int, tuple[int, NDArray[np.int32]]] = {}
        """Layer to its number of changes when its table was made, and the table."""
        self._start(pool or self._open_pool())

    def _open_pool(self) -> ReadPool:
        drop_cache = self.files.mode == "buffered"
        if not self.slots.parts:
            return open_read_pool(self._io_threads, drop_cache=drop_cache)
        scatter = Scatter(self.slots.parts, self.files.stride)
        return open_read_pool(self._io_threads, drop_cache, scatter)

    def _start(self, pool: ReadPool) -> None:
        """Begin in decode with nothing in flight."""
        self._pool = pool
        self._queue = ReadQueue(self.files, self.slots, pool, self.stats)
        self._staging = Staging(self._queue, self._hot, self._staging_slots)
        self._guessed: dict[int, list[int]] = {}
        """MoE layer to the keys that were guessed for it and not yet judged."""
        self._absent: dict[int, list[tuple[int, int]]] = {}
        """MoE layer to (rank, expert) of those that its guess found in no slot."""
        self._visit: LayerVisit | None = None
        self._prefilling = False
        self._reserve_for_decode()

    @property
    def candidates(self) -> int:
        """How many experts to ask of the router for a guess (0: the guess needs none)."""
        return self._guesser.candidates

    @property
    def guesses(self) -> bool:
        """Whether anything is read early while decoding."""
        return self._guesser.width.most > 0

    @property
    def busy_s(self) -> float:
        """Seconds in which the pool was reading, since it was opened."""
        return self._pool.busy_s

    def guess(self, layer_index: int, ranked: Sequence[int] | NDArray[np.int32] = ()) -> int:
        """Start reads for what MoE layer ``layer_index`` (counted among MoE layers) may choose.

        ranked: best first (ignored unless the guess is cross-layer). Returns the reads issued."""
        width = self._guesser.width
        if not width.most:
            return 0
        if self._prefilling:
            self.end_prefill()
        self._queue.collect()
        first, slot_of = layer_index * self._num_experts, self.slots.slot_of
        ranking = self._guesser.rank(layer_index, _ints(ranked))
        if width.learns:
            self._absent[layer_index] = [
                (rank, expert)
                for rank, expert in enumerate(ranking)
                if first + expert not in slot_of
            ]
        keys = self._guessed.setdefault(layer_index, [])
        before = len(keys)
        for expert in ranking[: width.ranks]:
            if first + expert in slot_of:
                continue
            if len(keys) - before >= width.reads:
                break
            slot = self.slots.reclaim()
            if slot == NOWHERE:
                break
            self._queue.start(slot, first + expert, demand=False)
            keys.append(first + expert)
        return len(keys) - before

    def fill(self, layer_index: int) -> int:
        """Where there is a slot for every expert there is, start reads for some of this layer's
        that lie in none, behind all others: once they are there, nobody has to look at routing any
        more. Not where guessing is off. Returns the reads issued."""
        slots, width, queue = self.slots, self._guesser.width.reads, self._queue
        if slots.capacity < self.files.num_layers * self._num_experts:
            return 0
        first, issued = layer_index * self._num_experts, 0
        for key in range(first, first + self._num_experts):
            if not slots.free or len(queue.in_flight) >= width:
                break
            if key not in slots.slot_of:
                queue.start(slots.free[-1], key, demand=False)
                issued += 1
        return issued

    def acquire(self, layer_index: int, experts: Sequence[int] | NDArray[np.int32]) -> Acquisition:
        """Pin the chosen experts (distinct, ascending, at most as many as there are slots); reads
        for the missing start at once, ahead of every guess."""
        chosen = _ints(experts)
        slots, queue = self.slots, self._queue
        if len(chosen) > slots.capacity:
            raise ValueError(
                f"{len(chosen)} experts at once, but there are {slots.capacity} slots; "
                "use prefill_layer"
            )
        if self._prefilling:
            self.end_prefill()
        if layer_index <= self._last_layer:
            self._policy.tick(1)
        self._last_layer = layer_index
        self._guesser.remember(layer_index, chosen)
        queue.collect()
        acquisition = Acquisition(queue, self._hot, layer_index, chosen)
        if layer_index in self._guessed:
            self._judge(layer_index, chosen)
        if not acquisition.complete:
            acquisition.request()
        return acquisition

    def table(self, layer_index: int) -> NDArray[np.int32] | None:
        """The slot of every expert of a layer, int32 [E]; None unless all of them lie in slots.

        The same array as before where nothing has changed. It holds until a slot is next written
        to, which waits for what was called before (``SlotPool.settle``)."""
        slots, count = self.slots, self._num_experts
        if slots.resident[layer_index] < count:
            return None
        changes, first = slots.changes[layer_index], layer_index * count
        found = self._tables.get(layer_index)
        if found is None or found[0] != changes:
            keys = range(first, first + count)
            table = np.array([slots.slot_of[key] for key in keys], dtype=np.int32)
            self._tables[layer_index] = found = (changes, table)
        return found[1]

    def note_hits(self, layer_index: int, experts: NDArray[np.int32]) -> None:
        """Some tokens chose these experts, [tokens, K] in any order within a row, of a layer whose
        table was used."""
        slots, counters = self.slots, self._queue.counting[layer_index]
        if layer_index <= self._last_layer:
            self._policy.tick(len(experts))
        self._last_layer = layer_index
        self._guesser.remember(layer_index, sorted(experts[-1].tolist()))
        first = layer_index * self._num_experts
        counts = np.bincount(experts.reshape(-1))
        chosen = np.flatnonzero(counts)
        for expert, count in zip(chosen.tolist(), counts[chosen].tolist(), strict=True):
            slot = slots.slot_of.get(first + expert, NOWHERE)
            counters.hits += count
            if slot == NOWHERE:
                continue
            counters.hot_hits += count * (slots.hot_index[slot] != NOWHERE)
            counters.useful += slots.guessed[slot]
            slots.guessed[slot] = False
            self._policy.touch(first + expert, count)

    def _judge(self, layer_index: int, chosen: list[int]) -> None:
        """Guesses that were not chosen: cancel those that have not begun, forget about the rest."""
        slots, keys = self.slots, self._guessed.pop(layer_index)
        withdrawn = in_the_way = 0
        for key in keys:
            slot = slots.slot_of.get(key, NOWHERE)
            if slot != NOWHERE and slots.state[slot] == READING and not slots.pins[slot]:
                self._queue.cancel(slot)
                in_the_way += slots.key_of[slot] == key
                withdrawn += slots.key_of[slot] != key
        width = self._guesser.width
        if width.learns:
            width.judge(self._absent.pop(layer_index, ()), set(chosen))
            width.ended(len(keys), withdrawn, in_the_way)

    def begin_prefill(self) -> None:
        """Take the staging slots back from the hot tier, coldest first."""
        if self._prefilling:
            return
        self._prefilling = True
        self._guessed.clear()
        self._absent.clear()
        self._queue.collect()
        self._queue.cancel_unpinned()
        self._queue.counting = self.stats.prefill
        self._hot.reserve = self._staging.size
        self._hot.make_room()

    def prefill_layer(
        self,
        layer_index: int,
        experts: Sequence[int] | NDArray[np.int32],
        next_guess: Sequence[int] | NDArray[np.int32] | None = None,
        rows: Sequence[int] | NDArray[np.int32] | None = None,
    ) -> LayerVisit:
        """Visit ``experts`` (distinct, ascending; any number) in batches in ascending order.

        Iterates over (experts, slots). Asking for the next batch says that the one before is no
        longer in use. next_guess: experts of layer_index + 1 to read ahead. rows: how many rows
        chose each expert; with it the hot tier counts them. ``close`` ends a visit early."""
        self.begin_prefill()
        self._end_visit()
        self._queue.collect()
        weights = None if rows is None else _ints(rows)
        if layer_index <= self._last_layer and weights is not None:
            self._policy.tick(sum(weights) // self._num_experts_per_tok)
        self._last_layer = layer_index
        follows = next_guess is not None and layer_index + 1 < self.files.num_layers
        ahead = _ints(next_guess) if follows and next_guess is not None else ()
        self._visit = LayerVisit(self._staging, layer_index, _ints(experts), ahead, weights)
        return self._visit

    def end_prefill(self) -> None:
        """Let the hot tier have the staging slots again."""
        if not self._prefilling:
            return
        self._end_visit()
        self._staging.drop_ahead()
        self._prefilling = False
        self._queue.counting = self.stats.decode
        self._reserve_for_decode()

    def _end_visit(self) -> None:
        if self._visit is not None:
            self._visit.close()
            self._visit = None

    def _reserve_for_decode(self) -> None:
        """Leave slots for one layer's misses and the next one's guesses, at most half of them."""
        wanted = self._num_experts_per_tok + self._guesser.width.most
        half = max(self.slots.capacity // 2, 1)
        self._hot.reserve = min(wanted, half)
        self._hot.make_room()

    def _count_waste(self, key: int) -> None:
        self._queue.counting[key // self._num_experts].wasted += 1

    def release_slots(self, count: int) -> int:
        """Give up to ``count`` slots from the end back to the system; returns how many went.

        Never goes below num_experts_per_tok slots, nor past a pinned slot."""
        if self._visit is None or self._visit.exhausted:
            self._staging.drop_ahead()
        self._queue.settle_unpinned()
        count = min(count, self.slots.capacity - self._num_experts_per_tok)
        released = self.slots.shrink(count) if count > 0 else 0
        self._resize()
        return released

    def restore_slots(self) -> int:
        """Take every released slot back; returns how many came."""
        return self._grow(self.slots.num_slots - self.slots.capacity)

    def release_nbytes(self, nbytes: int) -> int:
        """Give ``nbytes`` of memory back, in whole 2 MiB ranges from the arena's end.

        Returns how many bytes went: more or fewer, as ranges and the slots that must stay allow.
        Asking for what cannot be had costs nothing and disturbs no read."""
        before = self._given_back()
        if count := self.slots.slots_in(nbytes, self._num_experts_per_tok):
            self.release_slots(count)
        return self._given_back() - before

    def retake_nbytes(self, nbytes: int) -> int:
        """Take up to ``nbytes`` of what was given back; returns how many bytes came.

        Raises ArenaError, with everything as before, where the system has no memory."""
        before = self._given_back()
        self._grow(self.slots.slots_for(nbytes))
        return before - self._given_back()

    def _grow(self, count: int) -> int:
        restored = self.slots.grow(count)
        if restored:
            self._resize()
        return restored

    def _given_back(self) -> int:
        arena = self.slots.arena
        return 0 if arena is None else arena.released_nbytes

    def _resize(self) -> None:
        self.stats.given_back.note(self.slots.num_slots - self.slots.capacity, self._given_back())
        if self._prefilling:
            self._hot.reserve = self._staging.size
            self._hot.make_room()
        else:
            self._reserve_for_decode()

    def recover(self) -> None:
        """Make everything usable again after an exception that may have struck anywhere, as Ctrl-C
        does. Acquisitions and visits from before must not be used any more; experts that were
        resident stay."""
        if self._owns_pool:
            self._pool.close()
            self._pool = self._open_pool()
        else:
            self._await_silence()
        self.slots.rebuild()
        self._start(self._pool)

    def _await_silence(self) -> None:
        """A read may have been submitted and its ticket lost: wait until the pool does nothing."""
        deadline = monotonic() + _SILENCE_S
        while self._pool.depth:
            if monotonic() > deadline:
                raise TiersError(
                    f"the shared read pool is still busy after {_SILENCE_S} seconds; stop its "
                    "other users or open the model again"
                )
            sleep(1e-3)

    def close(self) -> None:
        """Stop reading. Waits only for reads that the disk is already doing; files stay open."""
        if self._closed:
            return
        self._closed = True
        self.end_prefill()
        self._queue.drain()
        if self._owns_pool:
            self._pool.close()

    def __enter__(self) -> ExpertTiers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _ints(values: Sequence[int] | NDArray[np.int32]) -> list[int]:
    """Plain ints: several times faster to work with than numpy's."""
    if isinstance(values, np.ndarray):
        plain: list[int] = values.tolist()
        return plain
    return list(values)


def _check_sizes(
    files: ExpertFiles, slots: SlotPool, num_experts_per_tok: int, staging_slots: int
) -> None:
    if slots.stride != files.stride:
        raise ValueError(f"slots of {slots.stride} bytes for records of {files.stride}")
    if not 1 <= num_experts_per_tok <= min(slots.num_slots, files.num_experts):
        raise ValueError(
            f"num_experts_per_tok is {num_experts_per_tok}: there must be at least as many slots "
            f"({slots.num_slots}) and experts ({files.num_experts})"
        )
    if not 1 <= staging_slots <= slots.num_slots:
        raise ValueError(
            f"staging_slots is {staging_slots}; it must be from 1 to the {slots.num_slots} slots"
        )
