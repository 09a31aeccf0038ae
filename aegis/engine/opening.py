"""Opening a model: convert if needed, plan, allocate one arena, load, bind."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from aegis.checkpoint.hold import Hold
from aegis.checkpoint.storage import storage_of
from aegis.engine import memory
from aegis.engine.backends import backend_errors
from aegis.engine.embedding import DiskEmbedding
from aegis.engine.forward import Forward
from aegis.engine.governor import DeviceGauge, Governor, ProcessGauge
from aegis.engine.planning import (
    Request,
    backend_layout,
    choose_backend,
    find_model,
    request_plan,
    resolve,
    store_nbytes,
)
from aegis.engine.recurrent import Recurrence
from aegis.engine.sampling import warm_up
from aegis.engine.sources import Model, Progress
from aegis.errors import AegisError, PlanError, ReadError, StoreError
from aegis.kernels import registry
from aegis.kernels.sizes import align_up
from aegis.models import family
from aegis.models.base import Decoder, Parts
from aegis.planner import LedgerRow, MemoryPlan, format_size, make_ledger
from aegis.settings import Settings
from aegis.tiers.arena import Arena
from aegis.tiers.errors import TiersError
from aegis.tiers.facade import ExpertTiers
from aegis.tiers.slots import SlotPool
from aegis.tiers.store import ExpertFiles

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aegis.checkpoint.layout import ExpertGeometry
    from aegis.checkpoint.store import Store
    from aegis.hub.remote import OnDownload
    from aegis.kernels.base import Backend, KVCache, RecurrentState, Weight
    from aegis.text.tokenizer import Tokenizer

_EMBEDDING = "embed_tokens"
_ALIGN = 4096
_TOGETHER = {
    "slots": ("staging", "hot_tier"),
    "resident_weights": ("resident_weights", "embedding_table"),
    "workspace": ("workspace", "logits"),
}
"""Planned items that share a region of the arena, so that they are measured as one."""


@dataclass
class Opened:
    """Everything an open model holds."""

    name: str
    store: Store
    request: Request
    plan: MemoryPlan
    tokenizer: Tokenizer
    arena: Arena
    backend: Backend
    decoder: Decoder
    weights: dict[str, Weight]
    """Resident tensors."""
    files: ExpertFiles
    tiers: ExpertTiers
    disk_embedding: DiskEmbedding | None
    hold: Hold
    """Of the store, which nobody deletes meanwhile."""
    runtime_nbytes: int
    """Measured after loading libraries and tokenizer, before the arena."""

    @property
    def recurrent_states(self) -> list[RecurrentState]:
        """Of the layers that have one instead of keys and values."""
        layers, places = self.decoder.layers, self.request.shape.delta_layers
        return [cast("RecurrentState", layers[place].cache) for place in places]

    @property
    def forward(self) -> Forward:
        """The passes over the layers."""
        return self._forward

    def __post_init__(self) -> None:
        items = dict(self.plan.items)
        runtime = (items["runtime"], self.runtime_nbytes)
        elsewhere = items["store"] + items["page_cache"]
        own, device = self.backend.memory, self.plan.device
        device_runtime = items.get("device_runtime", 0)
        apart = None if device is None or own is None else device.cap_nbytes
        process = ProcessGauge(
            self.plan.cap_nbytes,
            self.arena,
            runtime,
            elsewhere,
            own,
            device_runtime if apart is None else None,
        )
        gauge: DeviceGauge | None = None
        try:
            if apart is not None and own is not None:
                gauge = DeviceGauge(apart, device_runtime, own)
            self.governor = Governor(self.tiers, process, device=gauge)
        except BaseException:  # Ctrl-C: reading all limits takes a moment.
            process.close()
            if gauge is not None:
                gauge.close()
            raise
        embed = self.disk_embedding or self.decoder.embedding
        self.recurrence = Recurrence(self.recurrent_states)
        self._forward = Forward(
            self.decoder, self.tiers, embed, self.governor.watch, self.backend.queue
        )

    def describe(self) -> str:
        """Backend, reads and pages in one line."""
        return f"{self.backend.describe()} · {self._reads()} · {self._where()}"

    def _where(self) -> str:
        """What memory the model lies in."""
        if self.backend.memory is not None:
            held = sum(self.backend.memory.measured().values())
            return f"{format_size(held)} in the backend's own memory"
        huge = self.arena.huge_nbytes()
        pages = "page size unknown" if huge is None else f"{format_size(huge)} in huge pages"
        return f"arena {format_size(self.arena.nbytes)}, {pages}"

    def _reads(self) -> str:
        if self.request.storage.kind == "memory":
            return f"reads from memory, since {self.request.storage.reason}"
        return "direct reads" if self.files.mode == "direct" else f"buffered: {self.files.reason}"

    def ledger(self) -> list[LedgerRow]:
        """Planned against measured."""
        measured = {"runtime": self.runtime_nbytes}
        measured.update({name: size for name, (_, size) in self.arena.regions().items() if size})
        if self.backend.memory is not None:
            measured.update(self.backend.memory.measured())
        measured["slots"] -= min(measured["slots"], self.arena.released_nbytes)
        rows = make_ledger(
            self.plan.items,
            measured,
            total_nbytes=self.plan.total_nbytes,
            peak_nbytes=memory.peak_nbytes(),
            together=_TOGETHER,
        )
        return [*rows[:-1], *self._device_rows(), rows[-1]]

    def _device_rows(self) -> list[LedgerRow]:
        """What arrays take of a device's own memory, in all."""
        own = self.backend.memory
        if self.plan.device is None or own is None:
            return []
        planned = self.plan.device_nbytes - dict(self.plan.items)["device_runtime"]
        return [LedgerRow("device_arrays", planned, sum(own.measured().values()))]

    def read_error(self, error: TiersError) -> AegisError:
        """A failure of the tiers as one of ours."""
        return ReadError(str(error))

    def close(self) -> None:
        """Stop threads, close files, give the memory back."""
        self.tiers.close()
        self.close_in_child()
        self.forward.close()
        # These hold weights, slots and states that are the backend's own.
        self.recurrence.close()
        self.weights.clear()
        del self.decoder
        self.backend.close()
        self.arena.close()

    def close_in_child(self) -> None:
        """What a forked child has of it: open files."""
        self.governor.close()
        self.files.close()
        self.hold.close()
        if self.disk_embedding is not None:
            self.disk_embedding.close()


