"""Sizes every byte under the cap before anything large is allocated. Standard library only.

The engine hands over plain ints (``PlanRequest``) and gets a ``MemoryPlan`` back.
"""

from aegis.planner.footprint import DeviceShare, PlanRequest, PrefillOption
from aegis.planner.ledger import LedgerRow, make_ledger
from aegis.planner.plan import MemoryPlan, make_plan
from aegis.planner.surroundings import Surroundings
from aegis.planner.sweep import sweep_plans
from aegis.planner.units import format_least, format_size, parse_caps, parse_size

__all__ = [
    "DeviceShare",
    "LedgerRow",
    "MemoryPlan",
    "PlanRequest",
    "PrefillOption",
    "Surroundings",
    "format_least",
    "format_size",
    "make_ledger",
    "make_plan",
    "parse_caps",
    "parse_size",
    "sweep_plans",
]
