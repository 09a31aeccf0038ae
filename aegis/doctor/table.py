"""The selftest's table, and its part of --json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aegis.doctor.compare import LOGITS_WITHIN, RunResult
from aegis.doctor.selftest import Selftest, Skipped
from aegis.planner import format_size

_HEADER = ("backend", "isa", "cap", "prompts", "tokens", "top-20", "error", "bits", "seconds")
_WIDTHS = (9, 7, 10, 7, 7, 6, 8, 6, 8)


def header() -> str:
    """The names of the columns; ``error`` is the largest of a logit, in standard deviations."""
    return _line(_HEADER)


def lines_of(result: RunResult) -> Iterator[str]:
    """One run: its row, then what is wrong with it."""
    bits = {None: "-", True: "same", False: "DIFFER"}[result.identical]
    error = "-" if result.logit_error is None else f"{result.logit_error:.1e}"
    yield _line(
        (
            result.backend,
            result.isa or "-",
            format_size(result.cap_nbytes),
            str(result.prompts),
            f"{result.tokens_equal}/{result.tokens}",
            f"{result.top20_equal}/{result.top20}",
            error,
            bits,
            f"{result.seconds:.1f}",
        )
    )
    for failure in result.failures:
        yield f"  FAILED: {failure}"


def skipped_line(skipped: Skipped) -> str:
    """Something that was not run."""
    return f"not run: {skipped.backend}: {skipped.reason}"


def selftest_json(tested: Selftest) -> dict[str, Any]:
    """The ``selftest`` object of --json."""
    return {
        "ok": tested.ok,
        "error": tested.error,
        "logits_within": LOGITS_WITHIN,
        "runs": [vars(result) | {} for result in tested.results],
        "skipped": [vars(skipped) | {} for skipped in tested.skipped],
    }


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
