"""Sizes: read strictly, written shortly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.planner.units import format_least, format_size, parse_caps, parse_size

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 * GIB),
        ("128MiB", 128 << 20),
        ("134217728B", 134217728),
        ("1.5 GiB", 3 * GIB // 2),
        ("4gib", 4 * GIB),
        ("2GB", 2 * 10**9),
        ("7KiB", 7168),
        ("3TiB", 3 * 1024**4),
        ("5KB", 5000),
        ("6MB", 6_000_000),
        ("8TB", 8 * 10**12),
        ("1B", 1),
        ("9223372036854775808B", 1 << 63),
    ],
)
def test_sizes_with_a_unit_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("4", "write 4GiB"),
        ("4G", "unknown unit 'G'"),
        ("-4GiB", "not a size"),
        ("", "not a size"),
        ("0MiB", "positive"),
        ("0.5B", "positive"),
        ("9223372036854775809B", "more than any memory"),
        ("9" * 40 + "TiB", "more than any memory"),
        ("9" * 5000 + "TiB", "not a size"),
        ("four GiB", "not a size"),
        ("٤GiB", "not a size"),
    ],
)
def test_other_sizes_are_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_size(text)


def test_what_is_not_a_size_is_shown_up_to_sixty_characters() -> None:
    with pytest.raises(ValueError, match=f"^'{'x' * 60}' is not a size"):
        parse_size("x" * 61)


@given(st.integers(1, 1 << 62))
def test_any_count_of_bytes_is_read_back(nbytes: int) -> None:
    assert parse_size(f"{nbytes}B") == nbytes


@given(st.integers(1, 1 << 49))
def test_a_formatted_size_is_within_its_last_digit(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.051)


@given(st.integers(1, 1 << 49))
def test_a_least_size_is_enough_as_it_is_written(nbytes: int) -> None:
    assert nbytes <= parse_size(format_least(nbytes)) <= 1.1 * nbytes + 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (4 * GIB, "4 GiB"),
        (313344576, "298.9 MiB"),
        (1023 << 20, "1023 MiB"),
        (GIB - 1, "1 GiB"),
        (1 << 40, "1 TiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_least_sizes_are_rounded_up(nbytes: int, text: str) -> None:
    assert format_least(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (4 * GIB, "4 GiB"),
        ((1 << 20) - 1, "1 MiB"),
        (1048530, "1 MiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (1 << 40, "1 TiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_sizes_are_written_shortly(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_a_range_of_caps_steps_by_one_gib_and_includes_both_ends() -> None:
    assert parse_caps("3GiB..6GiB") == tuple(n * GIB for n in (3, 4, 5, 6))
    assert parse_caps("1GiB..2.5GiB:1GiB") == (GIB, 2 * GIB, 5 * GIB // 2)
    assert parse_caps("200MiB") == (200 << 20,)
    assert parse_caps("1GiB..1GiB") == (GIB,)


def test_a_range_has_at_most_a_thousand_steps() -> None:
    assert len(parse_caps("9001B..10000B:1B")) == 1000
    with pytest.raises(ValueError, match="over 1000 caps: give a larger step"):
        parse_caps("9000B..10000B:1B")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("6GiB..3GiB", "backwards"),
        ("3..6GiB", "no unit"),
        ("1B..1GiB:1B", "larger step"),
        ("3GiB..", "not a size"),
    ],
)
def test_a_bad_range_is_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_caps(text)
