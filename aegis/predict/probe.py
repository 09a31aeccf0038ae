"""Probing this machine for a model: what a probe needs, the process that does it, what it found.

The probe's files lie where the model's store lies or would lie, in a folder that is gone when the
probe ends, whatever ends it; one that was killed leaves its folder to the next.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.bench.runs import ask
from aegis.checkpoint.hold import Hold, is_held
from aegis.checkpoint.storage import scratch_folders
from aegis.child import deferred_signals
from aegis.engine.planning import backend_layout
from aegis.engine.sources import StoreSource
from aegis.errors import StoreError
from aegis.planner import format_size
from aegis.predict.cut import Sizes, cut_config, cut_sizes
from aegis.settings import MIB
from aegis.tiers.virtual_disk import Disk

if TYPE_CHECKING:
    from aegis.checkpoint.layout import StoreLayout
    from aegis.engine.sources import Source
    from aegis.settings import ExpertBits

WORKER = "aegis.predict.worker"
_PREFIX = ".aegis-probe-"
_OVERHEAD_NBYTES = 64 * MIB
"""Room for a tokenizer, configs and what the file system needs."""


@dataclass(frozen=True)
class Kernels:
    """Seconds of computing, of a token at a position in the context with every expert in a slot."""

    attention_s: float
    """A layer's attention."""
    delta_s: float
    """What takes its place in layers with a recurrent state."""
    mlp_s: float
    """An MLP in a layer without experts."""
    router_s: float
    experts_s: float
    """All experts of a layer, shared ones too."""
    head_s: float
    """Embedding, final norm and logits."""
    between_s: float
    """Between the blocks of a layer."""
    read_s: float = 0.0
    """What a read takes of the thread that computes."""
    slower: float = 1.0
    """How many times longer blocks took beside reads that were under way for ``slower_busy`` of the
    time."""
    slower_busy: float = 0.0
    disk_left: float = 1.0
    """The share of the disk's speed that is left beside computing."""
    waited_share: float = 0.0
    """The part of the time that was waited where that was found."""


@dataclass(frozen=True)
class Probe:
    """What was measured, and of how much of the model."""

    kernels: Kernels
    disk: Disk
    """While nothing is computed."""
    sizes: Sizes
    own_files: bool
    """Whether the model's own expert files were read."""

    @property
    def computing_disk(self) -> Disk:
        """While something is computed."""
        left = self.disk.nbytes_per_s * self.kernels.disk_left
        return Disk(left, self.disk.latency_s, self.disk.readers)

    def to_json(self) -> dict[str, Any]:
        """What ``aegis predict --json`` prints of it."""
        return {
            "kernels": vars(self.kernels),
            "disk": {
                "nbytes_per_s": self.disk.nbytes_per_s,
                "latency_s": self.disk.latency_s,
                "own_files": self.own_files,
            },
            "layers": self.sizes.layers,
            "experts": self.sizes.experts,
            "vocab_size": self.sizes.words,
        }


def run_probe(
    source: Source,
    settings: Mapping[str, Any],
    backend: str,
    embedding: str,
    depth: int,
    tick: Callable[[int], None] = lambda done: None,
) -> Probe:
    """Measure what a model's layers and records take here; none of its weights is needed or read.

    settings: fields of Settings, as ``engine_settings`` gives them. embedding: where the plan has
    the table. depth: the position in the context. tick: called with hundredths that are done.

    Raises:
        StoreError: there is no place for the probe's files.
        AegisError: what went wrong in the process that measures.
    """
    layout = source.layout(backend_layout(backend))
    sizes = cut_sizes(layout)
    experts = settings["experts"]
    record_nbytes = layout.geometry(experts).stride
    names = ("experts", "policy", "guess", "guess_width", "io_threads", "threads", "activations")
    with probe_folder(source.place(layout.layout).parent, _needed_nbytes(layout, sizes)) as folder:
        request = {
            "folder": str(folder),
            "config": cut_config(layout, sizes),
            "layout": layout.layout,
            "settings": {name: settings[name] for name in names}
            | {"backend": backend, "embedding": embedding},
            "depth": depth,
            "record_nbytes": record_nbytes,
            "files": _own_files(source, experts),
        }
        found = ask(request, "the probe", tick, WORKER)
    disk = Disk(found["disk"]["nbytes_per_s"], found["disk"]["latency_s"], settings["io_threads"])
    return Probe(Kernels(**found["kernels"]), disk, sizes, bool(request["files"]))


def _needed_nbytes(layout: StoreLayout, sizes: Sizes) -> int:
    """At most: the small model has no more of anything."""
    resident = layout.resident_file_nbytes
    records = sizes.layers * sizes.experts * 2 * layout.experts.stride
    return min(resident, layout.nbytes()) + records + _OVERHEAD_NBYTES


def _own_files(source: Source, experts: ExpertBits) -> list[str]:
    """Expert files of a store that is there."""
    if not isinstance(source, StoreSource):
        return []
    from aegis.checkpoint.store import Store

    store = Store.open(source.path)
    if experts == "3bit" and not store.has_3bit:
        return []
    return [str(path) for path in store.expert_paths(experts)]


@contextmanager
def probe_folder(place: Path, needed_nbytes: int = 0) -> Iterator[Path]:
    """A folder on the disk of ``place``, or where that cannot be written, on one for temporary
    files; it and all in it is removed at the end.

    Raises:
        StoreError: there is no room, or nothing that can be written; nothing was.
    """
    parent = _parent(place, needed_nbytes)
    _remove_left(parent)
    folder = Path()
    try:
        # A signal between making it and knowing it would leave it behind.
        with deferred_signals():
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with Hold(folder):
            yield folder
    finally:
        if folder != Path():
            with deferred_signals():
                shutil.rmtree(folder, ignore_errors=True)


def _parent(place: Path, needed_nbytes: int) -> Path:
    reasons = []
    for folder, reason in scratch_folders(place, needed_nbytes):
        if reason is None:
            return folder
        reasons.append(f"{folder} {reason}")
    raise StoreError(
        f"the probe needs {format_size(needed_nbytes)} on a disk for a moment, but"
        f" {' and '.join(reasons)}; free some space, or set AEGIS_CACHE to a folder with room"
    )


def _remove_left(parent: Path) -> None:
    """What probes left that were killed."""
    with suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            if not is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)