def open_model(
    model: Model,
    settings: Settings,
    progress: Progress | None,
    on_plan: Callable[[MemoryPlan], None] | None,
    on_download: OnDownload | None = None,
) -> Opened:
    """Plan from headers, refuse what does not fit, then download, convert, allocate and load."""
    backend = choose_backend(settings.backend)
    layout, experts = backend_layout(backend), settings.experts
    # Found once for all that follows: headers are read once.
    source = find_model(model, backend, settings)
    request = resolve(source, settings, backend)
    plan = request_plan(request)
    if not plan.feasible:
        raise PlanError(plan.refusal())
    if experts == "3bit":
        source.refuse_without_3bit(layout)
    if on_plan is not None:
        on_plan(plan)
    source = source.brought(store_nbytes(request), on_download)
    # Before converting, which may take minutes: a damaged tokenizer is found in a moment.
    tokenizer = None if source.folder is None else _load_tokenizer(source.folder)
    store = source.make(layout, experts, progress)
    tokenizer = tokenizer or _load_tokenizer(store.path)
    if store.layout != request.layout:
        raise StoreError(f"{store.path} holds another model than it is named for; remove it")
    # Known for certain only now, with a file of its own to try.
    request = replace(request, storage=storage_of(store.resident_path))
    warm_up()
    memory.trim()
    try:
        with backend_errors(), ExitStack() as undo:
            opened = _allocate(undo, source.name, store, request, plan, tokenizer)
            undo.pop_all()
            return opened
    except TiersError as error:
        raise StoreError(str(error)) from error


def _load_tokenizer(folder: Path) -> Tokenizer:
    """The model's tokenizer; a store's files are compared with their checksums first."""
    from aegis.checkpoint.store import Store, is_store
    from aegis.text.tokenizer import Tokenizer

    if is_store(folder):
        Store.open(folder).check_copied()
    return Tokenizer.open(folder)


def _arena_nbytes(plan: MemoryPlan, owned: Collection[str]) -> int:
    """What the arena holds: every item but those that live in the interpreter's own memory, and
    those that the backend allocates. Never empty: an arena has at least a page."""
    outside = {"runtime", "device_runtime", "runtime_reserve", "io_buffers", "page_cache", "store"}
    outside.update(owned)
    sizes = [align_up(nbytes, _ALIGN) for name, nbytes in plan.items if name not in outside]
    return sum(sizes) or _ALIGN


