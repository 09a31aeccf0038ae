"""Choosing the next token from logits: greedy, or sampling that a seed repeats on any machine.

Order, as in mlx-lm: repetition penalty, then top-p, min-p and top-k on the distribution at
temperature 1, then temperature on what is left. The three filters each keep a head of the same
ranking (logit descending, token id ascending), so their order among themselves does not matter.

A seed gives the same tokens everywhere because nothing here comes from libm or numpy.random:
the exponential is built from IEEE operations, sums have a fixed order, ties are broken by token
id, and the random numbers are SplitMix64 (Steele, Lea and Flood, 2014), one per sampled token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from aegis.engine.token_ids import whole
from aegis.errors import LogitsError, UsageError, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]
    Ids = NDArray[np.intp]

_BLOCK = 8192  # logits per float64 block: 64 KiB of temporaries whatever the vocabulary
_FIRST_GUESS = 64  # how much of the ranking is sorted before top-p or min-p ask for more
_MASK = (1 << 64) - 1
_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_UNDERFLOW = -700.0
_SMALLEST, _LARGEST = (float(v) for v in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed", "repeat_penalty", "repeat_last_n")
_TAYLOR = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))


def warm_up() -> None:
    """Run every step once on a few logits, so that the code pages they need have been read."""
    few = np.linspace(0.0, 1.0, 4096, dtype=np.float32)
    for settings in ({"top_p": 1.0 - 1e-9, "repeat_penalty": 1.1}, {"top_k": 8}, {}):
        Sampler(temperature=1.0, seed=0, **settings).sample(few, [1])


def exp(x: Doubles) -> Doubles:
    """Return e**x for x <= 0 from IEEE operations only; below -700 it is 0."""
    clipped = np.maximum(x, _UNDERFLOW)
    power = np.rint(clipped * _LOG2E)
    rest = clipped - power * _LN2_HIGH
    rest -= power * _LN2_LOW
    total: Doubles = np.full_like(rest, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        total *= rest
        total += coefficient
    total *= ((power.astype(np.int64) + 1023) << 52).view(np.float64)  # 2**power by its bits
    total[x < _UNDERFLOW] = 0.0
    return total


def choose_sampler(sampler: Sampler | None, settings: Mapping[str, Any]) -> Sampler:
    """The sampler that was given, or one with these settings.

    Raises:
        UsageError: it is none, or there is no such setting.
    """
    if sampler is not None:
        if not hasattr(sampler, "sample"):
            raise UsageError(
                f"sampler is {shown(sampler)}; give an aegis.engine.sampling.Sampler, or"
                f" {', '.join(_SETTINGS)} instead"
            )
        return sampler
    for name in settings:
        if name not in _SETTINGS:
            raise UsageError(
                f"there is no option {shown(name)}; those of sampling are {', '.join(_SETTINGS)}"
            )
    return Sampler(**settings)


class Sampler:
    """Draws token ids; temperature 0 is greedy, the lowest id winning ties.

    top_k 0 (or -1), top_p 1, min_p 0 and repeat_penalty 1 turn their step off. repeat_last_n is
    how many of the latest tokens are penalised: -1 all, 0 none. Without a seed one is drawn.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        repeat_penalty: float = 1.0,
        repeat_last_n: int = 64,
    ) -> None:
        self.temperature = _number(temperature, "temperature")
        self.top_p = _number(top_p, "top_p")
        self.top_k = whole(top_k, "top_k")
        self.min_p = _number(min_p, "min_p")
        self.repeat_penalty = _number(repeat_penalty, "repeat_penalty")
        self.repeat_last_n = whole(repeat_last_n, "repeat_last_n")
        drawn = seed is None
        self.seed = int.from_bytes(os.urandom(4), "little") if drawn else whole(seed, "seed")
        self._check_ranges()
        self._state = self.seed & _MASK
        self._penalised = np.empty(0, np.float32)

    def _check_ranges(self) -> None:
        ranges = {
            f"temperature must be a number of at least 0 (0 is greedy), got {self.temperature}": (
                0.0 <= self.temperature < math.inf
            ),
            "top_p must be above 0 and at most 1 (1 turns it off; for the most likely token alone"
            f" set temperature to 0), got {self.top_p}": 0.0 < self.top_p <= 1.0,
            f"top_k must be at least 1, or 0 to turn it off, got {self.top_k}": self.top_k >= -1,
            f"min_p must be at least 0 and at most 1 (0 turns it off), got {self.min_p}": (
                0.0 <= self.min_p <= 1.0
            ),
            f"seed must be a whole number of at least 0, got {self.seed}": self.seed >= 0,
            f"repeat_penalty must be above 0 (1 turns it off), got {self.repeat_penalty}": (
                0.0 < self.repeat_penalty < math.inf
            ),
            "repeat_last_n must be -1 (all), 0 (none) or a number of tokens, got"
            f" {self.repeat_last_n}": self.repeat_last_n >= -1,
        }
        for sentence, holds in ranges.items():
            if not holds:
                raise UsageError(sentence)

    @property
    def uses_history(self) -> bool:
        """Whether sample() looks at the tokens so far."""
        return self.repeat_penalty != 1.0 and self.repeat_last_n != 0

    @property
    def is_greedy(self) -> bool:
        """Whether sample() is nothing but the largest logit."""
        return not self.uses_history and (self.temperature == 0.0 or self.top_k == 1)

    @np.errstate(all="ignore")  # Whatever the caller's program has set: too small is 0 here.
    def sample(self, logits: Floats, history: Sequence[int] = ()) -> int:
        """Return the next token id for logits float32 [vocab_size]; logits are left unchanged.

        history is the prompt's and the generated tokens so far, oldest first.
        """
        if logits.ndim != 1 or logits.size == 0:
            raise LogitsError(f"logits must have shape [vocab_size], got {logits.shape}")
        if self.uses_history:
            logits = self._penalise(logits, history)
        best = int(np.argmax(logits))  # finds NaN as well: numpy ranks it first
        peak = float(logits[best])
        if not math.isfinite(peak):
            raise LogitsError(_not_finite(best, peak))
        if self.temperature == 0.0 or self.top_k == 1:
            return best
        if self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0:
            return self._draw_filtered(logits, peak)
        return self._draw_all(logits, peak)

    def _penalise(self, logits: Floats, history: Sequence[int]) -> Floats:
        recent = history if self.repeat_last_n < 0 else history[-self.repeat_last_n :]
        ids = np.unique(np.asarray(recent, dtype=np.intp))
        ids = ids[(ids >= 0) & (ids < logits.size)]
        if self._penalised.size != logits.size:
            self._penalised = np.empty(logits.size, np.float32)
        np.copyto(self._penalised, logits)
        values = self._penalised[ids]
        # However large the penalty, what was a number stays one.
        penalty = np.float32(np.clip(self.repeat_penalty, _SMALLEST, _LARGEST))
        changed = np.where(values > 0, values / penalty, values * penalty)
        most = np.where(np.isfinite(values), np.float32(_LARGEST), np.float32(np.inf))
        self._penalised[ids] = np.clip(changed, -most, most)
        return self._penalised

    def _draw_filtered(self, logits: Floats, peak: float) -> int:
        ids = self._kept(logits, peak)
        steps = _weights(logits, ids, peak, self.temperature)
        np.cumsum(steps, out=steps)
        return int(ids[_pick(steps, self._uniform() * float(steps[-1]))])

    def _kept(self, logits: Floats, peak: float) -> Ids:
        """Return the ids the filters keep, best first; at least one."""
        limit = min(self.top_k, logits.size) if self.top_k > 0 else logits.size
        if self.top_p >= 1.0 and self.min_p == 0.0:
            return _ranked(logits, limit)
        needed = self.top_p * _total(logits, peak, 1.0) if self.top_p < 1.0 else math.inf
        size = min(_FIRST_GUESS, limit)
        while True:
            ids = _ranked(logits, size)
            odds = _weights(logits, ids, peak, 1.0)
            above = np.cumsum(odds)
            above -= odds  # mass ranked before each candidate
            kept = int(np.count_nonzero((above < needed) & (odds >= self.min_p)))
            if kept < size or size == limit:
                return ids[: max(kept, 1)]
            size = min(size * 8, limit)

    def _draw_all(self, logits: Floats, peak: float) -> int:
        blocks = range(0, logits.size, _BLOCK)
        sums = np.cumsum([_total(logits[b : b + _BLOCK], peak, self.temperature) for b in blocks])
        target = self._uniform() * float(sums[-1])
        block = _pick(sums, target)
        if block:
            target -= float(sums[block - 1])
        start = block * _BLOCK
        weights = exp(_scaled(logits[start : start + _BLOCK], peak, self.temperature))
        return start + _pick(np.cumsum(weights), target)

    def _uniform(self) -> float:
        """Return the next number of the seed's stream, in [0, 1) with 53 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


def _scaled(values: Floats, peak: float, temperature: float) -> Doubles:
    """Return (values - peak) / temperature in float64; an overflow is -inf, so weight 0."""
    shifted: Doubles = values.astype(np.float64)
    shifted -= peak
    if temperature != 1.0:
        shifted /= temperature
    return shifted


def _weights(logits: Floats, ids: Ids, peak: float, temperature: float) -> Doubles:
    """Return exp((logit - peak) / temperature) for ids, block by block."""
    weights: Doubles = np.empty(ids.size, np.float64)
    for start in range(0, ids.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        weights[block] = exp(_scaled(logits[ids[block]], peak, temperature))
    return weights


def _total(logits: Floats, peak: float, temperature: float) -> float:
    """Sum exp((logits - peak) / temperature) block by block, in a fixed order."""
    total = 0.0
    for start in range(0, logits.size, _BLOCK):
        total += float(np.sum(exp(_scaled(logits[start : start + _BLOCK], peak, temperature))))
    return total


def _ranked(logits: Floats, size: int) -> Ids:
    """Return the size best ids, by logit descending then id ascending.

    The size-th largest of many column maxima is a lower bound that few logits reach, and finding
    it is cheap; which of several equal logits a partition puts first would differ by processor.
    """
    columns = max(1024, 8 * size)
    if columns < logits.size:
        rows = logits.size // columns
        maxima = logits[: rows * columns].reshape(rows, columns).max(axis=0)
        ids = np.flatnonzero(logits >= np.partition(maxima, columns - size)[columns - size])
    else:
        ids = np.arange(logits.size)
    return ids[np.argsort(-logits[ids], kind="stable")][:size]


def _pick(steps: Doubles, target: float) -> int:
    """Return the first index whose running sum exceeds target; never one of weight 0.

    Where rounding puts target at the total, it is the last index of any weight.
    """
    chosen = int(np.searchsorted(steps, target, side="right"))
    return min(chosen, int(np.searchsorted(steps, steps[-1], side="left")))


def _not_finite(token: int, value: float) -> str:
    if math.isnan(value):
        return (
            f"the model's logits hold NaN (first at token {token}), so no token can be chosen; "
            "run `aegis verify` on the store"
        )
    return (
        f"the model's largest logit is {value} (token {token}), so no token can be chosen; run "
        "`aegis verify` on the store"
    )


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, 1 if value == abs(value) else -1)
