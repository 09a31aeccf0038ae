"""The MemoryPlan: every byte under the cap, decided before anything large is allocated.

Rules, all of them exact in bytes:
- A plan fits if and only if the cap is at least ``min_cap_nbytes`` and what it takes exists here;
  the number of slots never falls as the cap grows.
- The prefill step is the largest whose workspace takes at most an eighth of what the fixed items
  leave (or that still lets every expert have a slot). Just above the cap where a step becomes
  affordable it would cost slots, so the smaller step and the slot count are held until the larger
  step pays for itself; what that leaves over is ``unused_nbytes``.
- An untied embedding table stays on disk unless every expert has a slot with the table in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aegis.planner.footprint import (
    DEVICE_ITEMS,
    DeviceShare,
    EmbeddingPlace,
    Item,
    PlanRequest,
    PrefillOption,
    device_nbytes,
    fixed_items,
    fixed_nbytes,
    item_label,
)
from aegis.planner.surroundings import NO_BOUND, Surroundings
from aegis.planner.units import format_size

WORKSPACE_SHARE = 8
"""A prefill step may take one part in this many of what the fixed items leave."""
STAGING_SHARE = 3
"""Staging takes at most one slot in this many."""


@dataclass(frozen=True)
class DevicePlan:
    """The part of a plan that a device with memory of its own holds."""

    cap_nbytes: int | None
    """Its own cap; None: the plan's cap is for host and device together."""
    min_cap_nbytes: int
    """The smallest device cap that opens."""
    around: Surroundings = field(default=NO_BOUND, compare=False)


