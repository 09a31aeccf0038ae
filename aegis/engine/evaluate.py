"""Perplexity of a model on a text, and how far another one's predictions are from its.

The two are opened one after the other, so that each has the whole cap and whatever can be run can
be compared. What the first said is kept on disk meanwhile, exactly: its logits for all of a text
fit no cap where the vocabulary is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aegis.engine.comparison import Comparison, Distance, log_sum, read_libraries, windows
from aegis.engine.logits_file import LogitsFile, disk_folder, logits_nbytes
from aegis.errors import LogitsError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aegis.engine.engine import Engine

See = Callable[[int, "NDArray[np.float32]", float], object]
"""Takes a position, its logits and their ``log_sum``."""
Progress = Callable[[int, int], object]
"""Called with the positions done and all of them."""
Opener = Callable[[], "AbstractContextManager[Engine]"]


@dataclass(frozen=True)
class Likelihood:
    """How well a model predicts a text."""

    mean_nll: float
    """Mean of -ln p(token), in nats."""

    @property
    def perplexity(self) -> float:
        """exp of it."""
        return float(np.exp(self.mean_nll))


def likelihood(
    engine: Engine,
    ids: Sequence[int],
    stride: int,
    progress: Progress | None = None,
    see: See | None = None,
) -> Likelihood:
    """Predict every token of ``ids`` but the first, in windows of the engine's context.

    ``stride``: tokens from one window to the next; each token is predicted once, in the first
    window that has the one before it.

    Raises:
        UsageError: there are fewer than two tokens, or the stride is no part of the context.
        LogitsError: the model gives numbers that are none.
    """
    positions = len(ids) - 1
    if positions < 1:
        raise UsageError("a text of fewer than two tokens predicts nothing; give a longer one")
    refuse_stride(stride, engine.context)
    nll = np.empty(positions, np.float64)
    for window in windows(positions, engine.context, stride):

        def visit(at: int, logits: NDArray[np.float32], start: int = window.start) -> None:
            position, total = start + at, log_sum(logits)
            if not math.isfinite(total):
                raise LogitsError(
                    f"the model's logits at token {position} of the text sum to {total}, so they"
                    " predict nothing; run `aegis verify` on the store"
                )
            nll[position] = total - float(logits[ids[position + 1]])
            if see is not None:
                see(position, logits, total)
            if progress is not None:
                progress(position + 1, positions)

        part = ids[window.start : window.end]
        engine.visit_logits(part, window.first - window.start, visit)
    return Likelihood(float(nll.mean()))


def refuse_stride(stride: int, context: int) -> None:
    """UsageError for one that leaves tokens out or never ends."""
    if not 1 <= stride <= context:
        raise UsageError(
            f"a stride of {stride} tokens leaves some out or never ends; with windows of {context}"
            f" tokens it can be 1 to {context}"
        )


def compare(
    first: Opener,
    second: Opener,
    ids: Sequence[int],
    stride: int,
    vocab_size: int,
    folder: Path,
    progress: tuple[Progress, Progress] | None = None,
) -> tuple[Likelihood, Likelihood, Distance]:
    """Both likelihoods, and how far the second model is from the first.

    Each is opened when it is its turn. ``folder``: where the first one's logits go, if it is on a
    disk; else where temporary files go.

    Raises:
        StoreError: there is no disk with room for the logits.
    """
    positions = len(ids) - 1
    comparison, totals = Comparison(positions), np.empty(positions, np.float64)
    place = disk_folder(folder, logits_nbytes(positions, vocab_size))
    shown = progress or (None, None)
    with LogitsFile(place, vocab_size) as file:

        def keep(position: int, logits: NDArray[np.float32], total: float) -> None:
            totals[position] = total
            file.append(logits)

        def look(position: int, logits: NDArray[np.float32], total: float) -> None:
            comparison.note(position, file.next(), logits, (float(totals[position]), total))

        one = _likelihood(first, ids, stride, shown[0], keep)
        file.written()
        read_libraries()
        other = _likelihood(second, ids, stride, shown[1], look)
    return one, other, comparison.result()


def _likelihood(
    opener: Opener, ids: Sequence[int], stride: int, progress: Progress | None, see: See
) -> Likelihood:
    # Nothing refers to the engine afterwards: a closed one still holds its tokenizer.
    with opener() as engine:
        return likelihood(engine, ids, stride, progress, see)
