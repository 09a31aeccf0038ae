"""A record whose bytes are not those that were written is never handed out, and said once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_fakes import (
    STRIDE,
    ShufflingPool,
    SlotReader,
    check_slots,
    open_files,
    write_expert_files,
)

from aegis.tiers import (
    DamagedExpertError,
    ExpertFiles,
    ExpertTiers,
    PythonReadPool,
    ReadError,
    ReadPool,
    open_read_pool,
)
from aegis.tiers.read_pool import UNCHECKED

NUM_LAYERS, NUM_EXPERTS, CHOSEN = 3, 12, 4
DAMAGED = 5
EVERYONE = list(range(NUM_EXPERTS))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return write_expert_files(tmp_path, NUM_LAYERS, NUM_EXPERTS)


@pytest.fixture
def files(paths: list[Path]) -> Iterator[ExpertFiles]:
    with open_files(paths, NUM_EXPERTS) as opened:
        yield opened


@pytest.fixture(params=["native", "python"])
def pool(request: pytest.FixtureRequest) -> Iterator[ReadPool]:
    opened = open_read_pool(2) if request.param == "native" else PythonReadPool(2)
    yield opened
    opened.close()


@pytest.fixture(params=[CHOSEN, 9, NUM_LAYERS * NUM_EXPERTS])
def memory(request: pytest.FixtureRequest) -> Iterator[SlotReader]:
    reader = SlotReader(request.param)
    yield reader
    reader.arena.close()


def flip(path: Path, offset: int) -> None:
    """Change one byte, or change it back."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))
        file.flush()
        os.fsync(file.fileno())


