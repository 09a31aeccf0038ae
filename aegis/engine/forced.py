"""A stream of tokens that is the same everywhere, for benchmarks.

Greedy text of random weights falls into cycles, in which a few experts serve for ever. The stream
has what text has of it: few tokens make up most of it (the n-th most frequent comes about 1 / n as
often as the first), and each place is drawn anew.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aegis.engine.comparison import nll
from aegis.engine.sampling import Sampler
from aegis.errors import LogitsError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_AT_ONCE = 64
_FLATTENED = 2.7
"""How much less than 1 / n the first few stand out, as in text."""
_CONTROL = 16
"""Ids at the end of a vocabulary that are left out: control tokens often lie there."""


def token_stream(seed: int, vocab_size: int) -> Iterator[int]:
    """Token ids without end."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, vocab_size]))
    count = max(1, vocab_size - _CONTROL)
    shares = np.cumsum(1 / (np.arange(count) + _FLATTENED))
    stride = _coprime(int(np.asarray(bits.random_raw(1))[0] % np.uint64(count)), count)
    while True:
        drawn = np.asarray(bits.random_raw(_AT_ONCE), np.uint64) >> np.uint64(11)
        ranks = np.searchsorted(shares, drawn.astype(np.float64) * 2.0**-53 * shares[-1], "right")
        for rank in ranks.tolist():
            # Which tokens are frequent is the seed's choice too.
            yield (min(rank, count - 1) * stride + stride // 2) % count


def _coprime(wanted: int, count: int) -> int:
    """The first number from ``wanted`` on whose multiples reach every remainder of ``count``."""
    return next(n for n in range(max(wanted, 1), wanted + count + 1) if np.gcd(n, count) == 1)


class ForcedSampler(Sampler):
    """Takes every token from the seeded stream, whatever the logits are, and sums those up."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        super().__init__(seed=seed)
        self._tokens = token_stream(seed, vocab_size)
        self._digest = hashlib.blake2b(digest_size=16)
        self._nll, self._count = 0.0, 0

    @property
    def nll(self) -> float | None:
        """The mean negative log likelihood of the tokens, nats; None before the first."""
        return self._nll / self._count if self._count else None

    @property
    def logits_digest(self) -> str:
        """BLAKE2b in hex over all logits, little-endian float32: equal where every bit was."""
        return self._digest.hexdigest()

    @property
    def is_greedy(self) -> bool:
        """Never: the device must not choose."""
        return False

    def sample(self, logits: NDArray[np.float32], history: Sequence[int] = ()) -> int:
        """The stream's next token.

        Raises:
            LogitsError: logits are no numbers.
        """
        del history
        token = next(self._tokens)
        lost = nll(logits, token)
        if not math.isfinite(lost):
            raise LogitsError(
                f"the model's logits give token {token} a likelihood of {lost}; run `aegis verify`"
                " on the store"
            )
        self._digest.update(np.ascontiguousarray(logits, "<f4").data)
        self._nll += lost
        self._count += 1
        return token
