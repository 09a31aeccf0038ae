"""What a run of the selftest computed, against the goldens and against the first run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aegis.doctor.goldens import Golden

LOGITS_WITHIN = 2e-3
"""Largest difference of a logit that is tolerated, in standard deviations of its step's logits."""

ROUNDED_WITHIN = 1.0
"""The same where activations are rounded to 16 bits, which changes single tokens."""


@dataclass(frozen=True)
class RunResult:
    """One row of the table."""

    backend: str = ""
    isa: str | None = None
    cap_nbytes: int = 0
    seconds: float = 0.0
    prompts: int = 0
    tokens: int = 0
    tokens_equal: int = 0
    top20: int = 0
    top20_equal: int = 0
    logit_error: float | None = None
    """The largest, in standard deviations; None: nothing was computed, or no number."""
    identical: bool | None = None
    """Whether every bit is that of the first run; None: there is nothing to compare with."""
    peak_nbytes: int = 0
    failures: list[str] = field(default_factory=list)


def check(
    answer: Mapping[str, Any],
    goldens: Sequence[Golden],
    steps: int,
    first: Mapping[str, Any] | None,
    rounded: bool = False,
) -> RunResult:
    """Compare what a worker answered; ``first`` is the answer that must have the same bits.

    rounded: activations were: tokens and sets may differ, which is shown and no failure.
    """
    if "error" in answer:
        return RunResult(failures=[answer["error"]])
    cases = answer["cases"]
    rows = [
        _Row(g, case["rows"][i], i)
        for g, case in zip(goldens, cases, strict=True)
        for i in range(steps)
    ]
    errors = [row.error for row in rows if row.error is not None]
    failures = [*_wrong_ids(goldens, cases), *([] if rounded else _wrong_rows(rows))]
    within = ROUNDED_WITHIN if rounded else LOGITS_WITHIN
    worst = max(errors, key=lambda e: math.inf if math.isnan(e) else e, default=None)
    if worst is not None and not worst <= within:
        failures.append(
            f"the largest error of a logit is {worst:.2g} of their standard deviation, more than"
            f" {within:g}"
        )
    differing = None if first is None else sum(_differing(cases, first["cases"]))
    if differing:
        failures.append(f"the logits of {differing} steps have other bits than in the first run")
    checked = [row for row in rows if row.error is not None]
    return RunResult(
        prompts=len(goldens),
        tokens=len(rows),
        tokens_equal=sum(row.token_equal for row in rows),
        top20=len(checked),
        top20_equal=sum(row.top20_equal for row in checked),
        logit_error=worst if worst is not None and math.isfinite(worst) else None,
        identical=None if differing is None else not differing,
        peak_nbytes=answer["peak_nbytes"],
        failures=failures,
    )


class _Row:
    """One step of one prompt beside its golden."""

    def __init__(self, golden: Golden, row: Mapping[str, Any], step: int) -> None:
        self.golden, self.step, self.token = golden, step, row["token"]
        self.wanted = golden.greedy_ids[step]
        self.token_equal = self.token == self.wanted
        self.top20_equal = True
        self.error: float | None = None
        if step < len(golden.top20_ids):
            self.top20_equal = set(row["top20_ids"]) == set(golden.top20_ids[step])
            pairs = zip(row["logits"], golden.top20_logits[step], strict=True)
            gaps = [abs(found - wanted) for found, wanted in pairs]
            # max() would lose a NaN that is not the first.
            widest = math.nan if any(map(math.isnan, gaps)) else max(gaps)
            self.error = widest / golden.logit_std[step]


def _wrong_ids(goldens: Sequence[Golden], cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for golden, case in zip(goldens, cases, strict=True):
        if case["ids"] != golden.ids:
            yield f"{golden.name}: the tokenizer or the chat template gives other prompt ids"


def _wrong_rows(rows: Sequence[_Row]) -> Iterator[str]:
    """The first wrong token and the first wrong set: what follows has the same cause."""
    for row in rows:
        if not row.token_equal:
            yield (
                f"{row.golden.name}: token {row.step + 1} is {row.token} instead of {row.wanted}"
            )
            break
    for row in rows:
        if not row.top20_equal:
            yield f"{row.golden.name}: the 20 largest logits of step {row.step + 1} are others"
            break


def _differing(
    cases: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]
) -> Iterator[bool]:
    """Of the steps that both have computed."""
    for case, other in zip(cases, first, strict=False):
        for row, expected in zip(case["rows"], other["rows"], strict=False):
            yield row["bits"] != expected["bits"]
