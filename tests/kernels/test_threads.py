"""Threads by default: the processors, or what a container's quota keeps busy."""

from pathlib import Path

import pytest

from aegis.engine.planning import compute_threads
from aegis.kernels import threads


@pytest.mark.parametrize(("text", "limit"), [("150000 100000", 2), ("max 100000", 9), ("?", 9)])
def test_threads_follow_a_containers_quota(
    text: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_processors", lambda: 9)
    monkeypatch.setattr(threads, "CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(text)
    assert threads.default_threads() == limit
    assert compute_threads(None) == limit


def test_a_request_goes_beyond_a_quota_but_not_beyond_the_processors() -> None:
    assert compute_threads(1) == 1
    assert compute_threads(1000) == threads.usable_processors()
