"""Stop strings end a text at the same place however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.errors import UsageError
from aegis.text.stop import StopMatcher

SHORT = st.text("ab<", max_size=12)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], parts: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = ""
    for part in parts:
        text, stopped = matcher.feed(part)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.finish(), False


@given(stops=STOPS, parts=st.lists(SHORT, max_size=6))
def test_the_cut_into_pieces_does_not_matter(stops: list[str], parts: list[str]) -> None:
    assert run(stops, parts) == run(stops, list("".join(parts)))


@given(stops=STOPS, parts=st.lists(SHORT, max_size=6))
def test_text_ends_before_the_stop_string_completed_first(
    stops: list[str], parts: list[str]
) -> None:
    text = "".join(parts)
    shown, stopped = run(stops, parts)
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if stopped:
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
    else:
        assert shown == text


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.feed("a < b </e") == ("a < b ", False)
    assert matcher.feed("nd") == ("", False)
    assert matcher.feed("s") == ("</ends", False)
    assert matcher.feed("</end>x") == ("", True)
    assert matcher.matched == "</end>"
    assert matcher.feed("more") == ("", True)


def test_without_stop_strings_text_passes_through() -> None:
    assert run([], ["a", "", "b"]) == ("ab", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        StopMatcher(["x", ""])
