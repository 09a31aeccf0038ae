"""Expert files with known bytes and read pools without threads, for the tests of tiers."""

import ctypes
import mmap
import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aegis.tiers import Arena, ExpertFiles, SlotPool
from aegis.tiers.read_pool import UNCHECKED
from aegis.tiers.slots import FREE, NOWHERE, READING, RESIDENT

STRIDE = 4096


def expert_bytes(layer_index: int, expert: int, stride: int = STRIDE) -> bytes:
    """What the record of an expert holds: its key, over and over."""
    words = np.full(stride // 4, layer_index * 65536 + expert, dtype=np.uint32)
    words[::7] = np.arange(len(words[::7]))
    return words.tobytes()


def write_expert_files(
    folder: Path, num_layers: int, num_experts: int, stride: int = STRIDE
) -> list[Path]:
    """One file per layer, on the disk and out of the page cache."""
    paths = [folder / f"layer_{layer_index:03}.bin" for layer_index in range(num_layers)]
    for layer_index, path in enumerate(paths):
        with open(path, "wb") as file:
            for expert in range(num_experts):
                file.write(expert_bytes(layer_index, expert, stride))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return paths


def cached_nbytes(path: Path) -> int:
    """How much of a file lies in the page cache (mincore)."""
    size = path.stat().st_size
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as view:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


class SlotReader:
    """Slots in an arena, and what lies in them."""

    def __init__(self, num_slots: int, stride: int = STRIDE, extra_nbytes: int = 0) -> None:
        self.arena = Arena(num_slots * stride + extra_nbytes)
        if extra_nbytes:
            self.arena.take("other", extra_nbytes)
        self.slots = SlotPool.in_arena(self.arena, num_slots, stride)

    def read(self, slot: int) -> bytes:
        """The bytes of one slot."""
        return ctypes.string_at(self.slots.base + slot * self.slots.stride, self.slots.stride)

    def check(
        self, layer_index: int, batch: tuple[NDArray[np.int32], NDArray[np.int32]]
    ) -> list[int]:
        """Every delivered slot holds its expert's bytes; returns the experts."""
        experts, slots = batch
        assert experts.dtype == slots.dtype == np.int32
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            assert self.slots.pins[slot] > 0
            assert self.read(slot) == expert_bytes(layer_index, expert, self.slots.stride)
        assert experts.tolist() == sorted(set(experts.tolist()))
        return list(experts.tolist())


def check_slots(slots: SlotPool) -> None:
    """The invariants of a slot pool."""
    used = set(range(slots.capacity))
    hot, transient, free = set(slots.hot), set(slots.transient), set(slots.free)
    assert len(hot) == len(slots.hot)
    assert len(free) == len(slots.free)
    assert hot | transient | free == used
    assert len(hot) + len(transient) + len(free) == len(used)
    assert {key: slots.slot_of[key] for key in slots.slot_of} == {
        slots.key_of[slot]: slot for slot in hot | transient
    }
    for slot in range(slots.num_slots):
        if slot in free or slot not in used:
            assert slots.state[slot] == FREE
            assert (slots.key_of[slot], slots.pins[slot]) == (NOWHERE, 0)
            assert not slots.guessed[slot]
        assert (slots.hot_index[slot] != NOWHERE) == (slot in hot)
    for slot in hot:
        assert slots.state[slot] == RESIDENT
        assert slots.hot[slots.hot_index[slot]] == slot
    for slot in transient:
        assert slots.state[slot] in (READING, RESIDENT)


class ShufflingPool:
    """A read pool whose reads begin and end whenever a seeded draw says so; no threads."""

    def __init__(self, seed: int, threads: int = 2) -> None:
        self._rng = random.Random(seed)
        self._threads = threads
        self._next = 1
        self._queued: dict[int, tuple[int, int, int, Sequence[int], bool]] = {}
        self._running: dict[int, tuple[int, int, int, Sequence[int], bool]] = {}
        self._results: dict[int, int] = {}
        self._checks: dict[int, tuple[int, Sequence[int], Sequence[int]]] = {}
        self.checked = 0
        """Records whose checksum was compared."""
        self.read_nbytes = 0
        self.busy_s = 0.0

    @property
    def depth(self) -> int:
        return len(self._queued) + len(self._running)

    def submit(
        self, fd: int, offset: int, nbytes: int, address: int, demand: bool, checksum: int = -1
    ) -> int:
        return self.submit_run(fd, offset, nbytes, [address], demand, [checksum])

    def submit_run(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        addresses: Sequence[int],
        demand: bool,
        checksums: Sequence[int] = (),
    ) -> int:
        ticket = self._next
        self._next += 1
        self._queued[ticket] = (fd, offset, nbytes, addresses, demand)
        self._checks[ticket] = (nbytes, addresses, checksums)
        self._advance()
        return ticket

    def promote(self, ticket: int) -> bool:
        if ticket not in self._queued or self._queued[ticket][4]:
            return False
        self._queued[ticket] = (*self._queued[ticket][:4], True)
        return True

    def cancel(self, ticket: int) -> bool:
        return self._queued.pop(ticket, None) is not None

    def done(self, ticket: int) -> bool:
        return ticket in self._results

    def wait(self, ticket: int) -> None:
        self.wait_any([ticket])

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        self._advance()
        while block and tickets and not any(ticket in self._results for ticket in tickets):
            self._advance()
        return [ticket for ticket in tickets if ticket in self._results]

    def damaged(self, ticket: int) -> list[int]:
        nbytes, addresses, checksums = self._checks.pop(ticket)
        asked = [i for i, checksum in enumerate(checksums) if checksum != UNCHECKED]
        self.checked += len(asked)
        return [
            i for i in asked if zlib.crc32(ctypes.string_at(addresses[i], nbytes)) != checksums[i]
        ]

    def result(self, ticket: int) -> int:
        return self._results.pop(ticket)

    def close(self) -> None:
        self._queued.clear()

    def _advance(self) -> None:
        if self._queued and len(self._running) < self._threads and self._rng.random() < 0.6:
            demands = [ticket for ticket, job in self._queued.items() if job[4]]
            ticket = min(demands or self._queued)
            self._running[ticket] = self._queued.pop(ticket)
        for ticket in list(self._running):
            if self._rng.random() < 0.5:
                self._results[ticket] = self._perform(*self._running.pop(ticket)[:4])
                self.read_nbytes += self._results[ticket]

    def _perform(self, fd: int, offset: int, nbytes: int, addresses: Sequence[int]) -> int:
        piece = ctypes.c_char * nbytes
        return os.preadv(fd, [piece.from_address(address) for address in addresses], offset)


class CountingPool:
    """A read pool that reads nothing, at once: for simulations of what is read."""

    def __init__(self) -> None:
        self.read_nbytes = 0
        self.depth = 0
        self.busy_s = 0.0
        self._results: list[int] = []

    def submit(
        self, fd: int, offset: int, nbytes: int, address: int, demand: bool, checksum: int = -1
    ) -> int:
        return self.submit_run(fd, offset, nbytes, [address], demand, [checksum])

    def submit_run(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        addresses: Sequence[int],
        demand: bool,
        checksums: Sequence[int] = (),
    ) -> int:
        self._results.append(nbytes * len(addresses))
        self.read_nbytes += self._results[-1]
        return len(self._results)

    def promote(self, ticket: int) -> bool:
        return False

    def cancel(self, ticket: int) -> bool:
        return False

    def done(self, ticket: int) -> bool:
        return True

    def wait(self, ticket: int) -> None:
        pass

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        return list(tickets)

    def damaged(self, ticket: int) -> list[int]:
        return []

    def result(self, ticket: int) -> int:
        return self._results[ticket - 1]

    def close(self) -> None:
        pass


def open_files(paths: Sequence[Path], num_experts: int, stride: int = STRIDE) -> ExpertFiles:
    """Expert files whose records carry 64 bytes of padding, with the checksums of what
    ``write_expert_files`` writes."""
    checksums = [
        [zlib.crc32(expert_bytes(layer_index, expert, stride)) for expert in range(num_experts)]
        for layer_index in range(len(paths))
    ]
    return ExpertFiles(paths, stride - 64, stride, num_experts, checksums=checksums)
