"""Plans and ledgers as rows of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.planner.footprint import item_label
from aegis.planner.ledger import LedgerRow
from aegis.planner.plan import MemoryPlan
from aegis.planner.units import format_size


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to equal width: the first to the left, the others to the right.

    A row's last cell may be a remark; it is not padded when the row has more cells than the first.
    """
    columns = len(rows[0]) if rows else 0
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
        lines.append("  ".join([*cells, *row[columns:]]).rstrip())
    return lines


def explain_plan(plan: MemoryPlan) -> list[str]:
    """The plan as a table: one line per item that takes memory, the sum, the cap, and warnings."""
    remarks = {
        "workspace": f"prefill {plan.prefill_step} tokens at a time",
        "embedding_rows": "the table stays on disk",
        "page_cache": "buffered reads: direct ones are not to be had",
        "store": "the model's files do not lie on a disk",
        "staging": f"{_slots(plan.staging_slots)}, lent to the hot tier while decoding",
        "hot_tier": f"{_slots(plan.slots)} of {format_size(plan.slot_nbytes)}",
    }
    rows = [
        [item_label(name), format_size(nbytes), *([remarks[name]] if name in remarks else [])]
        for name, nbytes in plan.items
        if nbytes
    ]
    rows.append(["total", format_size(plan.total_nbytes)])
    left = f"{format_size(plan.unused_nbytes)} unused"
    if plan.device is not None and plan.device.cap_nbytes is not None:
        rows.append(["on the host", format_size(plan.host_nbytes)])
        rows.append(["cap", format_size(plan.cap_nbytes), plan.shortfall or left])
        left = plan.device_shortfall or f"{format_size(plan.unused_device_nbytes)} unused"
        rows.append(["on the device", format_size(plan.device_nbytes)])
        rows.append(["device cap", format_size(plan.device.cap_nbytes), left])
    else:
        reason = plan.shortfall or plan.device_shortfall
        rows.append(["cap", format_size(plan.cap_nbytes), reason or left])
    warnings = [f"warning: {sentence}" for sentence in plan.warnings]
    return [*align([["memory plan", ""], *rows]), *warnings]


def explain_ledger(rows: Sequence[LedgerRow]) -> list[str]:
    """Planned against measured, one line per item that has either."""
    table = [["ledger", "planned", "measured"]]
    for row in rows:
        if row.planned_nbytes or row.measured_nbytes:
            measured = "-" if row.measured_nbytes is None else format_size(row.measured_nbytes)
            table.append([item_label(row.item), format_size(row.planned_nbytes), measured])
    return align(table)


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"
