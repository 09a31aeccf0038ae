"""What a model's logits say about a text, and how far two models' predictions are apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOP = 20
_BLOCK = 8192
"""Logits at once: what is made of them for a moment takes 96 KiB, whatever the vocabulary."""
_PERCENTILES = (90, 95, 99)


@np.errstate(all="ignore")
def log_sum(logits: NDArray[np.float32]) -> float:
    """ln of the sum of exp(logits) [vocab_size], summed in float64."""
    peak = float(logits.max())
    blocks = (logits[at : at + _BLOCK] for at in range(0, logits.size, _BLOCK))
    total = sum(float(np.exp(block - peak, dtype=np.float64).sum()) for block in blocks)
    return float(np.log(total)) + peak


def nll(logits: NDArray[np.float32], token: int) -> float:
    """-ln softmax(logits)[token], summed in float64."""
    return log_sum(logits) - float(logits[token])


@dataclass(frozen=True)
class Window:
    """Positions ``start`` to ``end`` are computed afresh, those from ``first`` on are looked at."""

    start: int
    first: int
    end: int


def windows(positions: int, context: int, stride: int) -> Iterator[Window]:
    """Windows of ``context`` positions, each ``stride`` behind the one before.

    Every position is looked at once, in the first window that has it; stride is 1 to context.
    """
    start = done = 0
    while done < positions:
        end = min(start + context, positions)
        yield Window(start, done, end)
        start, done = start + stride, end


class Comparison:
    """Distances of predictions, collected position by position."""

    def __init__(self, positions: int) -> None:
        self._divergence = np.empty(positions, np.float64)
        self._shared = np.empty(positions, np.float64)
        self._same = np.empty(positions, np.bool_)

    def note(
        self,
        position: int,
        first: NDArray[np.float32],
        second: NDArray[np.float32],
        totals: tuple[float, float],
    ) -> None:
        """Logits [vocab_size] of both models at a position, and their ``log_sum``."""
        self._same[position] = first.argmax() == second.argmax()
        size = min(TOP, len(first))
        self._shared[position] = len(np.intersect1d(_top(first), _top(second))) / size
        total = 0.0
        for at in range(0, len(first), _BLOCK):
            log = first[at : at + _BLOCK].astype(np.float64) - totals[0]
            ratio = log - (second[at : at + _BLOCK].astype(np.float64) - totals[1])
            total += float((np.exp(log, out=log) * ratio).sum())
        self._divergence[position] = max(0.0, total)  # What is left below zero is rounding.

    def result(self) -> Distance:
        """Over all positions."""
        percentiles = np.percentile(self._divergence, _PERCENTILES)
        return Distance(
            mean=float(self._divergence.mean()),
            median=float(np.median(self._divergence)),
            percentiles=dict(zip(_PERCENTILES, percentiles.tolist(), strict=True)),
            most=float(self._divergence.max()),
            top1=float(self._same.mean()),
            top20=float(self._shared.mean()),
        )


def read_libraries() -> None:
    """Use what a comparison uses of numpy: what of its libraries that needs is read once, with
    megabytes around it where disks read far ahead, and better before a model fills the cap."""
    logits, comparison = np.zeros(TOP + 1, np.float32), Comparison(1)
    comparison.note(0, logits, logits, (log_sum(logits), log_sum(logits)))
    comparison.result()


def _top(logits: NDArray[np.float32]) -> NDArray[Any]:
    """Ids of the 20 largest, in no order."""
    if len(logits) <= TOP:
        return np.arange(len(logits))
    return np.argpartition(logits, -TOP)[-TOP:]


@dataclass(frozen=True)
class Distance:
    """KL divergence of the second model from the first, in nats, and what both think likely."""

    mean: float
    median: float
    percentiles: dict[int, float]
    most: float
    top1: float
    """Share of positions where both have the same most likely token."""
    top20: float
    """Share of the 20 most likely tokens that both have, in the mean."""

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        percentiles = {f"p{at}": value for at, value in self.percentiles.items()}
        kl = {"mean": self.mean, "median": self.median, **percentiles, "most": self.most}
        return {"kl": kl, "top1": self.top1, "top20": self.top20}
