"""How the records of a file are shared out, and files made side by side."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.convert.behind import Behind, Ended
from aegis.convert.records import RUN, threads_for
from aegis.convert.side_by_side import AT_ONCE, Reports, side_by_side


@given(st.integers(1, 512), st.integers(1, 200 << 20))
def test_records_made_together_leave_room_below_300_mib(count: int, nbytes: int) -> None:
    number, run = threads_for(count, nbytes)
    assert 1 <= number <= 4
    assert number == 1 or AT_ONCE * number * nbytes <= 192 << 20
    assert number == 4 or AT_ONCE * (number + 1) * nbytes > 192 << 20
    assert 1 <= run <= RUN
    assert run == RUN or number * (run + 1) > count


def test_experts_of_the_35b_shape_are_made_by_all_threads() -> None:
    """A record of 1.7 MiB; three matrices of 512 KiB of codes, of which 4 MiB are read at once, and
    their scales and biases of 32 KiB, read for a run."""
    assert threads_for(256, 1_769_472 + 3 * ((4 << 20) + 2 * (RUN * 32 << 10))) == (4, RUN)


@given(st.integers(1, 4), st.integers(0, 9))
def test_what_files_give_is_in_their_order(at_once: int, count: int) -> None:
    def file(number: int, behind: Behind) -> int:
        behind.submit(lambda: finished.append(number))
        return number

    finished = list[int]()
    files = [lambda behind, n=n: file(n, behind) for n in range(count)]
    assert side_by_side(at_once, files, Reports(0)) == list(range(count))
    assert sorted(finished) == list(range(count))


def test_two_are_made_at_a_time() -> None:
    barrier = threading.Barrier(2)
    assert side_by_side(2, [lambda _: barrier.wait(60) < 2] * 4, Reports(0)) == [True] * 4


@pytest.mark.parametrize("error", [OSError(5, "broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("first", [False, True])
def test_one_that_fails_ends_the_others(error: BaseException, first: bool) -> None:
    begun, waiting = list[str](), threading.Event()

    def fails(_: Behind) -> None:
        assert waiting.wait(60)
        raise error

    def goes_on(behind: Behind) -> None:
        waiting.set()
        try:
            while True:
                behind.go_on()
        except Ended:
            begun.append("ended")
            raise

    def never(_: Behind) -> None:
        begun.append("never")

    pair = [fails, goes_on] if first else [goes_on, fails]
    with pytest.raises(type(error)):
        side_by_side(2, [*pair, never, never], Reports(0))
    assert begun == ["ended"]


def test_where_the_disk_is_full_files_are_made_one_after_the_other() -> None:
    """None that was begun is given up for another's want of room."""
    together, begun = threading.Barrier(2), list[int]()

    def file(number: int, behind: Behind) -> int:
        begun.append(number)
        if len(begun) <= 2:
            together.wait(60)
            if number == 0:
                raise OSError(28, "full")
        behind.go_on()
        return number

    files = [lambda behind, n=n: file(n, behind) for n in range(5)]
    assert side_by_side(2, files, Reports(0)) == [0, 1, 2, 3, 4]
    assert sorted(begun[:2]) == [0, 1]
    assert sorted(begun[2:]) == [0, 2, 3, 4]


def test_what_could_not_be_finished_is_an_error() -> None:
    def file(behind: Behind) -> None:
        def full() -> None:
            raise OSError(28, "full")

        behind.submit(full)

    with pytest.raises(OSError, match="full"):
        side_by_side(2, [file], Reports(0))


@pytest.mark.parametrize("at_once", [1, 2])
def test_progress_is_told_in_the_callers_thread(at_once: int) -> None:
    seen = list[tuple[int, int, threading.Thread]]()
    report = Reports(4000, lambda *at: seen.append((*at, threading.current_thread())))
    report.begin_at(0)

    def file(_: Behind) -> None:
        for _ in range(500):
            report(1)

    for _ in range(2):
        side_by_side(at_once, [file] * 4, report)
    assert seen == [(n + 1, 4000, threading.current_thread()) for n in range(4000)]


def test_an_error_of_who_is_told_ends_all() -> None:
    def interrupted(done: int, _: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    report, made = Reports(9, interrupted), list[int]()

    def file(behind: Behind) -> None:
        while True:
            behind.go_on()
            report(1)
            made.append(1)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(2, [file] * 3, report)
    assert len(made) == 2
