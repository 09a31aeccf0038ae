"""What the machine, or a container around the process, lets a plan have."""

from __future__ import annotations

from dataclasses import dataclass

from aegis.planner.units import format_size


@dataclass(frozen=True)
class Surroundings:
    """Bytes, as the engine found them. None: unknown, or no bound."""

    ceiling_nbytes: int | None = None
    """More than this no process here can ever hold."""
    ceiling: str = "this machine's memory"
    """What the ceiling is, for a sentence."""
    free_nbytes: int | None = None
    """What a plan can have now without taking it from other programs."""
    cap: str = "cap"
    """What the cap that bounds a plan here is called."""
    remedy: str = "use a shorter context"
    """What to do where even the smallest plan is above the ceiling."""

    def holds(self, nbytes: int) -> bool:
        """Whether a plan of so many bytes can exist here at all."""
        return self.ceiling_nbytes is None or nbytes <= self.ceiling_nbytes

    def excess(self, nbytes: int) -> str:
        """By how much a plan is too large, for people."""
        assert self.ceiling_nbytes is not None
        return f"{format_size(nbytes - self.ceiling_nbytes)} above {self.ceiling}"

    def refusal(self, nbytes: int, min_cap_nbytes: int) -> str:
        """One sentence about a plan that is too large, with what to do."""
        assert self.ceiling_nbytes is not None
        remedy = f"use a {self.cap} of at most {self.ceiling_nbytes}B"
        if min_cap_nbytes > self.ceiling_nbytes:
            remedy = (
                f"even the smallest {self.cap} that opens, {min_cap_nbytes}B, is above it, so"
                f" {self.remedy}"
            )
        return (
            f"the plan takes {format_size(nbytes)}, but {self.ceiling} ends at"
            f" {format_size(self.ceiling_nbytes)}; {remedy}"
        )

    def warnings(self, cap_nbytes: int, nbytes: int, reserve_nbytes: int) -> tuple[str, ...]:
        """Sentences about a plan of ``nbytes`` that may run, but not as well as it says."""
        found = []
        if self.holds(nbytes) and not self.holds(cap_nbytes):
            assert self.ceiling_nbytes is not None
            found.append(
                f"the {self.cap} of {format_size(cap_nbytes)} is above {self.ceiling}, which ends"
                f" at {format_size(self.ceiling_nbytes)}; the plan fits since it needs no more than"
                f" {format_size(nbytes)}"
            )
        # What is free is an estimate, and the reserve is rarely used.
        if self.free_nbytes is not None and nbytes - reserve_nbytes > self.free_nbytes:
            found.append(
                f"the plan takes {format_size(nbytes)}, but only"
                f" {format_size(self.free_nbytes)} are free now; other programs may be slowed down"
                f" or this one be killed: stop some, or use a smaller {self.cap}"
            )
        return tuple(found)


NO_BOUND = Surroundings()
"""Nothing is known, so nothing is refused."""
