"""How the records of a file are shared out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.convert.records import RUN, threads_for


@given(st.integers(1, 512), st.integers(1, 200 << 20))
def test_records_made_together_leave_room_below_300_mib(count: int, nbytes: int) -> None:
    number, run = threads_for(count, nbytes)
    assert 2 <= number <= 8
    assert number == 2 or number * nbytes <= 192 << 20
    assert number == 8 or (number + 1) * nbytes > 192 << 20
    assert 1 <= run <= RUN
    assert run == RUN or number * (run + 1) > count


def test_experts_of_the_35b_shape_are_made_by_all_threads() -> None:
    """A record of 1.7 MiB; three matrices of 512 KiB of codes, of which 4 MiB are read at once, and
    their scales and biases of 32 KiB, read for a run."""
    assert threads_for(256, 1_769_472 + 3 * ((4 << 20) + 2 * (RUN * 32 << 10))) == (8, RUN)
