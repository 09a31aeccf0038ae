"""How many expert records are made at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.convert.records import at_a_time


@given(st.integers(1, 200 << 20))
def test_records_made_at_once_leave_room_below_300_mib(nbytes: int) -> None:
    count = at_a_time(nbytes)
    assert 2 <= count <= 8
    assert count == 2 or count * nbytes <= 192 << 20
    assert count == 8 or (count + 1) * nbytes > 192 << 20


def test_experts_of_the_35b_shape_are_made_eight_at_a_time() -> None:
    """A record of 1.7 MiB, three matrices of 512 KiB of codes read by 4 MiB, with their scales and
    biases of 32 KiB read by 256."""
    assert at_a_time(1_769_472 + 3 * ((4 << 20) + 2 * (256 << 10))) == 8