def open_tiers(
    files: ExpertFiles, memory: SlotReader, pool: ReadPool, guess: str = "cross-layer"
) -> ExpertTiers:
    capacity = memory.slots.capacity
    return ExpertTiers(
        files,
        memory.slots,
        num_experts_per_tok=CHOSEN,
        staging_slots=max(1, capacity // 2),
        guess=guess,
        pool=pool,
    )


def decode(tiers: ExpertTiers, memory: SlotReader, layer: int, chosen: list[int]) -> list[int]:
    """What is handed out, before an error too; all of it is right."""
    delivered: list[int] = []
    with tiers.acquire(layer, chosen) as acquisition:
        try:
            while not acquisition.complete:
                delivered += memory.check(layer, acquisition.wait())
        except ReadError:
            check_slots(memory.slots)
            assert set(delivered) < set(chosen)
            raise
    assert sorted(delivered) == chosen
    return delivered


def prefill(tiers: ExpertTiers, memory: SlotReader, layer: int, ahead: list[int]) -> None:
    """Every expert of a layer."""
    delivered: list[int] = []
    try:
        for batch in tiers.prefill_layer(layer, EVERYONE, ahead):
            delivered += memory.check(layer, batch)
    except ReadError:
        assert delivered == EVERYONE[: len(delivered)]
        assert DAMAGED not in delivered
        raise
    finally:
        tiers.end_prefill()
    assert delivered == EVERYONE


@pytest.mark.parametrize("offset", [0, 1000, STRIDE - 1], ids=["first", "inner", "padding"])
def test_a_damaged_record_is_an_error_in_decode_until_it_is_whole(
    files: ExpertFiles, paths: list[Path], memory: SlotReader, pool: ReadPool, offset: int
) -> None:
    at = DAMAGED * STRIDE + offset
    flip(paths[1], at)
    with open_tiers(files, memory, pool) as tiers:
        for _ in range(2):
            with pytest.raises(DamagedExpertError) as caught:
                decode(tiers, memory, 1, [0, 4, DAMAGED, 6])
            error = caught.value
            assert (error.file, error.offset) == (str(paths[1]), DAMAGED * STRIDE)
            assert (error.layer, error.expert) == (1, DAMAGED)
            assert str(error) == (
                f"{paths[1]}: the record of layer 1, expert {DAMAGED} at offset "
                f"{DAMAGED * STRIDE} is damaged (checksum mismatch); convert the model again"
            )
            decode(tiers, memory, 1, [0, 3, 4, 6])
            decode(tiers, memory, 2, [0, 4, DAMAGED, 6])
        flip(paths[1], at)
        decode(tiers, memory, 1, [0, 4, DAMAGED, 6])
    assert not any(memory.slots.pins)


def test_a_damaged_record_that_was_guessed_is_not_handed_out(
    files: ExpertFiles, paths: list[Path], pool: ReadPool
) -> None:
    memory = SlotReader(12)
    flip(paths[1], DAMAGED * STRIDE)
    with open_tiers(files, memory, pool) as tiers:
        for settled in (False, True):
            assert tiers.guess(1, [DAMAGED, 8]) >= 1
            if settled:
                tiers._queue.settle_unpinned()
            with pytest.raises(DamagedExpertError, match=f"layer 1, expert {DAMAGED} "):
                decode(tiers, memory, 1, [0, 4, DAMAGED, 6])
            check_slots(memory.slots)
        tiers.guess(1, [DAMAGED, 8])
        decode(tiers, memory, 1, [0, 4, 6, 8])
        flip(paths[1], DAMAGED * STRIDE)
        tiers.guess(1, [DAMAGED])
        decode(tiers, memory, 1, [0, 4, DAMAGED, 6])
    memory.arena.close()


@pytest.mark.parametrize("ahead", [[], EVERYONE], ids=["on demand", "ahead"])
def test_a_damaged_record_is_an_error_in_prefill_until_it_is_whole(
    files: ExpertFiles, paths: list[Path], memory: SlotReader, pool: ReadPool, ahead: list[int]
) -> None:
    flip(paths[1], DAMAGED * STRIDE + 77)
    with open_tiers(files, memory, pool) as tiers:
        for _ in range(2):
            prefill(tiers, memory, 0, ahead)
            with pytest.raises(DamagedExpertError, match=f"layer 1, expert {DAMAGED} "):
                prefill(tiers, memory, 1, ahead)
            check_slots(memory.slots)
            prefill(tiers, memory, 2, [])
            decode(tiers, memory, 1, [3, 4, 6, 7])
        flip(paths[1], DAMAGED * STRIDE + 77)
        for layer in range(NUM_LAYERS):
            prefill(tiers, memory, layer, ahead)
    assert not any(memory.slots.pins)


def test_after_an_error_a_visit_goes_on_where_the_record_is_whole_again(
    files: ExpertFiles, paths: list[Path], memory: SlotReader, pool: ReadPool
) -> None:
    flip(paths[0], DAMAGED * STRIDE)
    delivered: list[int] = []

    def visit_all() -> None:
        for batch in visit:
            delivered.extend(memory.check(0, batch))

    with open_tiers(files, memory, pool) as tiers:
        visit = tiers.prefill_layer(0, EVERYONE)
        with pytest.raises(DamagedExpertError):
            visit_all()
        flip(paths[0], DAMAGED * STRIDE)
        visit_all()
    assert delivered == EVERYONE


def test_two_damaged_records_of_one_read_are_both_found(
    files: ExpertFiles, paths: list[Path], pool: ReadPool
) -> None:
    memory = SlotReader(24)
    for expert in (DAMAGED, DAMAGED + 1):
        flip(paths[0], expert * STRIDE)
    with open_tiers(files, memory, pool) as tiers:
        with pytest.raises(DamagedExpertError):
            prefill(tiers, memory, 0, [])
        for expert in (DAMAGED, DAMAGED + 1):
            with pytest.raises(DamagedExpertError, match=f"expert {expert} "):
                decode(tiers, memory, 0, [0, 1, 2, expert])
    memory.arena.close()


@given(st.integers(0, 1 << 32), st.integers(CHOSEN, 40))
def test_each_record_is_checked_once(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_slots: int
) -> None:
    paths = write_expert_files(tmp_path_factory.mktemp("once"), NUM_LAYERS, NUM_EXPERTS)
    memory, shuffling = SlotReader(num_slots), ShufflingPool(seed)
    with (
        open_files(paths, NUM_EXPERTS) as files,
        open_tiers(files, memory, shuffling) as tiers,
    ):
        for turn in range(2):
            for layer in range(NUM_LAYERS):
                decode(tiers, memory, layer, [1, 3, 7, 9])
                tiers.guess((layer + 1) % NUM_LAYERS, [4, 6, 3])
            for layer in range(NUM_LAYERS):
                prefill(tiers, memory, layer, EVERYONE)
            if turn == 0:
                tiers.recover()
        assert shuffling.checked == NUM_LAYERS * NUM_EXPERTS
        everything = [files.checksum(i, e) for i in range(NUM_LAYERS) for e in EVERYONE]
        assert everything == [UNCHECKED] * NUM_LAYERS * NUM_EXPERTS
    memory.arena.close()


def test_a_second_read_is_taken_as_it_is(
    files: ExpertFiles, paths: list[Path], pool: ReadPool
) -> None:
    memory = SlotReader(CHOSEN)
    with open_tiers(files, memory, pool, guess="none") as tiers:
        decode(tiers, memory, 0, [0, 1, 2, 3])
        decode(tiers, memory, 0, [4, 5, 6, 7])
        flip(paths[0], STRIDE)
        with tiers.acquire(0, [0, 1, 2, 3]) as acquisition:
            while not acquisition.complete:
                acquisition.wait()
    memory.arena.close()


def test_the_layer_is_told_by_the_models_own_number(paths: list[Path], pool: ReadPool) -> None:
    memory = SlotReader(CHOSEN)
    zeros = [[0] * NUM_EXPERTS] * NUM_LAYERS
    with (
        ExpertFiles(
            paths, STRIDE, STRIDE, NUM_EXPERTS, checksums=zeros, layers=[3, 7, 11]
        ) as files,
        open_tiers(files, memory, pool) as tiers,
        pytest.raises(DamagedExpertError, match="layer 7, expert 2 "),
    ):
        decode(tiers, memory, 1, [2])
    memory.arena.close()
