"""Watches what the process takes while it runs; near the cap the hot tier gives memory back.

Two things can run out: the cap, measured against the resident size of this process, and the limit
of a container around it, measured against what the kernel charges the container for. Both are
looked at between layers, where no slot is pinned, a few hundred times a second at most. Resident
size comes from /proc/self/statm: 1.4 us, where smaps_rollup walks every page and takes 0.1 to 3 ms.
What was given back is taken again at the beginning of a later prompt, when there is room to spare.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, Protocol

from aegis import heap
from aegis.engine import memory
from aegis.engine.limits import MemoryGroup, MemoryLimits, memory_limits
from aegis.errors import CapExceededError
from aegis.planner import format_size
from aegis.settings import MIB
from aegis.tiers.errors import ArenaError

# Only names for types: with or without them the module does the same.
if TYPE_CHECKING:  # mutate: equivalent
    from aegis.kernels.base import OwnMemory
    from aegis.tiers.arena import Arena
    from aegis.tiers.facade import ExpertTiers

NEAR_NBYTES = 4 * MIB
"""Memory is given back until so much is free: what may come between two looks."""
SPARE_NBYTES = 2 * NEAR_NBYTES
"""What stays free when memory is taken again, so that it is not given back at once."""
FULL_NBYTES = 1 * MIB
"""A container's last bytes, which the kernel needs to say no without killing."""

LOOK_S = 0.005
_LONGEST_S = 0.05
_SHARE = 100
"""Looking takes at most one part in this many of the time."""
_TRIM_S = 0.05
_LIMITS_S = 1.0
"""Reading all limits anew takes about a millisecond."""

_STATM = Path("/proc/self/statm")
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_AGAIN_NBYTES = 8 * MIB
"""Of what was read again between two looks: reading ahead can bring in much that nobody needs."""
# Several times what there is to read: a number or seven, and some fifty lines.
_NUMBERS_NBYTES = 128  # mutate: equivalent
_STAT_NBYTES = 16 << 10  # mutate: equivalent


class Gauge(Protocol):
    """Something that can run out."""

    def room(self) -> int:
        """Bytes until it is used up; negative beyond."""

    def exceeded(self) -> str:
        """What is wrong, for a sentence."""

    def close(self) -> None:
        """Close files."""


class ProcessGauge:
    """The cap against this process's resident size."""

    _all: ClassVar[list[weakref.ref[ProcessGauge]]] = []
    """Those of every engine that is open in this process: together they may take the sum. One whose
    opening was interrupted, or that was dropped, is not kept alive, nor its memory."""

    def __init__(
        self,
        cap_nbytes: int,
        arena: Arena,
        runtime: tuple[int, int],
        elsewhere_nbytes: int,
        memory: OwnMemory | None = None,
        device_nbytes: int | None = 0,
    ) -> None:
        """runtime: its figure in the plan, and what was measured before the arena was made. What
        the caller's own program held by then is not the engine's, so it does not count.
        elsewhere_nbytes: what is under the cap and not in this process, as files in memory.
        memory: the backend's, beside the arena. device_nbytes: what a device's libraries take of
        its own memory, which the cap is for, too; None: it has a cap of its own."""
        planned, measured = runtime
        self._device_nbytes = device_nbytes
        self._cap_nbytes, self._arena, self._elsewhere_nbytes = cap_nbytes, arena, elsewhere_nbytes
        self._memory = memory
        held = sum(other._held_nbytes() for other in self._living())
        self._before_nbytes = max(0, measured - held - planned)
        self._fd = _open(_STATM)
        self._process = os.getpid()
        self._self = weakref.ref(self, _forgotten)
        self._all.append(self._self)

    @classmethod
    def _living(cls) -> list[ProcessGauge]:
        """Not those that a forked child finds: the memory that they speak of is its parent's."""
        here, found = os.getpid(), [ref() for ref in list(cls._all)]
        return [gauge for gauge in found if gauge is not None and gauge._process == here]

    @property
    def allowed_nbytes(self) -> int:
        """How large this process may be."""
        return self._before_nbytes + sum(gauge._cap_nbytes for gauge in self._living())

    def _held_nbytes(self) -> int:
        """What was allocated for this engine's model."""
        held = self._arena.nbytes - self._arena.released_nbytes
        if self._memory is None:
            return held
        return held + sum(self._memory.measured().values())

    def taken(self) -> int:
        """Resident size of this process, and what else is under the cap."""
        host, shared = self._sizes()
        device = 0
        if self._memory is not None:
            host, device = self._memory.apart(host, shared)
        if self._device_nbytes is None:
            return host + self._elsewhere_nbytes
        return host + device + self._device_nbytes + self._elsewhere_nbytes

    def _sizes(self) -> tuple[int, int]:
        """Resident size, and the part of it that lies in files."""
        if self._fd is None:
            return memory.resident_nbytes(), 0
        _, resident, shared = os.pread(self._fd, _NUMBERS_NBYTES, 0).split()[:3]
        return int(resident) * _PAGE_NBYTES, int(shared) * _PAGE_NBYTES

    def room(self) -> int:
        """Bytes until the cap."""
        return self.allowed_nbytes - self.taken()

    def exceeded(self) -> str:
        """The process against its cap."""
        others = self.allowed_nbytes - self._cap_nbytes
        besides = f" and the {format_size(others)} that are not this model's" if others else ""
        return (
            f"the process takes {format_size(self.taken())}, above the cap of"
            f" {format_size(self._cap_nbytes)}{besides}, and the hot tier has nothing left to give"
            " back; use a larger cap or hold less beside the model"
        )

    def close(self) -> None:
        """No longer part of the sum."""
        self._all.remove(self._self)
        _close(self._fd)


