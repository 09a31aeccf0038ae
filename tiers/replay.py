"""A trace through the real tiers, without weights: what a number of slots would have hit."""

from __future__ import annotations

from aegis.tiers.simulate import Tiering, simulate
from aegis.tiers.stats import Counters
from aegis.tiers.trace import RoutingTrace


def replay(
    trace: RoutingTrace,
    slots: int,
    *,
    policy: str = "lfu",
    guess: str = "none",
    guess_width: int | None = 6,
    skip: int = 0,
) -> Counters:
    """Counts of decoding the trace's tokens with so many slots and a disk that takes no time: what
    is guessed is there in time, what is missing as soon as it is asked for.

    skip: so many tokens at first are not counted: the slots are empty then.
    """
    return simulate(trace, Tiering(slots, policy, guess, guess_width), skip=skip).counters
