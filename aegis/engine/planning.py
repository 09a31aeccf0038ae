"""From a model folder and a cap to a memory plan, from headers alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any, cast

from aegis.checkpoint.storage import DIRECT, Storage, storage_of
from aegis.convert.targets import quantization
from aegis.engine.backends import backend_errors
from aegis.engine.limits import MemoryLimits, memory_limits
from aegis.engine.memory import resident_nbytes
from aegis.engine.numbers import (
    NUMBER_NBYTES,
    device_of,
    device_share,
    numbers_of,
    prefill_steps,
    runtime_name,
)
from aegis.engine.sources import Model, Source, find_source
from aegis.errors import BackendError, UsageError, shown
from aegis.kernels import registry
from aegis.kernels.base import SlotPart, WorkspaceSpec
from aegis.kernels.sizes import align_up, block_inputs
from aegis.kernels.threads import default_threads, usable_processors
from aegis.models import check_layout, family
from aegis.planner import MemoryPlan, PlanRequest, PrefillOption, Surroundings, parse_size
from aegis.planner import make_plan as plan_request
from aegis.settings import (
    ALIGNMENT_NBYTES,
    DEFAULT_CONTEXT,
    IO_NBYTES,
    LOGIT_ROWS,
    PROMPT_NBYTES_PER_TOKEN,
    READ_NBYTES,
    RESERVE_NBYTES,
    RESERVED_THREADS,
    SAMPLING_NBYTES_PER_LOGIT,
    THREAD_NBYTES,
    Settings,
    runtime_figures,
)

if TYPE_CHECKING:
    from aegis.checkpoint.layout import StoreLayout
    from aegis.engine.numbers import Device
    from aegis.kernels.base import DeltaSpec, KVSpec, Layout, Numbers, Segment
    from aegis.models.base import ModelShape

_ROW_ALIGN = 4096
_SLOT_ALIGN = 4096


@dataclass(frozen=True)
class Request:
    """Everything decided before the plan: which backend, how long a context, what sizes."""

    settings: Settings
    backend: str
    threads: int
    context: int
    shape: ModelShape
    layout: StoreLayout
    tokenizer_nbytes: int
    """Size of tokenizer.json: what its tables take in memory follows from it."""
    device: Device
    numbers: Numbers
    """What activations are computed in."""
    storage: Storage = DIRECT
    """Of the store, or of the place where it will be."""

    def workspace(self, step: int) -> WorkspaceSpec:
        """The largest call of a prefill step."""
        shape = self.shape
        return WorkspaceSpec(
            max_tokens=step,
            context=self.context,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            moe_intermediate_size=shape.moe_intermediate_size,
            shared_expert_intermediate_size=shape.shared_expert_intermediate_size,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.num_experts_per_tok,
            vocab_size=shape.vocab_size,
            max_logit_rows=LOGIT_ROWS,
            threads=self.threads,
            num_resident_weights=_num_resident_weights(self.layout),
            num_resident_groups=_num_resident_groups(self.layout),
            number_nbytes=NUMBER_NBYTES[self.numbers],
            num_layers=shape.num_attention_layers,
            intermediate_size=shape.intermediate_size,
            latent=shape.latent,
            output_gate=shape.output_gate,
            delta=shape.delta,
        )

    @property
    def kv_spec(self) -> KVSpec:
        """The key/value cache of a layer with attention."""
        spec = self.shape.kv_spec(self.context)
        return replace(spec, number_nbytes=NUMBER_NBYTES[self.numbers])


def _num_resident_weights(layout: StoreLayout) -> int:
    shapes = [tensor.shape for tensor in layout.resident.values()]
    return sum(align_up(s[0], 16) * s[1] for s in shapes if len(s) == 2)


def _num_resident_groups(layout: StoreLayout) -> int:
    matrices = [tensor for tensor in layout.resident.values() if len(tensor.shape) == 2]
    return sum(align_up(t.shape[0], 16) * t.shape[1] // block_inputs(t.format) for t in matrices)


def settings_for(cap: str | int, options: Mapping[str, Any]) -> Settings:
    """Settings from a cap in bytes or as text, and from fields of ``Settings``.

    ``device_cap``, also in either form, stands for ``device_cap_nbytes``.

    Raises:
        UsageError: the cap or an option is wrong.
    """
    chosen = dict(options)
    known = [field.name for field in fields(Settings) if field.name != "cap_nbytes"]
    for name in chosen.keys() - {*known, "device_cap"}:
        raise UsageError(f"there is no option {shown(name)}; the options are {', '.join(known)}")
    try:
        device_cap = chosen.pop("device_cap", None)
        if device_cap is not None:
            chosen["device_cap_nbytes"] = _nbytes(device_cap, "device_cap")
        return Settings(cap_nbytes=_nbytes(cap, "cap"), **chosen)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _nbytes(size: Any, name: str) -> Any:
    """A size as text in bytes; what may be a number is for ``Settings`` to look at."""
    if isinstance(size, str):
        return parse_size(size)
    if not hasattr(size, "__index__"):
        raise UsageError(f"{name} is {shown(size)}; give text, as 4GiB or 512MiB, or whole bytes")
    return size


def choose_backend(name: str, checked: bool = True) -> str:
    """Resolve ``auto`` and check that the backend can run here, as the environment asks for.

    Raises:
        BackendError: it cannot; the message says why.
    """
    with backend_errors():
        return registry.resolve(name, checked)


def backend_layout(backend: str) -> Layout:
    """The store layout that a backend prefers."""
    return "row" if backend == "mlx" else "il16"


def find_model(model: Model, backend: str, settings: Settings) -> Source:
    """The store that a name stands for, or else what its store will be made of.

    Raises:
        As ``find_source``.
    """
    choice = quantization(settings.bits, settings.group_size)
    return find_source(model, backend_layout(backend), settings.experts, choice)


def compute_threads(requested: int | None) -> int:
    """Threads to compute with: as asked for, never more than the processors there are.

    Without a request a container's quota counts too: more threads than it keeps busy wait for
    each other.
    """
    return default_threads() if requested is None else min(requested, usable_processors())


def resolve(source: Source, settings: Settings, backend: str) -> Request:
    """Settle context and threads for a model, from headers alone.

    Raises:
        UsageError: the context is longer than the model's.
        CheckpointError: the checkpoint is damaged, incomplete or not supported.
        StoreError: the store does not hold what its config says, or has another layout.
        TokenizerError: tokenizer.json is missing or cannot be one.
        BackendError: the backend has no kernels for the model's sizes.
    """
    layout = source.layout(backend_layout(backend))
    shape = family(layout.model_type).shape(layout.config)
    check_layout(layout)
    context = settings.context or min(DEFAULT_CONTEXT, shape.max_position_embeddings)
    if not 1 <= context <= shape.max_position_embeddings:
        raise UsageError(
            f"the context of {context} tokens is outside this model's 1 to"
            f" {shape.max_position_embeddings}; choose one in that range"
        )
    threads = compute_threads(settings.threads)
    device = device_of(backend)
    request = Request(
        settings=settings,
        backend=backend,
        threads=threads,
        context=context,
        shape=shape,
        layout=layout,
        tokenizer_nbytes=source.tokenizer_nbytes,
        device=device,
        numbers=numbers_of(settings, device, layout),
        storage=store_storage(source, layout.layout),
    )
    _refuse_unsupported(request)
    return request


def _refuse_unsupported(request: Request) -> None:
    """Before a conversion, which may take minutes."""
    sizes = importlib.import_module(f"aegis.kernels.{request.backend}.sizes")
    unsupported = cast("Callable[[WorkspaceSpec], str | None]", sizes.unsupported)
    if (reason := unsupported(request.workspace(1))) is not None:
        raise BackendError(
            f"the {request.backend} backend cannot compute this model: {reason}; use another one"
            " (--backend reference) or another model"
        )


def store_storage(source: Source, layout: Layout) -> Storage:
    """How the files of a model's store are read, or will be where it will lie."""
    from aegis.checkpoint.store import RESIDENT

    store = source.place(layout)
    resident = store / RESIDENT
    return storage_of(resident if resident.is_file() else store)


