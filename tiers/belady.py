"""The most hits that any policy could have with a number of slots, had it known what comes.

The cache is that of the tiers while nothing is guessed: an expert comes into a slot only when its
layer asks for it, all experts that a layer chose lie in slots at once, and whatever else lies in
slots may go at any time, what was just used as well. A hot tier that refuses a newcomer is such a
policy, so is one that accepts everybody. Guesses may bring more hits than this, since they read
what nobody has asked for.

What goes is what will be asked for last (Belady's MIN). Where the first tokens are not counted, it
is what will be asked for last among the counted ones: hits before are worth nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from aegis.tiers.stats import Counters
from aegis.tiers.trace import RoutingTrace


def belady(trace: RoutingTrace, slots: int, *, skip: int = 0) -> Counters:
    """The counts of hits and misses of the best that ``slots`` slots could do.

    skip: so many tokens at first are not counted, as in ``replay``; none of them is not counted
    where there are no more than that.
    """
    tokens, layers, per_token = trace.shape
    skip = skip if skip < tokens else 0
    slots = max(slots, per_token)
    keys = _keys(trace)
    following = _next_counted(keys, skip * layers)
    kept: dict[int, int] = {}
    """Key in a slot to when it is next asked for and counted."""
    latest: list[tuple[int, int]] = []
    """Heap of (-when, key), with entries of keys that are gone or were asked for since."""
    hits = 0
    for step, (chosen, when) in enumerate(zip(keys.tolist(), following.tolist(), strict=True)):
        found = sum(kept.pop(key, None) is not None for key in chosen)
        hits += found if step >= skip * layers else 0
        while len(kept) + per_token > slots:
            later, key = heappop(latest)
            if kept.get(key) == -later:
                del kept[key]
        for key, later in zip(chosen, when, strict=True):
            kept[key] = later
            heappush(latest, (-later, key))
    choices = (tokens - skip) * layers * per_token
    return Counters(hits=hits, hot_hits=hits, misses=choices - hits)


def _keys(trace: RoutingTrace) -> NDArray[np.int64]:
    """Expert keys in the order in which they are asked for [tokens * layers, K]."""
    tokens, layers, per_token = trace.shape
    first = np.arange(layers, dtype=np.int64)[:, None] * trace.num_experts
    return (trace.chosen + first).reshape(tokens * layers, per_token)


def _next_counted(keys: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """For each key the next step from ``first`` on that asks for it; one behind all: none does."""
    steps, per_step = keys.shape
    flat = keys.reshape(-1)
    when = np.repeat(np.arange(steps), per_step)
    order = np.argsort(flat, kind="stable")
    following = np.full(flat.size, steps, np.int64)
    same = flat[order[1:]] == flat[order[:-1]]
    following[order[:-1][same]] = when[order[1:][same]]
    # Backwards: what follows before ``first`` hands its own successor on.
    early = np.flatnonzero(following < first)
    if early.size:
        once = np.full(int(flat.max()) + 1, steps, np.int64)
        counted = flat[first * per_step :]
        once[counted[::-1]] = when[first * per_step :][::-1]
        following[early] = once[flat[early]]
    return following.reshape(keys.shape)