def _forgotten(gone: weakref.ref[ProcessGauge]) -> None:
    with contextlib.suppress(ValueError):  # it was closed before
        ProcessGauge._all.remove(gone)


class DeviceGauge:
    """A cap of its own against what this process has in a device's memory."""

    _all: ClassVar[weakref.WeakSet[DeviceGauge]] = weakref.WeakSet()
    """Those of every engine that is open in this process: together they may take the sum. One whose
    opening was interrupted, or that was dropped, is not kept alive."""

    def __init__(self, cap_nbytes: int, runtime_nbytes: int, memory: OwnMemory) -> None:
        """runtime_nbytes: what the device's libraries take, once for all engines."""
        self._cap_nbytes, self._runtime_nbytes, self._memory = cap_nbytes, runtime_nbytes, memory
        self._all.add(self)

    def taken(self) -> int:
        """Bytes in the device's memory."""
        return self._runtime_nbytes + self._memory.apart(0, 0)[1]

    def room(self) -> int:
        """Bytes until the cap."""
        return sum(gauge._cap_nbytes for gauge in list(self._all)) - self.taken()

    def exceeded(self) -> str:
        """The process against the device's cap."""
        return (
            f"the process takes {format_size(self.taken())} of the GPU's memory, above the device"
            f" cap of {format_size(self._cap_nbytes)}; use a larger one"
        )

    def close(self) -> None:
        """No longer part of the sum."""
        self._all.discard(self)


class GroupGauge:
    """A container's limit against what it is charged for, less the page cache it can drop."""

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group
        self._usage = os.open(group.usage_path, os.O_RDONLY)
        self._stat = _open(group.folder / "memory.stat")
        self._refaults: int | None = None

    def taken(self) -> int:
        """Bytes charged now; none once the process was moved and the group is gone."""
        with contextlib.suppress(OSError, ValueError):
            return int(os.pread(self._usage, _NUMBERS_NBYTES, 0))
        return 0

    def room(self) -> int:
        """Bytes until the limit. Page cache only counts where it makes a difference: telling it
        apart takes several times as long. Some of it is left to the kernel, which, with little to
        choose from, drops code that is running and has to be read again; where it was, as much more
        is left. Neither is a reason to stop."""
        room = self._group.limit - FULL_NBYTES - self.taken()
        if room >= NEAR_NBYTES:
            return room
        droppable, read_again = self._page_cache()
        room += droppable
        return min(room, max(0, room - NEAR_NBYTES - read_again))

    def _page_cache(self) -> tuple[int, int]:
        """Bytes that no process maps, which the kernel drops before it refuses memory; and bytes
        that it had dropped and that were read again since the last time."""
        if self._stat is None:
            return 0, 0
        try:
            lines = os.pread(self._stat, _STAT_NBYTES, 0).splitlines()
        except OSError:
            return 0, 0
        stat = {name: int(value) for name, _, value in (line.partition(b" ") for line in lines)}
        prefix, cache, mapped = (b"total_", b"cache", b"mapped_file")
        if self._group.version == 2:
            prefix, cache, mapped = (b"", b"file", b"file_mapped")
        cached, used, shared = (stat.get(prefix + n, 0) for n in (cache, mapped, b"shmem"))
        # Linux before 5.9 has one number for all pages.
        refault = prefix + b"workingset_refault"
        refaults = stat.get(refault + b"_file", stat.get(refault, 0))
        before, self._refaults = self._refaults, refaults
        again = 0 if before is None else max(0, refaults - before) * _PAGE_NBYTES
        return max(0, cached - used - shared), min(again, _MOST_AGAIN_NBYTES)

    def exceeded(self) -> str:
        """The container against its limit."""
        return (
            f"this container's memory is used up: {format_size(self.taken())} of the"
            f" {format_size(self._group.limit)} that {self._group.source} allows, and the hot tier"
            " has nothing left to give back; raise that limit or run less in the container"
        )

    def close(self) -> None:
        """Close both files."""
        os.close(self._usage)
        _close(self._stat)


