"""Traces that come with aegis: routing of models that nobody has to download or write first.

Each is what ``aegis trace MODEL --tokens N`` recorded on the native backend with seed 0, but for
the ranks of guesses behind the first few.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aegis.tiers.trace import RoutingTrace, ids_digest

SHIPPED = {"synthetic:qwen3.6-35b-a3b": "qwen3.6-35b-a3b", "embedded": "smolmoe-135m"}
"""What the user calls a model, and the name of its trace's file."""
_FOLDER = Path(__file__).parent / "traces"


def shipped_trace(model: str) -> RoutingTrace | None:
    """The trace of a model by the name that users give; None where there is none.

    Raises:
        TraceError: it is there and damaged.
    """
    name = SHIPPED.get(model)
    return None if name is None else RoutingTrace.load(_FOLDER / f"{name}.trace")


def shortened(trace: RoutingTrace, ids: list[int], width: int) -> RoutingTrace:
    """The first tokens of a trace, ``ids``, with guesses of that width."""
    guesses = tuple(part[: len(ids), :, :width] for part in trace.guesses)
    chosen = trace.chosen[: len(ids)]
    return replace(trace, ids_sha256=ids_digest(ids), chosen=chosen, guesses=guesses)
