"""One thread at a time, and what every call is inside of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from aegis.engine.turn import Turn, in_turn
from aegis.errors import AegisError


class Stop(BaseException):
    """What a signal's handler may raise anywhere."""


class Held:
    """Something with a turn."""

    def __init__(self, inside: Callable[[], AbstractContextManager[Any]]) -> None:
        self.turn = Turn(inside)

    @in_turn
    def call(self, work: Callable[[], object]) -> None:
        """A call that does ``work``."""
        work()


def test_every_call_is_inside_of_what_the_turn_was_given() -> None:
    seen: list[str] = []

    @contextmanager
    def inside() -> Iterator[None]:
        seen.append("in")
        try:
            yield
        finally:
            seen.append("out")

    held = Held(inside)
    with held.turn:
        assert seen == [], "holding the turn is no call"
        held.call(lambda: seen.append("work"))
        assert seen == ["in", "work", "out"]
        with pytest.raises(AegisError, match="in the middle of a call"):
            held.call(lambda: held.call(lambda: None))
    assert seen == ["in", "work", "out", "in", "out"], "what is refused enters nothing"


@pytest.mark.parametrize("place", ["enter", "exit"])
def test_a_call_that_is_interrupted_at_its_ends_is_over(place: str) -> None:
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

    held = Held(Inside)
    with pytest.raises(Stop):
        held.call(lambda: None)
    begun = len(calls)
    assert not held.turn.under_way

    def other() -> None:
        with held.turn:
            held.call(lambda: None)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the lock is free"
    assert calls[begun:] == ["enter", "exit"]
