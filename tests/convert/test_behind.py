"""What is left to do of a finished file is done in order, once, and never behind a failure."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.checkpoint.fileio import ALIGN, PlacedWriter
from aegis.convert.behind import Behind


@given(st.lists(st.integers(0, 3), max_size=6))
def test_every_step_is_taken_once_in_order(firsts: list[int]) -> None:
    taken: list[tuple[int, int]] = []
    with Behind() as behind:
        for file, count in enumerate(firsts):
            for number in range(count):
                behind.first(partial(taken.append, (file, number)))
            behind.submit(partial(taken.append, (file, count)))
    assert taken == [(file, n) for file, count in enumerate(firsts) for n in range(count + 1)]


def test_the_next_file_is_begun_while_one_is_finished() -> None:
    go_on, order = threading.Event(), list[str]()

    def slow() -> None:
        assert go_on.wait(60)
        order.append("finished")

    with Behind() as behind:
        behind.submit(slow)
        order.append("begun")
        go_on.set()
    assert order == ["begun", "finished"]


@given(st.integers(0, 3), st.booleans())
def test_nothing_is_said_to_be_finished_behind_a_failure(bad: int, first: bool) -> None:
    """Files that were begun meanwhile are closed all the same."""
    closed: list[int] = []
    finished: list[int] = []

    def close(number: int) -> None:
        if number == bad and first:
            raise OSError(28, "full")
        closed.append(number)

    def finish(number: int) -> None:
        if number == bad:
            raise OSError(28, "full")
        finished.append(number)

    def files() -> None:
        with Behind() as behind:
            for number in range(4):
                behind.first(partial(close, number))
                behind.submit(partial(finish, number))

    with pytest.raises(OSError, match="full"):
        files()
    assert finished == list(range(bad))
    begun = range(min(bad + 2, 4))
    assert closed == [number for number in begun if number != bad or not first]


def test_a_file_whose_last_step_never_came_is_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))

    def interrupted() -> None:
        with Behind() as behind:
            behind.first(PlacedWriter(tmp_path / "file", ALIGN).close)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(os.listdir("/dev/fd")) == before


def test_a_last_step_without_room_is_taken_again_when_the_next_file_is_gone() -> None:
    room, said = threading.Event(), list[str]()

    def note() -> None:
        said.append("noted" if room.is_set() else "full")
        if not room.is_set():
            raise OSError(28, "full")

    def files() -> None:
        with Behind() as behind:
            behind.submit(note)
            behind.first(room.set)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files()
    assert said == ["full", "noted"]
