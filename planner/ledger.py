"""Planned against measured, item by item, after a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from aegis.planner.footprint import Item


@dataclass(frozen=True)
class LedgerRow:
    """One item: what the plan gave it and what it took (None: not measured on its own)."""

    item: str
    planned_nbytes: int
    measured_nbytes: int | None

    def to_json(self) -> dict[str, str | int | None]:
        """The row as ``--json`` prints it."""
        return asdict(self)


def make_ledger(
    planned: Sequence[Item],
    measured: Mapping[str, int],
    *,
    total_nbytes: int,
    peak_nbytes: int,
    together: Mapping[str, Sequence[str]] | None = None,
) -> list[LedgerRow]:
    """A row per planned item, then ``total``: the plan's sum against the process's peak.

    A measured item that was never planned is a row planned at 0: nothing is hidden. ``together``
    names measured items that cover several planned ones, which become one row.
    """
    row_of = {part: name for name, parts in (together or {}).items() for part in parts}
    sums: dict[str, int] = {}
    for name, nbytes in planned:
        row = row_of.get(name, name)
        sums[row] = sums.get(row, 0) + nbytes
    sums |= {name: 0 for name in measured if name not in sums}
    rows = [LedgerRow(name, nbytes, measured.get(name)) for name, nbytes in sums.items()]
    return [*rows, LedgerRow("total", total_nbytes, peak_nbytes)]