def surroundings(limits: MemoryLimits, runtime_nbytes: int, there_nbytes: int = 0) -> Surroundings:
    """What the machine and the containers around us let a plan have.

    there_nbytes: what exists already of the plan, apart from this process.
    """
    ceiling, inside = limits.ceiling, limits.tightest
    name, remedy = "this machine's memory", "use a shorter context"
    if inside is not None and ceiling == inside.limit:
        name, remedy = f"this container's memory ({inside.source})", f"raise it or {remedy}"
    held = min(resident_nbytes(), runtime_nbytes)
    return Surroundings(
        # The kernel rounds a limit down to a page: a cap of just that limit is not above it.
        ceiling_nbytes=None if ceiling is None else align_up(ceiling + 1, PAGESIZE) - 1,
        ceiling=name,
        remedy=remedy,
        # What this process holds of its runtime already is part of the plan.
        free_nbytes=None if limits.free is None else limits.free + held + there_nbytes,
    )


def request_plan(request: Request) -> MemoryPlan:
    """Size every item and spend the cap.

    Raises:
        UsageError: no plan could honour the request.
    """
    try:
        return plan_request(_plan_request(request))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _plan_request(request: Request) -> PlanRequest:
    layout, settings, shape = request.layout, request.settings, request.shape
    sizes = importlib.import_module(f"aegis.kernels.{request.backend}.sizes")
    workspace_nbytes = cast("Callable[[WorkspaceSpec], int]", sizes.workspace_nbytes)
    kv_nbytes = cast("Callable[[KVSpec], int]", sizes.kv_nbytes)
    logits = LOGIT_ROWS * shape.vocab_size * 4
    row_range = layout.embedding_range
    row_nbytes = 0 if row_range is None else align_up(row_range.nbytes, _ROW_ALIGN) + _ROW_ALIGN
    slot_nbytes = cast("Callable[[Mapping[str, Segment], int], int]", sizes.slot_nbytes)
    geometry = layout.geometry(settings.experts)
    steps = prefill_steps(settings, request.backend, request.context)
    options = [
        PrefillOption(
            step,
            workspace_nbytes(request.workspace(step)) - logits + ALIGNMENT_NBYTES,
            step * row_nbytes,
        )
        for step in steps
    ]
    name = runtime_name(request.backend, request.device)
    runtime = runtime_figures(name, request.tokenizer_nbytes)
    tied = shape.tie_word_embeddings or row_range is None
    if tied and settings.embedding == "disk":
        raise UsageError(
            "the embedding table cannot stay on disk: this model's head is tied to it and reads"
            " all of it for every token; use --embedding ram or auto"
        )
    with_table, without = layout.resident_nbytes(), layout.resident_nbytes({"embed_tokens"})
    in_memory = store_nbytes(request) if request.storage.kind == "memory" else 0
    there = in_memory if request.storage.there else 0
    return PlanRequest(
        cap_nbytes=settings.cap_nbytes,
        runtime_nbytes=runtime.steady_nbytes,
        load_peak_nbytes=runtime.load_peak_nbytes + in_memory,
        resident_nbytes=without,
        embedding_nbytes=with_table - without,
        kv_nbytes=shape.num_attention_layers * align_up(kv_nbytes(request.kv_spec), 64),
        recurrent_nbytes=_recurrent_nbytes(request),
        options=options,
        slot_nbytes=slot_nbytes(geometry.segments, geometry.stride),
        num_moe_layers=len(shape.moe_layers),
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_tok,
        tied=tied,
        embedding=settings.embedding,
        prefill_step=None if settings.prefill_step is None else steps[-1],
        max_slots=settings.max_slots,
        logits_nbytes=logits,
        io_nbytes=IO_NBYTES + _bounced_nbytes(request),
        page_cache_nbytes=_page_cache_nbytes(request),
        store_nbytes=in_memory,
        reserve_nbytes=_reserve_nbytes(request),
        around=surroundings(memory_limits(), runtime.steady_nbytes, there),
        device=device_share(settings, request.device),
    )


