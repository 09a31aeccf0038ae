"""Records whose parts go to different places arrive whole, wherever these lie."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.kernels.base import SlotPart
from aegis.tiers import ExpertFiles, ExpertTiers, PythonReadPool, SlotPool
from aegis.tiers.scatter import Scatter

PAGE = 4096
SLOTS = 5
EXPERTS = 6


class Pools:
    """Memory for the parts of slots, and what lies there."""

    def __init__(self, ranges: list[tuple[int, int]], misaligned: tuple[int, ...] = ()) -> None:
        """ranges: (offset, nbytes) of each part; misaligned: parts that start off a page."""
        self._held, parts = [], []
        for index, (offset, nbytes) in enumerate(ranges):
            held = mmap.mmap(-1, (SLOTS + 1) * nbytes + PAGE)
            start = ctypes.addressof(ctypes.c_char.from_buffer(held))
            parts.append(SlotPart(offset, nbytes, start + 24 * (index in misaligned), nbytes))
            self._held.append(held)
        self.parts = tuple(parts)

    def read(self, slot: int, nbytes: int) -> bytes:
        """A slot as the record it came from; what no part has is zero."""
        record = bytearray(nbytes)
        for part in self.parts:
            data = ctypes.string_at(part.base + slot * part.stride, part.nbytes)
            record[part.offset : part.offset + part.nbytes] = data
        return bytes(record)


def padded(record: bytes, parts: tuple[SlotPart, ...]) -> bytes:
    """A record without what no part has."""
    kept = bytearray(len(record))
    for part in parts:
        end = part.offset + part.nbytes
        kept[part.offset : end] = record[part.offset : end]
    return bytes(kept)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Parts on page boundaries, some of whole pages, and the record's size."""
    ranges, end = [], 0
    for nbytes in draw(
        st.lists(st.sampled_from([100, PAGE, PAGE + 1, 3 * PAGE, 5000]), min_size=1, max_size=6)
    ):
        start = -(-end // PAGE) * PAGE + PAGE * draw(st.integers(0, 1))
        ranges.append((start, nbytes))
        end = start + nbytes
    return ranges, -(-end // PAGE) * PAGE + PAGE * draw(st.integers(0, 1))


@given(layouts(), st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=3, unique=True))
def test_every_byte_of_every_part_arrives(
    tmp_path_factory: pytest.TempPathFactory,
    layout: tuple[list[tuple[int, int]], int],
    slots: list[int],
) -> None:
    ranges, nbytes = layout
    pools = Pools(ranges, misaligned=(1,))
    records = [random.Random(slot).randbytes(nbytes) for slot in slots]
    path = tmp_path_factory.getbasetemp() / "scattered"
    path.write_bytes(b"".join(records))
    checksums = [zlib.crc32(record) for record in records]
    checksums[-1] ^= 1
    fd = os.open(path, os.O_RDONLY)
    pool = PythonReadPool(1, scatter=Scatter(pools.parts, nbytes))
    try:
        ticket = pool.submit_run(fd, 0, nbytes, slots, True, checksums)
        pool.wait(ticket)
        assert pool.damaged(ticket) == [len(slots) - 1]
        assert pool.result(ticket) == nbytes * len(slots)
    finally:
        pool.close()
        os.close(fd)
    for slot, record in zip(slots, records, strict=True):
        assert pools.read(slot, nbytes) == padded(record, pools.parts)


def test_aligned_parts_are_read_into_without_a_copy() -> None:
    pools = Pools([(0, 2 * PAGE), (2 * PAGE, PAGE)])
    scatter = Scatter(pools.parts, 3 * PAGE)
    (views,), copies = scatter.places([3])
    assert scatter.bounce_nbytes == 0
    assert not copies
    assert [len(view) for view in views] == [2 * PAGE, PAGE]


def test_only_what_is_off_its_alignment_is_bounced() -> None:
    pools = Pools([(0, 2 * PAGE), (2 * PAGE, 100), (3 * PAGE, PAGE)], misaligned=(2,))
    scatter = Scatter(pools.parts, 5 * PAGE)
    assert scatter.bounce_nbytes == 3 * PAGE
    _, copies = scatter.places([0])
    assert sorted(copy.nbytes for copy in copies) == [100, PAGE]


def test_nothing_is_read_into_memory_that_takes_no_direct_reads() -> None:
    pools = Pools([(0, 2 * PAGE), (2 * PAGE, PAGE)])
    scatter = Scatter([replace(part, direct=False) for part in pools.parts], 3 * PAGE)
    (views,), copies = scatter.places([3])
    assert scatter.bounce_nbytes == 3 * PAGE
    assert [len(view) for view in views] == [3 * PAGE]
    assert [(copy.target, copy.nbytes) for copy in copies] == [
        (part.base + 3 * part.stride, part.nbytes) for part in pools.parts
    ]


def test_short_reads_go_on_where_they_ended(tmp_path: Path) -> None:
    pools = Pools([(0, PAGE), (PAGE, 100)])
    record = random.Random(1).randbytes(2 * PAGE)
    path = tmp_path / "record"
    path.write_bytes(record)

    def few(fd: int, views: list[memoryview], offset: int) -> int:
        return os.preadv(fd, [views[0][:1000]], offset)

    fd = os.open(path, os.O_RDONLY)
    pool = PythonReadPool(1, read=few, scatter=Scatter(pools.parts, len(record)))
    ticket = pool.submit(fd, 0, len(record), 2, True, zlib.crc32(record))
    pool.wait(ticket)
    assert pool.damaged(ticket) == []
    assert pool.result(ticket) == len(record)
    pool.close()
    os.close(fd)
    assert pools.read(2, len(record)) == padded(record, pools.parts)


def test_a_record_that_is_damaged_is_told_and_read_once(tmp_path: Path) -> None:
    pools = Pools([(0, PAGE), (PAGE, 100)])
    record = random.Random(3).randbytes(2 * PAGE)
    path = tmp_path / "record"
    path.write_bytes(record[:-4000] + bytes([record[-4000] ^ 1]) + record[-3999:])
    calls = []

    def counted(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return os.preadv(fd, views, offset)

    fd = os.open(path, os.O_RDONLY)
    pool = PythonReadPool(1, read=counted, scatter=Scatter(pools.parts, len(record)))
    ticket = pool.submit(fd, 0, len(record), 1, True, zlib.crc32(record))
    pool.wait(ticket)
    assert pool.damaged(ticket) == [0]
    pool.close()
    os.close(fd)
    assert len(calls) == 1


def tiers_of(
    folder: Path,
    pools: Pools,
    stride: int,
    settle: Callable[[], None],
    num_slots: int = SLOTS,
    **options: Any,
) -> ExpertTiers:
    """Two layers of three experts over slots in parts."""
    paths = []
    for layer in range(2):
        path = folder / f"layer_{layer:03}.bin"
        path.write_bytes(b"".join(record_of(layer, expert, stride) for expert in range(3)))
        paths.append(path)
    files = ExpertFiles(paths, stride - 1, stride, 3)
    slots = SlotPool(num_slots, stride, parts=pools.parts)
    slots.settle = settle
    options = {"guess": "none"} | options
    return ExpertTiers(files, slots, num_experts_per_tok=2, staging_slots=2, **options)


def use(tiers: ExpertTiers, layer: int, experts: list[int]) -> None:
    """Acquire experts and let them go."""
    with tiers.acquire(layer, experts) as acquired:
        while not acquired.complete:
            acquired.wait()


def record_of(layer: int, expert: int, nbytes: int) -> bytes:
    """The bytes of one expert."""
    return random.Random(layer * 100 + expert).randbytes(nbytes)


def test_slots_in_parts_hold_their_experts_also_after_moving(tmp_path: Path) -> None:
    pools, stride = Pools([(0, PAGE), (PAGE, 777)]), 2 * PAGE
    with tiers_of(tmp_path, pools, stride, lambda: None) as tiers:
        for layer, experts in ((0, [0, 1]), (1, [0, 2])):
            use(tiers, layer, experts)
        assert tiers.release_slots(1) == 1
        for key, slot in tiers.slots.slot_of.items():
            record = record_of(*divmod(key, 3), stride)
            assert pools.read(slot, stride) == padded(record, pools.parts)
        tiers.files.close()


def test_nothing_is_written_to_a_slot_before_computations_have_ended(tmp_path: Path) -> None:
    pools, stride = Pools([(0, PAGE), (PAGE, 777)]), 2 * PAGE
    waited = []
    with tiers_of(tmp_path, pools, stride, lambda: waited.append(None)) as tiers:
        use(tiers, 0, [0, 1])
        before = len(waited)
        assert before >= 2, "a read begins only after settling"
        use(tiers, 0, [0, 1])
        assert len(waited) == before, "hits need not wait"
        tiers.release_slots(1)
        assert len(waited) > before
        tiers.files.close()


def test_the_table_of_a_layer_is_there_when_all_its_experts_are(tmp_path: Path) -> None:
    pools, stride = Pools([(0, 2 * PAGE)]), 2 * PAGE
    with tiers_of(tmp_path, pools, stride, lambda: None) as tiers:
        assert tiers.table(0) is None
        for experts in ([0, 1], [1, 2]):
            use(tiers, 0, experts)
        table = tiers.table(0)
        assert table is not None
        assert [pools.read(slot, stride) for slot in table.tolist()] == [
            record_of(0, expert, stride) for expert in range(3)
        ]
        assert tiers.table(0) is table, "unchanged, so the same"
        for experts in ([0, 1], [1, 2]):
            use(tiers, 1, experts)
        tables = [tiers.table(0), tiers.table(1)]
        assert sum(table is not None for table in tables) <= 1, "five slots for six experts"
        tiers.recover()
        resident = [sum(key // 3 == layer for key in tiers.slots.slot_of) for layer in range(2)]
        assert [tiers.table(layer) is not None for layer in range(2)] == [n == 3 for n in resident]
        tiers.files.close()


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, int, list[int]]:
    """Something that makes experts come, go or move."""
    kind = draw(st.sampled_from(["use", "use", "use", "release", "recover"]))
    experts = draw(st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True))
    return kind, draw(st.integers(0, 1)), sorted(experts)


@given(st.lists(steps(), min_size=1, max_size=25), st.integers(4, EXPERTS))
def test_a_table_says_where_the_experts_lie_whatever_came_and_went(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, int, list[int]]], slots: int
) -> None:
    pools, stride = Pools([(0, 2 * PAGE)]), 2 * PAGE
    folder = tmp_path_factory.mktemp("tables")
    with tiers_of(folder, pools, stride, lambda: None, slots) as tiers:
        for kind, layer, experts in plan:
            if kind == "use":
                use(tiers, layer, experts)
            elif kind == "release":
                tiers.release_slots(1)
            else:
                tiers.recover()
            for at in range(2):
                where = {e: tiers.slots.slot_of.get(3 * at + e) for e in range(3)}
                table = tiers.table(at)
                if None in where.values():
                    assert table is None
                else:
                    assert table is not None
                    assert dict(enumerate(table.tolist())) == where
                    for expert, slot in enumerate(table.tolist()):
                        assert pools.read(slot, stride) == record_of(at, expert, stride)
        tiers.files.close()


@pytest.mark.parametrize(
    ("num_slots", "guess", "comes"),
    [(EXPERTS, "previous", True), (EXPERTS, "none", False), (SLOTS, "previous", False)],
)
def test_experts_that_nobody_chose_fill_slots_that_nobody_else_will_need(
    tmp_path: Path, num_slots: int, guess: str, comes: bool
) -> None:
    pools, stride = Pools([(0, 2 * PAGE)]), 2 * PAGE
    with tiers_of(
        tmp_path, pools, stride, lambda: None, num_slots, guess=guess, guess_width=1
    ) as tiers:
        for _ in range(2):
            for layer in range(2):
                use(tiers, layer, [0, 1])
                assert tiers.fill(layer) <= 1, "no more than guesses may be under way"
                tiers._queue.settle_unpinned()
        while tiers.fill(0) + tiers.fill(1):
            while tiers._queue.in_flight:
                tiers._queue.collect()
        tables = [tiers.table(layer) for layer in range(2)]
        assert [table is not None for table in tables] == [comes, comes]
        for layer, table in enumerate(tables):
            for expert, slot in enumerate([] if table is None else table.tolist()):
                assert pools.read(slot, stride) == record_of(layer, expert, stride)
        tiers.files.close()