def _allocate(
    undo: ExitStack,
    name: str,
    store: Store,
    request: Request,
    plan: MemoryPlan,
    tokenizer: Tokenizer,
) -> Opened:
    """Take memory, files and threads; ``undo`` gives them back should something fail."""
    settings, layout = request.settings, store.layout
    items = dict(plan.items)
    geometry = layout.geometry(settings.experts)
    hold = Hold(store.path)
    undo.callback(hold.close)
    paths = store.expert_paths(settings.experts)
    files = ExpertFiles(
        paths,
        geometry.record_nbytes,
        geometry.stride,
        layout.num_experts,
        checksums=store.expert_checksums(settings.experts),
        layers=layout.moe_layers,
        direct=request.storage.kind != "buffered",
        reason=request.storage.reason,
    )
    undo.callback(files.close)
    backend = registry.create(request.backend, request.threads, request.numbers)
    undo.callback(backend.close)
    runtime_nbytes = memory.resident_nbytes()
    arena = Arena(_arena_nbytes(plan, backend.owned))
    undo.callback(arena.close)
    on_disk = plan.embedding == "disk"
    skip = {_EMBEDDING} if on_disk else set()
    weights = store.load_resident(
        _resident_memory(backend, arena, layout.resident_nbytes(skip)), skip
    )
    workspace = request.workspace(plan.prefill_step)
    scratch = 0 if "workspace" in backend.owned else backend.workspace_nbytes(workspace)
    backend.open_workspace(workspace, arena.take("workspace", scratch))
    caches = _caches(backend, request, arena, items)
    rows = arena.take("embedding_rows", items["embedding_rows"], _ALIGN) if on_disk else None
    slots = _slots(backend, arena, plan.total_slots, geometry)
    backend.bind_slots(slots)
    parts = _parts(backend, weights, store, caches, settings)
    decoder = family(layout.model_type).build(layout.config, parts)
    tiers = ExpertTiers(
        files,
        slots,
        num_experts_per_tok=request.shape.num_experts_per_tok,
        staging_slots=max(1, plan.staging_slots),
        policy=settings.policy,
        guess=settings.guess,
        guess_width=settings.guess_width,
        io_threads=settings.io_threads,
    )
    undo.callback(tiers.close)
    direct = request.storage.kind != "buffered"
    disk = None if rows is None else DiskEmbedding(store, decoder.embedding, rows, direct)
    if disk is not None:
        undo.callback(disk.close)
    return Opened(
        name=name,
        store=store,
        request=request,
        plan=plan,
        tokenizer=tokenizer,
        arena=arena,
        backend=backend,
        decoder=decoder,
        weights=weights,
        files=files,
        tiers=tiers,
        disk_embedding=disk,
        hold=hold,
        runtime_nbytes=runtime_nbytes,
    )


def _resident_memory(backend: Backend, arena: Arena, nbytes: int) -> NDArray[np.uint8]:
    if backend.memory is None:
        return arena.take("resident_weights", nbytes)
    return backend.memory.resident(nbytes)


def _slots(backend: Backend, arena: Arena, count: int, geometry: ExpertGeometry) -> SlotPool:
    """The slots, at the arena's end where they lie in it."""
    if backend.memory is None:
        return SlotPool.in_arena(arena, count, geometry.stride)
    arena.take("slots", 0)
    parts = backend.memory.slots(count, geometry.segments)
    slots = SlotPool(count, geometry.stride, parts=parts)
    if backend.queue is not None:
        slots.settle = backend.queue.settle
    return slots


def _caches(
    backend: Backend, request: Request, arena: Arena, items: dict[str, int]
) -> list[KVCache]:
    """Every layer's cache or recurrent state, each on a 64-byte boundary of an arena's region."""
    regions = {
        name: arena.take(name, 0 if name in backend.owned else items[name])
        for name in ("kv_cache", "recurrent_state")
    }
    shape, spec = request.shape, request.kv_spec
    caches: list[KVCache] = []
    starts = dict.fromkeys(regions, 0)
    for layer in range(shape.num_hidden_layers):
        delta = shape.delta if layer in shape.delta_layers else None
        name = "kv_cache" if delta is None else "recurrent_state"
        nbytes = backend.kv_nbytes(spec) if delta is None else backend.recurrent_nbytes(delta)
        place = regions[name][starts[name] : starts[name] + nbytes]
        if delta is None:
            caches.append(backend.kv_cache(spec, place))
        else:
            caches.append(backend.recurrent_state(delta, place))
        starts[name] = align_up(starts[name] + nbytes, 64)
    return caches


def _parts(
    backend: Backend,
    weights: dict[str, Weight],
    store: Store,
    caches: list[KVCache],
    settings: Settings,
) -> Parts:
    layout = store.layout
    table = layout.embedding
    assert len(table.shape) == 2
    return Parts(
        backend=backend,
        weights=weights,
        embedding=weights.get(_EMBEDDING),
        embedding_source=((table.shape[0], table.shape[1]), table.format, layout.layout),
        caches=caches,
        segments=layout.geometry(settings.experts).segments,
        layout=layout.layout,
    )