def _recurrent_nbytes(request: Request) -> int:
    """Every recurrent state and the copy of it that is kept."""
    shape = request.shape
    if shape.delta is None:
        return 0
    sizes = importlib.import_module(f"aegis.kernels.{request.backend}.sizes")
    recurrent_nbytes = cast("Callable[[DeltaSpec], int]", sizes.recurrent_nbytes)
    return len(shape.delta_layers) * align_up(recurrent_nbytes(shape.delta), 64)


def store_nbytes(request: Request) -> int:
    """All files of the store that take space."""
    store = request.layout.nbytes(request.settings.experts == "3bit")
    return store + align_up(request.tokenizer_nbytes, _ROW_ALIGN)


def _bounced_nbytes(request: Request) -> int:
    """Buffers of readers for what cannot be read into slots in parts."""
    if request.backend != "mlx":
        return 0
    from aegis.kernels.mlx.probe import reads_direct
    from aegis.kernels.mlx.sizes import segment_ranges
    from aegis.tiers.scatter import RUN_NBYTES, Scatter

    geometry = request.layout.geometry(request.settings.experts)
    ranges = [place for part in geometry.segments.values() for place in segment_ranges(part)]
    direct = reads_direct(request.device)
    parts = [SlotPart(place.offset, place.nbytes, 0, place.nbytes, direct) for place in ranges]
    run = max(1, RUN_NBYTES // geometry.stride)
    return request.settings.io_threads * run * Scatter(parts, geometry.stride).bounce_nbytes


def _page_cache_nbytes(request: Request) -> int:
    """What every reader has there until its read has ended and the pages are dropped."""
    if request.storage.kind in ("direct", "memory"):
        return 0
    settings = request.settings
    record = request.layout.geometry(settings.experts).stride
    return settings.io_threads * max(READ_NBYTES, record)


def _reserve_nbytes(request: Request) -> int:
    """The reserve, with what grows by the vocabulary, the prompt and the threads."""
    threads = max(0, request.threads + request.settings.io_threads - RESERVED_THREADS)
    sampling = SAMPLING_NBYTES_PER_LOGIT * request.shape.vocab_size
    prompt = PROMPT_NBYTES_PER_TOKEN * request.context
    return RESERVE_NBYTES + align_up(sampling + prompt + threads * THREAD_NBYTES, _ROW_ALIGN)


def make_plan(model: Model, settings: Settings) -> MemoryPlan:
    """The plan for a store, or for a model whose store is not made yet; nothing is written.

    Raises:
        HubError, CheckpointError, StoreError, UsageError, BackendError: the request cannot be
        planned. A plan that does not fit is returned with ``feasible`` false, not raised.
    """
    backend = choose_backend(settings.backend)
    source = find_model(model, backend, settings)
    return request_plan(resolve(source, settings, backend))
