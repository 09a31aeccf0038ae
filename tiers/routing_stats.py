"""What a trace says about caching and guessing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aegis.tiers.trace import RoutingTrace

Mask = NDArray[np.bool_]


def _mask(ids: NDArray[Any], num_experts: int) -> Mask:
    """[..., n] ids as [..., E] yes or no."""
    mask = np.zeros((*ids.shape[:-1], num_experts), np.bool_)
    np.put_along_axis(mask, ids.astype(np.intp), True, axis=-1)
    return mask


def guessed_right(trace: RoutingTrace, ahead: int) -> float | None:
    """How many of a layer's K experts are among the K that were guessed best, ``ahead`` layers
    before; None where there are too few layers."""
    tokens, layers, per_token = trace.shape
    if layers <= ahead or not tokens:
        return None
    wanted = _mask(trace.chosen[:, ahead:], trace.num_experts)
    best = trace.guesses[ahead - 1][..., :per_token].astype(np.intp)
    return float(np.take_along_axis(wanted, best, axis=-1).sum(axis=-1).mean())


def chosen_again(trace: RoutingTrace, after: int = 1) -> float | None:
    """How many of a layer's K experts the token ``after`` before had chosen too."""
    if trace.shape[0] <= after:
        return None
    mask = _mask(trace.chosen, trace.num_experts)
    return float((mask[after:] & mask[:-after]).sum(axis=-1).mean())


def popular_share(trace: RoutingTrace, part: float = 0.1) -> float:
    """The share of choices that go to the ``part`` of each layer's experts chosen most often."""
    _, layers, _ = trace.shape
    most = max(1, round(part * trace.num_experts))
    found = 0
    for layer in range(layers):
        counts = np.bincount(trace.chosen[:, layer].reshape(-1), minlength=trace.num_experts)
        found += int(np.sort(counts)[-most:].sum())
    return found / max(1, trace.chosen.size)
