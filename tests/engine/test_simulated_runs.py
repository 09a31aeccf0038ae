"""A trace replayed counts what the run counted from which it was taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from aegis import Engine
from aegis.convert.cache import embedded_path, ensure_store
from aegis.engine.forced import token_stream
from aegis.tiers.read_pool import ReadPool
from aegis.tiers.simulate import Decoding, Tiering, open_tiers, simulate
from aegis.tiers.stats import Counters
from aegis.tiers.trace import RoutingTrace
from aegis.tiers.virtual_disk import Disk, VirtualPool

TOKENS = 24
SLOTS = (4, 90)
STRIDE = 1 << 16
"""Of the embedded model's records."""


class PunctualPool:
    """A real pool whose reads have ended before anybody looks."""

    def __init__(self, pool: ReadPool) -> None:
        self._pool = pool

    def submit(self, *args: Any) -> int:
        ticket = self._pool.submit(*args)
        self._pool.wait(ticket)
        return ticket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class NotedPool:
    """A real pool, and everything it answers that depends on when reads end."""

    def __init__(self, pool: ReadPool) -> None:
        self._pool = pool
        self.answers: list[Any] = []

    def cancel(self, ticket: int) -> bool:
        self.answers.append(self._pool.cancel(ticket))
        return bool(self.answers[-1])

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        self.answers.append(list(self._pool.wait_any(tickets, block)))
        return list(self.answers[-1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class AnsweringPool(VirtualPool):
    """Answers what another pool has answered."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__(Disk())
        self._answers = iter(answers)

    def cancel(self, ticket: int) -> bool:
        return bool(next(self._answers))

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        answer: list[int] = next(self._answers)
        assert set(answer) <= set(tickets)
        return answer


@pytest.fixture(scope="module")
def embedded(cache: Path) -> Path:
    """The embedded model's store."""
    return ensure_store(embedded_path()).path


@pytest.fixture(scope="module")
def run_traced(embedded: Path) -> Callable[..., tuple[RoutingTrace, Counters, Any]]:
    """Runs tokens one by one; gives their trace, what was counted, and the pool that read."""

    def run(
        slots: int, pool: Callable[[ReadPool], Any] | None = None, **options: Any
    ) -> tuple[RoutingTrace, Counters, Any]:
        with Engine.open(embedded, cap="1GiB", context=64, max_slots=slots, **options) as engine:
            tiers = engine._opened.tiers
            assert tiers.slots.capacity == slots
            made = tiers._pool if pool is None else pool(tiers._pool)
            tiers._pool = tiers._queue.pool = made
            with engine.tracing() as tracing:
                ids = list(islice(token_stream(1, engine.tokenizer.vocab_size), TOKENS))
                for token in ids:
                    engine.feed_token(token)
                trace = tracing.recorder.trace("m", ids)
            found = engine.stats.totals("decode")
            found.wait_s = 0.0
            return trace, found, made

    return run


def simulated(trace: RoutingTrace, tiering: Tiering, record_nbytes: int) -> Counters:
    found = simulate(trace, tiering, record_nbytes=record_nbytes).counters
    found.wait_s = 0.0
    return found


def record_nbytes(counters: Counters) -> int:
    """Where nothing is guessed every miss is one read."""
    assert counters.read_nbytes % counters.misses == 0
    return counters.read_nbytes // counters.misses


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("policy", ["lfu", "lru", "random"])
def test_without_guesses_every_count_is_that_of_the_run(
    slots: int, policy: str, run_traced: Callable[..., tuple[RoutingTrace, Counters, Any]]
) -> None:
    trace, counted, _ = run_traced(slots, policy=policy, guess="none")
    assert counted.choices == TOKENS * 30 * 4
    assert simulated(trace, Tiering(slots, policy), record_nbytes(counted)) == counted


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize(
    ("guess", "width"), [("cross-layer", 6), ("cross-layer", 1), ("previous", 4)]
)
def test_with_guesses_too_where_reads_have_ended_when_somebody_looks(
    slots: int,
    guess: str,
    width: int,
    run_traced: Callable[..., tuple[RoutingTrace, Counters, Any]],
) -> None:
    trace, counted, _ = run_traced(slots, PunctualPool, guess=guess, guess_width=width)
    assert slots == 4 or counted.useful > 0
    tiering = Tiering(slots, "lfu", guess, width)
    reads = counted.misses + counted.guesses
    assert simulated(trace, tiering, counted.read_nbytes // reads) == counted


@pytest.mark.parametrize("slots", SLOTS)
def test_what_differs_from_a_real_disk_is_only_when_reads_end(
    slots: int, run_traced: Callable[..., tuple[RoutingTrace, Counters, Any]]
) -> None:
    """With the answers of the disk that the run had, the same is counted."""
    trace, counted, pool = run_traced(slots, NotedPool)
    tiering = Tiering(slots, "lfu", "cross-layer", None)
    with open_tiers(trace, tiering, AnsweringPool(pool.answers), STRIDE) as tiers:
        decoding = Decoding(trace, tiers)
        for token in range(TOKENS):
            decoding.token(token)
        found = tiers.stats.totals("decode")
        tiers._pool = tiers._queue.pool = VirtualPool(Disk())  # For what closing asks.
        tiers._queue.in_flight.clear()
    found.wait_s = 0.0
    assert found == counted
