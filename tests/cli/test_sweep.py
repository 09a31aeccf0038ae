"""What a sweep compares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aegis.cli import sweep


@pytest.mark.parametrize(
    ("forced", "changed", "identical"),
    [
        (False, {}, True),
        (False, {"token_ids": [1, 3]}, False),
        (True, {}, True),
        (True, {"logits_digest": "b"}, False),
    ],
)
def test_rows_are_compared_by_their_tokens_or_where_those_are_forced_by_their_logits(
    monkeypatch: pytest.MonkeyPatch, forced: bool, changed: dict[str, Any], identical: bool
) -> None:
    plan = SimpleNamespace(feasible=True, min_cap_nbytes=1, slots=2, borrowed_slots=0)
    first = {**dict.fromkeys(sweep._COPIED, 0), "token_ids": [1, 2]}
    first |= {"nll": 1.5, "logits_digest": "a"} if forced else {}
    results = iter([first, {**first, **changed}])
    monkeypatch.setattr(sweep, "plan_for", lambda *_: plan)
    monkeypatch.setattr(sweep, "_run", lambda *_: next(results))
    options = {"forced": forced, "verbose": False}
    rows = [row for row, _ in sweep._rows("hello", None, (1, 2), options)]  # type: ignore[arg-type]
    assert [row["identical"] for row in rows] == [True, identical]
    assert rows[0].get("logits_digest") == ("a" if forced else None)
