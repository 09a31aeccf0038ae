"""One thread at a time, and what is entered with a turn is entered once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aegis.engine.turn import Turn


class Stop(BaseException):
    """What a signal's handler may raise anywhere."""


def test_turns_inside_a_turn_enter_nothing_again() -> None:
    seen: list[str] = []

    @contextmanager
    def inside() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    turn = Turn(inside)
    with turn, turn, turn:
        assert seen == ["in"]
    assert seen == ["in", "out"]
    with turn:
        pass
    assert seen == ["in", "out"] * 2


@pytest.mark.parametrize("place", ["enter", "exit"])
def test_a_turn_that_is_interrupted_at_its_ends_is_nobodys(place: str) -> None:
    calls: list[str] = []

    class Inside:
        def __enter__(self) -> None:
            calls.append("enter")
            if place == "enter" and len(calls) == 1:
                raise Stop

        def __exit__(self, *error: object) -> None:
            calls.append("exit")
            if place == "exit" and calls.count("exit") == 1:
                raise Stop

    turn = Turn(Inside)
    with pytest.raises(Stop), turn:
        pass
    begun = len(calls)

    def other() -> None:
        with turn, turn:
            pass

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the lock is free"
    assert calls[begun:] == ["enter", "exit"]
