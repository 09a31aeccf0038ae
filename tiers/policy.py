"""Which expert is worth a slot: every policy is a score per expert key, higher stays longer."""

from __future__ import annotations

from typing import Protocol

HALF_LIFE_TOKENS = 32
"""After so many tokens a choice counts half: a topic outlasts a sentence. On traces of the embedded
model and of the 35B shape, with slots for a tenth to a quarter of all experts, 24 to 48 are within
a point of each other; 128 hits 1 to 2 points less often on all but one, there half a point more."""

_RESCALE_ABOVE = 1e100


class Policy(Protocol):
    """Scores of all expert keys, and whether a newcomer may take a victim's slot."""

    scores: list[float]
    """By key. They only grow, except that another list of another scale may take their place."""
    blind: bool
    """Scores say nothing: any hot slot is the victim, instead of the coldest."""

    def touch(self, key: int, weight: int = 1) -> None:
        """The expert was chosen ``weight`` times."""

    def tick(self, tokens: int) -> None:
        """So many tokens went by."""

    def prefers(self, key: int, victim: int) -> bool:
        """Whether ``key`` deserves the slot of ``victim``."""


class Lfu:
    """Counts with slow decay: a later choice weighs more, which equals older ones fading."""

    blind = False

    def __init__(self, num_keys: int, half_life: float = HALF_LIFE_TOKENS) -> None:
        self.scores = [0.0] * num_keys
        self._weight = 1.0
        self._growth = 2.0 ** (1.0 / half_life)

    def touch(self, key: int, weight: int = 1) -> None:
        """Count the choice at today's weight."""
        self.scores[key] += self._weight * weight

    def tick(self, tokens: int) -> None:
        """Let the weight grow; scale everything down before it overflows."""
        self._weight *= self._growth**tokens
        if self._weight > _RESCALE_ABOVE:
            self.scores = [score / self._weight for score in self.scores]
            self._weight = 1.0

    def prefers(self, key: int, victim: int) -> bool:
        """Strictly hotter, so that equals do not push each other out."""
        return self.scores[key] > self.scores[victim]


class Lru:
    """The time of the last choice; the newcomer always beats a victim."""

    blind = False

    def __init__(self, num_keys: int) -> None:
        self.scores = [0.0] * num_keys
        self._now = 0.0

    def touch(self, key: int, weight: int = 1) -> None:
        """Note the time."""
        del weight
        self._now += 1.0
        self.scores[key] = self._now

    def tick(self, tokens: int) -> None:
        """Time counts choices, not tokens."""

    def prefers(self, key: int, victim: int) -> bool:
        """The later choice."""
        return self.scores[key] > self.scores[victim]


class Random:
    """Any slot will do: the baseline that the others have to beat."""

    blind = True

    def __init__(self, num_keys: int) -> None:
        self.scores = [0.0] * num_keys

    def touch(self, key: int, weight: int = 1) -> None:
        """Nothing is remembered."""

    def tick(self, tokens: int) -> None:
        """Nothing fades."""

    def prefers(self, key: int, victim: int) -> bool:
        """Always."""
        return True


POLICIES: dict[str, type[Lfu] | type[Lru] | type[Random]] = {
    "lfu": Lfu,
    "lru": Lru,
    "random": Random,
}
"""Policies by the name that users give."""


def open_policy(name: str, num_keys: int) -> Policy:
    """The policy of that name over ``num_keys`` experts."""
    if name not in POLICIES:
        raise ValueError(f"policy is {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](num_keys)
