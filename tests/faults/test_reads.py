"""Reads that come short, are interrupted, fail or bring garbage, on both read pools.

What a read brings may be late, in pieces, or an error in a sentence; never another result. After an
error the engine goes on with the same bits as if nothing had been.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from engine_tools import Result, difference, result_of
from fault_tools import (
    END,
    GARBLED,
    POOLS,
    SHORT,
    WELL,
    FaultyDisk,
    always,
    faulty_disk,
    mixed,
    only,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_model import IDS, SMALL, needs_native, open_small
from tier_fakes import check_slots

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.errors import ReadError

TOKENS = 6
BACKEND = "reference"
FAULTS = (END, GARBLED, errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.ESTALE)


@pytest.fixture(scope="module")
def expected(sound_store: Store) -> Result:
    """What an undisturbed engine says."""
    with open_small(sound_store, backend=BACKEND) as engine:
        return result_of(engine, IDS, TOKENS)


@dataclass
class Disturbed:
    """An engine whose disk can be made to fail."""

    engine: Engine
    disk: FaultyDisk

    def heal(self) -> None:
        """Every read goes well from here on."""
        self.disk.fault = always(WELL)

    def check(self, expected: Result) -> None:
        """It is as if nothing had been."""
        self.heal()
        assert difference(expected, result_of(self.engine, IDS, TOKENS)) == ""
        self.engine._opened.tiers._queue.drain()
        check_slots(self.engine._opened.tiers.slots)


@pytest.fixture(params=POOLS)
def disturbed(request: pytest.FixtureRequest, sound_store: Store) -> Iterator[Disturbed]:
    with pytest.MonkeyPatch.context() as patch, faulty_disk(always(WELL)) as disk:
        disk.install(patch, request.param)
        with open_small(
            sound_store, backend=BACKEND, max_slots=SMALL.num_experts_per_tok
        ) as engine:
            yield Disturbed(engine, disk)


def test_short_and_interrupted_reads_change_nothing(disturbed: Disturbed, expected: Result) -> None:
    for seed, faults in enumerate(((SHORT,), (errno.EINTR,), (SHORT, errno.EINTR))):
        disturbed.disk.fault = mixed(seed, 0.5, *faults)
        before = disturbed.disk.reads
        assert difference(expected, result_of(disturbed.engine, IDS, TOKENS)) == ""
        assert disturbed.disk.reads > before
    disturbed.check(expected)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (errno.EIO, "Input/output error; check the disk"),
        (errno.ESTALE, "Stale file handle; check the disk"),
        (END, r"only 0 arrived \(has the file been truncated\?\)"),
        (GARBLED, r"is damaged \(checksum mismatch\); convert the model again"),
    ],
)
def test_a_failed_read_in_mid_token_is_a_sentence_and_the_engine_goes_on(
    disturbed: Disturbed, expected: Result, fault: int, sentence: str
) -> None:
    tokens = disturbed.engine.generate(IDS, TOKENS, ignore_eos=True)
    got = [next(tokens) for _ in range(2)]
    if fault == GARBLED:
        # What was whole once is not checked again: make it forget what it has seen.
        checked = disturbed.engine._opened.files._checked
        checked[:] = bytes(len(checked))
    disturbed.disk.fault = always(fault)
    with pytest.raises(ReadError, match=sentence):
        got += list(tokens)
    assert got == expected.tokens[: len(got)]
    disturbed.check(expected)


@pytest.mark.parametrize("number", range(4))
def test_a_read_that_fails_once_in_a_prompt_leaves_nothing_behind(
    disturbed: Disturbed, expected: Result, number: int
) -> None:
    disturbed.disk.fault = only(errno.EIO, disturbed.disk.reads + number)
    with pytest.raises(ReadError, match="Input/output error"):
        disturbed.engine.score(IDS)
    disturbed.check(expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(
    seed=st.integers(0, 2**16),
    rate=st.floats(0.01, 0.6),
    faults=st.lists(st.sampled_from((SHORT, errno.EINTR, *FAULTS)), min_size=1, unique=True),
)
def test_whatever_the_disk_does_a_result_is_right_or_an_error(
    disturbed: Disturbed, expected: Result, seed: int, rate: float, faults: list[int]
) -> None:
    files = disturbed.engine._opened.files
    # A record that was whole once is not checked again, so garbage would pass: check every read.
    files._checked[:] = bytes(len(files._checked))
    files.note_intact = lambda *record: None  # type: ignore[method-assign]
    disturbed.disk.fault = mixed(seed, rate, *faults)
    for ids in (IDS, IDS[::-1]):
        try:
            tokens = list(disturbed.engine.generate(ids, TOKENS, ignore_eos=True))
        except ReadError:
            continue
        if ids is IDS:
            assert tokens == expected.tokens
    disturbed.check(expected)


@pytest.mark.parametrize("kind", POOLS)
def test_a_guess_that_failed_is_read_again_when_its_expert_is_chosen(
    sound_store: Store, expected: Result, kind: str
) -> None:
    """All guesses fail; the demands behind them do not."""
    with pytest.MonkeyPatch.context() as patch, faulty_disk(always(WELL)) as disk:
        disk.install(patch, kind)
        with open_small(sound_store, backend=BACKEND, max_slots=6) as engine:
            tiers = engine._opened.tiers
            guess = tiers.guess

            def failing(layer_index: int, ranked: object = ()) -> int:
                disk.fault = always(errno.EIO)
                issued = guess(layer_index, ranked)  # type: ignore[arg-type]
                while tiers._pool.depth:
                    pass
                disk.fault = always(WELL)
                return issued

            # Demand reads go out before the guess: let those end first.
            acquire = tiers.acquire

            def patient(layer_index: int, experts: object) -> object:
                acquired = acquire(layer_index, experts)  # type: ignore[arg-type]
                while tiers._pool.depth:
                    pass
                return acquired

            patch.setattr(tiers, "guess", failing)
            patch.setattr(tiers, "acquire", patient)
            assert list(engine.generate(IDS, TOKENS, ignore_eos=True)) == expected.tokens
            assert engine.stats.totals("decode").guesses > 0


@pytest.fixture
def rows_on_disk(sound_store: Store) -> Iterator[Engine]:
    with open_small(sound_store, backend=BACKEND, embedding="disk") as engine:
        assert engine.plan.embedding == "disk"
        yield engine


@needs_native  # the Python read pool reads by os.preadv too
def test_rows_of_a_table_on_disk_may_come_in_pieces(
    rows_on_disk: Engine, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, rng, calls = os.preadv, random.Random(1), 0

    def grudging(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        count = rng.randint(1, read(fd, buffers, offset))
        rest = buffers[0][count:]
        rest[:] = bytes(len(rest))
        return count

    monkeypatch.setattr("aegis.engine.embedding.os.preadv", grudging)
    assert difference(expected, result_of(rows_on_disk, IDS, TOKENS)) == ""
    assert calls > len(IDS)


@pytest.mark.parametrize("fault", [errno.EIO, END])
def test_a_row_that_cannot_be_read_is_a_sentence_and_the_engine_goes_on(
    rows_on_disk: Engine, expected: Result, fault: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if fault > 0:
                raise OSError(fault, os.strerror(fault))
            return 0

        patch.setattr("aegis.engine.embedding.os.preadv", failing)
        with pytest.raises(ReadError, match=r"resident\.bin (cannot be read|ended) at"):
            rows_on_disk.score(IDS)
    assert difference(expected, result_of(rows_on_disk, IDS, TOKENS)) == ""