def group_gauges(groups: Sequence[MemoryGroup]) -> list[Gauge]:
    """One for every limited container whose usage can be read."""
    found: list[Gauge] = []
    for group in groups:
        with contextlib.suppress(OSError):
            found.append(GroupGauge(group))
    return found


class Governor:
    """Asks the gauges now and then and acts: gives slots back, or stops with CapExceededError."""

    def __init__(
        self,
        tiers: ExpertTiers,
        process: Gauge,
        limits: Callable[[], MemoryLimits] = memory_limits,
        clock: Callable[[], float] = monotonic,
        device: Gauge | None = None,
    ) -> None:
        """process: this process's cap; device: the one of a device, where it has its own."""
        self._tiers, self._limits, self._clock = tiers, limits, clock
        self._own = [process] if device is None else [process, device]
        self._limited: list[tuple[Path, int]] = []
        self._gauges: list[Gauge] = list(self._own)
        self._due = self._trim_due = self._limits_due = 0.0
        self._room: int | None = None
        self.read_limits()

    def read_limits(self) -> None:
        """Look for limited containers anew, once a second at most: they change while we run."""
        now = self._clock()
        if now < self._limits_due:
            return
        self._limits_due = now + _LIMITS_S
        groups = self._limits().groups
        limited = [(group.source, group.limit) for group in groups]
        if limited != self._limited:
            # In this order: Ctrl-C in between must not leave gauges whose files are closed.
            outdated = self._gauges[len(self._own) :]
            self._gauges = [*self._own, *group_gauges(groups)]
            self._limited = limited
            for gauge in outdated:
                gauge.close()

    def watch(self) -> None:
        """Called between layers: mostly a comparison with the clock.

        Raises:
            CapExceededError: even without the hot tier more is taken than allowed.
        """
        if self._clock() >= self._due:
            self.look()

    def look(self) -> None:
        """Ask the gauges now; see ``watch``."""
        begun = self._clock()
        room = self.room()
        now = self._clock()
        self._due = now + min(max(LOOK_S, _SHARE * (now - begun)), _LONGEST_S)
        if room < NEAR_NBYTES:
            room = self._give_back(room)
        self._room = room

    def room(self) -> int:
        """Bytes until the first of cap and limits is reached; negative beyond."""
        return min([gauge.room() for gauge in self._gauges])

    def _give_back(self, room: int) -> int:
        """Make room again, and for as much growth as came since the last look."""
        grown = max(0, self._room - room) if self._room is not None else 0
        if self._clock() >= self._trim_due:
            heap.trim()
            self._trim_due = self._clock() + _TRIM_S
            room = self.room()
        if self._tiers.release_nbytes(NEAR_NBYTES - room + grown):
            room = self.room()
        if room < 0:
            self._due = 0.0
            raise CapExceededError(min(self._gauges, key=lambda gauge: gauge.room()).exceeded())
        return room

    def retake(self) -> None:
        """Take again what was given back, as far as there is room to spare."""
        slots = self._tiers.slots
        if slots.capacity == slots.num_slots:
            return
        heap.trim()
        # Where another process is quicker there is no memory, and everything stays as it was.
        with contextlib.suppress(ArenaError):
            self._tiers.retake_nbytes(self.room() - SPARE_NBYTES)

    def close(self) -> None:
        """Close the gauges' files."""
        for gauge in self._gauges:
            gauge.close()


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
