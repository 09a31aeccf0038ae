"""The same request planned at many caps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from aegis.planner.footprint import PlanRequest
from aegis.planner.plan import MemoryPlan, make_plan


def sweep_plans(request: PlanRequest, caps: Iterable[int]) -> list[MemoryPlan]:
    """One plan per cap (bytes), in the order given; ``request.cap_nbytes`` is ignored."""
    return [make_plan(replace(request, cap_nbytes=cap)) for cap in caps]
