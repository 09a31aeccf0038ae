"""What the tiers did: counted per MoE layer, prefill and decode apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class Counters:
    """Counts of one layer in one phase. Every choice is one of hit, miss or late."""

    hits: int = 0
    """Chosen experts that lay in a slot when asked for."""
    hot_hits: int = 0
    """Those of the hits that the hot tier held; the others lay in transient or staging slots."""
    misses: int = 0
    """Chosen experts that nobody had begun to read."""
    late: int = 0
    """Chosen experts whose guess was queued or being read."""
    guesses: int = 0
    """Reads issued for a guess."""
    useful: int = 0
    """Guesses that were chosen, in time or late."""
    wasted: int = 0
    """Guesses that were read and dropped without ever being chosen."""
    cancelled: int = 0
    """Guesses withdrawn before the disk began."""
    read_nbytes: int = 0
    """Bytes that arrived from the expert file: whole record strides."""
    wait_s: float = 0.0
    """Seconds that the caller stood waiting for reads."""

    @property
    def choices(self) -> int:
        """Experts asked for."""
        return self.hits + self.misses + self.late

    @property
    def hit_rate(self) -> float:
        """hits / (hits + misses + late); 0 before the first choice."""
        return self.hits / self.choices if self.choices else 0.0

    def add(self, other: Counters) -> None:
        """Add another's counts to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def since(self, before: Counters) -> Counters:
        """What was counted after ``before``."""
        names = [field.name for field in fields(self)]
        return Counters(*(getattr(self, name) - getattr(before, name) for name in names))

    def as_dict(self) -> dict[str, Any]:
        """Every count, with choices and hit_rate."""
        return asdict(self) | {"choices": self.choices, "hit_rate": self.hit_rate}


@dataclass(slots=True)
class GivenBack:
    """What the slots gave back to the system to stay inside the cap."""

    slots: int = 0
    """Slots that are missing now."""
    nbytes: int = 0
    """Memory that is given back now, in whole 2 MiB ranges."""
    most_nbytes: int = 0
    """The most that was given back at any time."""
    times: int = 0
    """How often memory was given back; it may have been taken again in between."""

    def note(self, slots: int, nbytes: int) -> None:
        """So many slots are missing and so many bytes given back from now on."""
        self.times += nbytes > self.nbytes
        self.slots, self.nbytes = slots, nbytes
        self.most_nbytes = max(self.most_nbytes, nbytes)


class TierStats:
    """Counters per MoE layer for decode and for prefill, and what was given back."""

    def __init__(self, num_layers: int) -> None:
        self.given_back = GivenBack()
        self.decode = [Counters() for _ in range(num_layers)]
        self.prefill = [Counters() for _ in range(num_layers)]

    def totals(self, phase: str | None = None) -> Counters:
        """The sum over layers of "decode", "prefill" or (None) both."""
        if phase not in (None, "decode", "prefill"):
            raise ValueError(f"phase is {phase!r}; use 'decode', 'prefill' or None")
        total = Counters()
        for name in ("decode", "prefill"):
            if phase in (None, name):
                for counters in getattr(self, name):
                    total.add(counters)
        return total

    @property
    def hit_rate(self) -> float:
        """Decode's hits / (hits + misses + late)."""
        return self.totals("decode").hit_rate

    @property
    def read_nbytes(self) -> int:
        """Bytes that arrived from expert files, prefill and decode together."""
        return self.totals().read_nbytes

    def reset(self) -> None:
        """Start counting from zero; reads in flight count when they end."""
        for counters in (self.decode, self.prefill):
            counters[:] = [Counters() for _ in counters]
        now = self.given_back
        self.given_back = GivenBack(now.slots, now.nbytes, now.nbytes)

    def as_dict(self) -> dict[str, Any]:
        """Totals and layers of both phases and what was given back, for JSON."""
        phases = {
            name: {
                "total": self.totals(name).as_dict(),
                "layers": [counters.as_dict() for counters in getattr(self, name)],
            }
            for name in ("decode", "prefill")
        }
        return phases | {"given_back": asdict(self.given_back)}
