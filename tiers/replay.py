"""A trace through the real tiers, without weights: what a number of slots would have hit."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.tiers.facade import ExpertTiers
from aegis.tiers.slots import SlotPool
from aegis.tiers.stats import Counters
from aegis.tiers.store import READ_ALIGN, ExpertFiles
from aegis.tiers.trace import RoutingTrace


class _NoFiles(ExpertFiles):
    """Records that nobody reads."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__((), READ_ALIGN, READ_ALIGN, num_experts)
        self.num_layers = num_layers

    def locate(self, layer_index: int, expert: int) -> tuple[int, int, int]:
        """Nowhere."""
        del layer_index
        return -1, expert * self.stride, self.stride

    def checksum(self, layer_index: int, expert: int) -> int:
        """Nothing is compared."""
        del layer_index, expert
        return -1

    def note_intact(self, layer_index: int, expert: int) -> None:
        """Nothing is remembered."""


class _NoDisk:
    """A read pool whose reads end when somebody waits, or when a layer has been computed."""

    depth = 0
    busy_s = 0.0

    def __init__(self) -> None:
        self._nbytes: dict[int, int] = {}
        self._tickets = self._ended = 0
        self.read_nbytes = 0

    def submit(
        self, fd: int, offset: int, nbytes: int, address: int, demand: bool, checksum: int = -1
    ) -> int:
        """See ReadPool."""
        return self.submit_run(fd, offset, nbytes, [address], demand, [checksum])

    def submit_run(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        addresses: Sequence[int],
        demand: bool,
        checksums: Sequence[int] = (),
    ) -> int:
        """See ReadPool."""
        del fd, offset, demand, checksums
        self._tickets += 1
        self._nbytes[self._tickets] = nbytes * len(addresses)
        self.read_nbytes += nbytes * len(addresses)
        return self._tickets

    def end_all(self) -> None:
        """Time has passed."""
        self._ended = self._tickets

    def promote(self, ticket: int) -> bool:
        """See ReadPool."""
        del ticket
        return False

    def cancel(self, ticket: int) -> bool:
        """See ReadPool."""
        del ticket
        return False

    def done(self, ticket: int) -> bool:
        """See ReadPool."""
        return ticket <= self._ended

    def wait(self, ticket: int) -> None:
        """See ReadPool."""

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        """See ReadPool."""
        if block:
            self.end_all()
        return [ticket for ticket in tickets if ticket <= self._ended]

    def damaged(self, ticket: int) -> list[int]:
        """See ReadPool."""
        del ticket
        return []

    def result(self, ticket: int) -> int:
        """See ReadPool."""
        return self._nbytes.pop(ticket)

    def close(self) -> None:
        """See ReadPool."""


def replay(
    trace: RoutingTrace,
    slots: int,
    *,
    policy: str = "lfu",
    guess: str = "none",
    guess_width: int = 6,
    skip: int = 0,
) -> Counters:
    """Counts of decoding the trace's tokens with so many slots and a disk that is quick: what is
    guessed is there in time, what is missing comes in the order in which it is asked for.

    skip: so many tokens at first are not counted: the slots are empty then.
    """
    tokens, layers, per_token = trace.shape
    pool = _NoDisk()
    tiers = ExpertTiers(
        _NoFiles(layers, trace.num_experts),
        SlotPool(max(slots, per_token), READ_ALIGN),
        num_experts_per_tok=per_token,
        staging_slots=1,
        policy=policy,
        guess=guess,
        guess_width=guess_width,
        pool=pool,
    )
    with tiers:
        for token in range(tokens):
            if token == skip:
                tiers.stats.reset()
            for layer in range(layers):
                acquired = tiers.acquire(layer, trace.chosen[token, layer].tolist())
                if layer + 1 < layers:
                    tiers.guess(layer + 1, trace.guesses[0][token, layer].tolist())
                acquired.ready()
                while not acquired.complete:
                    acquired.wait()
                acquired.release()
                pool.end_all()
        total = tiers.stats.totals("decode")
    total.wait_s = 0.0  # Nothing was waited for but this loop.
    return total
