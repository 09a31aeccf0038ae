"""What a plan is made from, and the items that do not depend on how many slots are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

from aegis.planner.surroundings import NO_BOUND, Surroundings

EmbeddingMode = Literal["auto", "ram", "disk"]
EmbeddingPlace = Literal["ram", "disk"]
Item = tuple[str, int]
"""An item's name and its bytes."""

DEVICE_ITEMS = (
    "device_runtime",
    "resident_weights",
    "embedding_table",
    "kv_cache",
    "recurrent_state",
    "workspace",
    "logits",
    "staging",
    "hot_tier",
)
"""What lies in the memory of a device that has its own."""

_LABELS = {"kv_cache": "KV cache", "io_buffers": "I/O buffers", "store": "store in memory"}


def item_label(name: str) -> str:
    """How people read an item's name."""
    return _LABELS.get(name, name.replace("_", " "))


@dataclass(frozen=True)
class PrefillOption:
    """One prefill step the engine offers and what a chunk of it needs."""

    prefill_step: int
    workspace_nbytes: int
    embedding_rows_nbytes: int = 0
    """Buffers for the embedding rows of one chunk, should the table stay on disk."""


@dataclass(frozen=True)
class DeviceShare:
    """A GPU with memory of its own, which takes the items of DEVICE_ITEMS."""

    runtime_nbytes: int
    """The declared figure of its driver and libraries, in its memory."""
    cap_nbytes: int | None = None
    """What the device's items may take; the plan's cap is then for the host's. None: one cap is for
    both together."""
    around: Surroundings = NO_BOUND
    """The device's memory."""

    def __post_init__(self) -> None:
        """Refuse values that no plan could honour."""
        if self.runtime_nbytes < 0:
            raise ValueError(f"runtime_nbytes is {self.runtime_nbytes}: it cannot be negative")
        if self.cap_nbytes is not None and self.cap_nbytes < 1:
            raise ValueError(f"device_cap_nbytes is {self.cap_nbytes}: it must be at least 1")


@dataclass(frozen=True)
class PlanRequest:
    """Everything a plan needs, as plain ints in bytes or counts."""

    cap_nbytes: int
    runtime_nbytes: int
    """The declared figure of interpreter, libraries and tokenizer."""
    resident_nbytes: int
    """Weights kept in memory, the embedding table not included."""
    embedding_nbytes: int
    kv_nbytes: int
    options: Sequence[PrefillOption]
    """Prefill steps to choose from, any order; a larger step never needs less."""
    slot_nbytes: int
    """Bytes of one slot: one expert's record."""
    num_moe_layers: int
    num_experts: int
    num_experts_per_tok: int
    tied: bool = False
    """The head reads the embedding table, so it must be in memory."""
    embedding: EmbeddingMode = "auto"
    prefill_step: int | None = None
    """Take this one of ``options`` whatever the cap."""
    max_slots: int | None = None
    """Upper bound on slots; None: as many as fit."""
    load_peak_nbytes: int = 0
    """A transient peak while opening, before the other items exist."""
    recurrent_nbytes: int = 0
    logits_nbytes: int = 0
    io_nbytes: int = 0
    page_cache_nbytes: int = 0
    """What is read at once through the page cache, where reads cannot bypass it."""
    store_nbytes: int = 0
    """The model's own files, where they lie in memory (tmpfs) instead of on a disk."""
    reserve_nbytes: int = 0
    around: Surroundings = NO_BOUND
    device: DeviceShare | None = None
    """None: everything lies in the host's memory."""

    def __post_init__(self) -> None:
        """Refuse values that no plan could honour."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{field.name} is {value}: it cannot be negative")
        for name in ("cap_nbytes", "slot_nbytes", "num_moe_layers", "num_experts_per_tok"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.num_experts < self.num_experts_per_tok:
            raise ValueError(
                f"num_experts is {self.num_experts}: a token chooses {self.num_experts_per_tok}"
            )
        if self.max_slots is not None and self.max_slots < self.num_experts_per_tok:
            raise ValueError(
                f"max_slots is {self.max_slots}: a token needs {self.num_experts_per_tok} at once"
            )
        if self.tied and self.embedding == "disk":
            raise ValueError(
                "the embedding table cannot stay on disk: this model's head is tied to it and "
                "reads all of it for every token; use --embedding ram or auto"
            )
        self._check_options()

    def _check_options(self) -> None:
        steps = sorted(self.options, key=lambda option: option.prefill_step)
        if not steps:
            raise ValueError("options is empty: a plan needs at least one prefill step")
        for smaller, larger in pairwise(steps):
            if (
                larger.prefill_step == smaller.prefill_step
                or larger.workspace_nbytes < smaller.workspace_nbytes
                or larger.embedding_rows_nbytes < smaller.embedding_rows_nbytes
            ):
                raise ValueError(
                    f"prefill steps {smaller.prefill_step} and {larger.prefill_step}: "
                    "steps must differ and a larger one cannot need less memory"
                )
        if self.prefill_step is not None and self.prefill_step not in {
            option.prefill_step for option in steps
        }:
            known = ", ".join(str(option.prefill_step) for option in steps)
            raise ValueError(f"prefill step {self.prefill_step} is not one of {known}")

    @property
    def all_slots(self) -> int:
        """Slots beyond which more would be useless: one per expert, or the bound asked for."""
        experts = self.num_moe_layers * self.num_experts
        return experts if self.max_slots is None else min(experts, self.max_slots)

    @property
    def allowed_options(self) -> list[PrefillOption]:
        """The prefill steps this request may use, smallest first."""
        return sorted(
            (o for o in self.options if self.prefill_step in (None, o.prefill_step)),
            key=lambda option: option.prefill_step,
        )


def fixed_items(
    request: PlanRequest, option: PrefillOption, embedding: EmbeddingPlace
) -> list[Item]:
    """Every item but the slots, in the order the plan shows them."""
    on_disk, device = embedding == "disk", request.device
    return [
        ("runtime", request.runtime_nbytes),
        *([] if device is None else [("device_runtime", device.runtime_nbytes)]),
        ("resident_weights", request.resident_nbytes),
        ("embedding_table", 0 if on_disk else request.embedding_nbytes),
        ("embedding_rows", option.embedding_rows_nbytes if on_disk else 0),
        ("kv_cache", request.kv_nbytes),
        ("recurrent_state", request.recurrent_nbytes),
        ("workspace", option.workspace_nbytes),
        ("logits", request.logits_nbytes),
        ("io_buffers", request.io_nbytes),
        ("page_cache", request.page_cache_nbytes),
        ("store", request.store_nbytes),
        ("runtime_reserve", request.reserve_nbytes),
    ]


def device_nbytes(items: Sequence[Item]) -> int:
    """Bytes of those items that a device with memory of its own holds."""
    return sum(nbytes for name, nbytes in items if name in DEVICE_ITEMS)


def fixed_nbytes(request: PlanRequest, option: PrefillOption, embedding: EmbeddingPlace) -> int:
    """Bytes of every item but the slots."""
    return sum(nbytes for _, nbytes in fixed_items(request, option, embedding))