@dataclass(frozen=True)
class MemoryPlan:
    """What a cap is spent on. Where ``feasible`` is false it shows the smallest plan there is."""

    cap_nbytes: int
    feasible: bool
    items: tuple[Item, ...]
    slots: int
    """The hot tier's own."""
    staging_slots: int
    """Prefill's, one layer at most; the hot tier borrows them while decoding."""
    slot_nbytes: int
    prefill_step: int
    embedding: EmbeddingPlace
    min_cap_nbytes: int
    """The smallest cap that opens."""
    load_peak_nbytes: int
    around: Surroundings = field(default=NO_BOUND, compare=False)
    """Two plans that spend memory alike are equal whatever is free at the moment."""
    device: DevicePlan | None = None

    @property
    def borrowed_slots(self) -> int:
        """Slots that the hot tier has on top of its own while decoding."""
        return self.staging_slots

    @property
    def total_slots(self) -> int:
        """All slots: the hot tier's own and staging."""
        return self.slots + self.staging_slots

    @property
    def total_nbytes(self) -> int:
        """Sum of all items."""
        return sum(nbytes for _, nbytes in self.items)

    @property
    def device_nbytes(self) -> int:
        """What lies in a device's own memory."""
        return 0 if self.device is None else device_nbytes(self.items)

    @property
    def capped_nbytes(self) -> int:
        """What the cap is for: everything, or what a device with a cap of its own does not hold."""
        apart = self.device is not None and self.device.cap_nbytes is not None
        return self.total_nbytes - (self.device_nbytes if apart else 0)

    @property
    def unused_nbytes(self) -> int:
        """What the plan leaves of the cap: usually less than one slot."""
        return max(0, self.cap_nbytes - self.capped_nbytes)

    @property
    def unused_device_nbytes(self) -> int:
        """What it leaves of the device's own cap."""
        if self.device is None or self.device.cap_nbytes is None:
            return 0
        return max(0, self.device.cap_nbytes - self.device_nbytes)

    @property
    def shortage_nbytes(self) -> int:
        """How many bytes the cap is short of the smallest plan; 0 where it fits."""
        return max(0, self.min_cap_nbytes - self.cap_nbytes)

    @property
    def device_shortage_nbytes(self) -> int:
        """How many the device's own cap is short."""
        if self.device is None or self.device.cap_nbytes is None:
            return 0
        return max(0, self.device.min_cap_nbytes - self.device.cap_nbytes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for people about a plan that fits, given what else there is here."""
        if not self.feasible:
            return ()
        reserve = dict(self.items)["runtime_reserve"]
        found = self.around.warnings(self.cap_nbytes, self.host_nbytes, reserve)
        if self.device is not None:
            cap = self.device.cap_nbytes or self.device_nbytes
            found += self.device.around.warnings(cap, self.device_nbytes, 0)
        return found

    @property
    def host_nbytes(self) -> int:
        """What lies in the host's memory."""
        return self.total_nbytes - self.device_nbytes

    @property
    def shortfall(self) -> str:
        """Why a plan does not fit, in a few words."""
        if self.shortage_nbytes:
            return f"{format_size(self.shortage_nbytes)} short of the smallest that opens"
        if not self.around.holds(self.host_nbytes):
            return self.around.excess(self.host_nbytes)
        return ""

    @property
    def device_shortfall(self) -> str:
        """The same of the device's own cap."""
        if self.device is None:
            return ""
        if self.device_shortage_nbytes:
            return f"{format_size(self.device_shortage_nbytes)} short of the smallest that opens"
        if not self.device.around.holds(self.device_nbytes):
            return self.device.around.excess(self.device_nbytes)
        return ""

    def to_json(self) -> dict[str, Any]:
        """The ``plan`` object of ``--json``."""
        return {
            "cap_nbytes": self.cap_nbytes,
            "feasible": self.feasible,
            "min_cap_nbytes": self.min_cap_nbytes,
            "items": [{"name": name, "nbytes": nbytes} for name, nbytes in self.items],
            "slots": self.slots,
            "borrowed_slots": self.borrowed_slots,
            "slot_nbytes": self.slot_nbytes,
            "prefill_step": self.prefill_step,
            "embedding": self.embedding,
            "total_nbytes": self.total_nbytes,
            "unused_nbytes": self.unused_nbytes,
            "ceiling_nbytes": self.around.ceiling_nbytes,
            "free_nbytes": self.around.free_nbytes,
            "warnings": list(self.warnings),
        } | self._device_json()

    def _device_json(self) -> dict[str, Any]:
        if self.device is None:
            return {}
        own = self.device.cap_nbytes is not None
        return {
            "device_cap_nbytes": self.device.cap_nbytes,
            "min_device_cap_nbytes": self.device.min_cap_nbytes if own else None,
            "device_nbytes": self.device_nbytes,
            "device_items": [name for name, _ in self.items if name in DEVICE_ITEMS],
        }

    def refusal(self) -> str:
        """One sentence: each item, what is short and the smallest cap that opens."""
        if self.feasible:
            raise ValueError("the plan fits: there is nothing to refuse")
        apart = self.device is not None and self.device.cap_nbytes is not None
        reasons = []
        if self.shortage_nbytes:
            where = " on the host" if apart else ""
            reasons.append(
                f"the plan does not fit the cap of {format_size(self.cap_nbytes)}{where}:"
                f" {self._reason(apart)}"
            )
        if self.device is not None and self.device_shortage_nbytes:
            assert self.device.cap_nbytes is not None
            short = self.device_shortage_nbytes
            named = self._named([item for item in self.items if item[0] in DEVICE_ITEMS])
            reasons.append(
                f"the plan does not fit the device cap of {format_size(self.device.cap_nbytes)}:"
                f" {named}, {format_size(short)} short; the smallest device cap that opens is"
                f" {self.device.min_cap_nbytes}B"
            )
        if reasons:
            return "; ".join(reasons)
        if self.around.holds(self.host_nbytes) and self.device is not None:
            return self.device.around.refusal(self.device_nbytes, self.device.min_cap_nbytes)
        return self.around.refusal(self.host_nbytes, self.min_cap_nbytes)

    def _reason(self, apart: bool) -> str:
        smallest = (
            f"{format_size(self.shortage_nbytes)} short; "
            f"the smallest cap that opens is {self.min_cap_nbytes}B"
        )
        if self.capped_nbytes < self.load_peak_nbytes:
            return f"opening briefly needs {format_size(self.load_peak_nbytes)}, {smallest}"
        items = [item for item in self.items if not (apart and item[0] in DEVICE_ITEMS)]
        return f"{self._named(items)}, {smallest}"

    @staticmethod
    def _named(items: Sequence[Item]) -> str:
        named = ", ".join(
            f"{item_label(name)} {format_size(nbytes)}" for name, nbytes in items if nbytes
        )
        return f"{named} make {format_size(sum(nbytes for _, nbytes in items))}"


def make_plan(request: PlanRequest) -> MemoryPlan:
    """Spend the cap; an infeasible result carries the smallest plan and ``min_cap_nbytes``."""
    if request.device is None:
        return _plan(request)
    if request.device.cap_nbytes is None:
        return _plan_together(request, request.device)
    return _plan_apart(request, request.device, request.device.cap_nbytes)


def _plan_together(request: PlanRequest, device: DeviceShare) -> MemoryPlan:
    """One cap for host and device; the device's memory bounds the slots, too."""
    option = request.allowed_options[-1]
    place = _cheapest_place(request, option)
    fixed = device_nbytes(fixed_items(request, option, place))
    least = fixed + request.num_experts_per_tok * request.slot_nbytes
    ceiling = device.around.ceiling_nbytes
    if ceiling is not None:
        bound = max(request.num_experts_per_tok, (ceiling - fixed) // request.slot_nbytes)
        request = replace(request, max_slots=min(bound, request.all_slots))
    plan = replace(_plan(request), device=DevicePlan(None, least, device.around))
    return replace(plan, feasible=plan.feasible and device.around.holds(plan.device_nbytes))


def _plan_apart(request: PlanRequest, device: DeviceShare, device_cap: int) -> MemoryPlan:
    """The device's items under its own cap, the others under the plan's."""
    inside = replace(
        request,
        cap_nbytes=device_cap,
        device=None,
        runtime_nbytes=device.runtime_nbytes,
        options=[replace(option, embedding_rows_nbytes=0) for option in request.options],
        # One byte more would change nothing: a slot takes that much.
        load_peak_nbytes=0,  # mutate: equivalent
        io_nbytes=0,
        page_cache_nbytes=0,
        store_nbytes=0,
        reserve_nbytes=0,
        around=device.around,
    )
    held = _plan(inside)
    option = next(o for o in request.options if o.prefill_step == held.prefill_step)
    sizes = dict(fixed_items(request, option, held.embedding)) | {
        name: nbytes for name, nbytes in held.items if name in ("staging", "hot_tier")
    }
    items = tuple(sizes.items())
    host = sum(nbytes for name, nbytes in items if name not in DEVICE_ITEMS)
    min_cap = max(host, request.load_peak_nbytes)
    return replace(
        held,
        cap_nbytes=request.cap_nbytes,
        feasible=held.feasible and request.cap_nbytes >= min_cap and request.around.holds(host),
        items=items,
        min_cap_nbytes=min_cap,
        load_peak_nbytes=request.load_peak_nbytes,
        around=request.around,
        device=DevicePlan(device_cap, held.min_cap_nbytes, device.around),
    )


def _plan(request: PlanRequest) -> MemoryPlan:
    """Everything under one cap."""
    options = request.allowed_options
    cheapest = _cheapest_place(request, options[0])
    min_cap = max(_smallest_cap(request, options[0], cheapest), request.load_peak_nbytes)
    if request.cap_nbytes < min_cap:
        return _assemble(request, options[0], cheapest, request.num_experts_per_tok, min_cap)
    place = cheapest
    option, slots = _choose(request, options, place, request.cap_nbytes)
    if request.embedding == "auto" and place == "disk":
        in_ram, ram_slots = _choose(request, options, "ram", request.cap_nbytes)
        if ram_slots == request.all_slots:
            option, slots, place = in_ram, ram_slots, "ram"
    return _assemble(request, option, place, slots, min_cap)


def _cheapest_place(request: PlanRequest, smallest: PrefillOption) -> EmbeddingPlace:
    if request.embedding != "auto":
        return request.embedding
    if request.tied or request.embedding_nbytes <= smallest.embedding_rows_nbytes:
        return "ram"
    return "disk"


def _smallest_cap(request: PlanRequest, smallest: PrefillOption, place: EmbeddingPlace) -> int:
    slots_nbytes = request.num_experts_per_tok * request.slot_nbytes
    return fixed_nbytes(request, smallest, place) + slots_nbytes


def _slots(request: PlanRequest, option: PrefillOption, place: EmbeddingPlace, cap: int) -> int:
    rest = cap - fixed_nbytes(request, option, place)
    return min(request.all_slots, rest // request.slot_nbytes)


def _choose(
    request: PlanRequest, options: Sequence[PrefillOption], place: EmbeddingPlace, cap: int
) -> tuple[PrefillOption, int]:
    """The step and the slots at ``cap``, given that the smallest step fits.

    Never fewer slots than at any smaller cap: where the largest step would cost slots, what its
    threshold buys without it is kept.
    """
    largest, smaller = options[-1], options[:-1]
    slots = _slots(request, largest, place, cap)
    if not smaller or slots == request.all_slots:
        return largest, slots
    threshold = max(
        _affordable_from(request, largest, place), _smallest_cap(request, options[0], place)
    )
    if cap < threshold:
        return _choose(request, smaller, place, cap)
    held = _choose(request, smaller, place, threshold)
    return (largest, slots) if slots >= held[1] else held


def _affordable_from(request: PlanRequest, option: PrefillOption, place: EmbeddingPlace) -> int:
    """The cap from which this step's buffers take at most their share of what is left."""
    fixed = fixed_nbytes(request, option, place)
    buffers = option.workspace_nbytes + (option.embedding_rows_nbytes if place == "disk" else 0)
    return fixed - buffers + WORKSPACE_SHARE * buffers


def _staging(request: PlanRequest, total: int) -> int:
    """None where every expert has a slot of its own: prefill then reads straight into those."""
    if total >= request.num_moe_layers * request.num_experts:
        return 0
    return min(request.num_experts, max(1, total // STAGING_SHARE))


def _assemble(
    request: PlanRequest,
    option: PrefillOption,
    place: EmbeddingPlace,
    total: int,
    min_cap_nbytes: int,
) -> MemoryPlan:
    staging = _staging(request, total)
    hot = total - staging
    items = [
        *fixed_items(request, option, place),
        ("staging", staging * request.slot_nbytes),
        ("hot_tier", hot * request.slot_nbytes),
    ]
    taken = sum(nbytes for _, nbytes in items)
    return MemoryPlan(
        cap_nbytes=request.cap_nbytes,
        feasible=request.cap_nbytes >= min_cap_nbytes
        and request.around.holds(taken - (device_nbytes(items) if request.device else 0)),
        items=tuple(items),
        slots=hot,
        staging_slots=staging,
        slot_nbytes=request.slot_nbytes,
        prefill_step=option.prefill_step,
        embedding=place,
        min_cap_nbytes=min_cap_nbytes,
        load_peak_nbytes=request.load_peak_nbytes,
        around=request.around,
    )
