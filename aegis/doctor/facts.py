"""Everything doctor found out, and gathering it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from aegis.convert.cache import cache_folder
from aegis.convert.identity import EMBEDDED_NAME
from aegis.doctor.cache import CacheFolder, inspect_cache
from aegis.doctor.disk import USUAL_RECORD_NBYTES, DiskTest, measure_disk
from aegis.doctor.huge_pages import HugePages, try_huge_pages
from aegis.doctor.processor import Processor, read_processor
from aegis.engine.limits import MemoryLimits, memory_limits
from aegis.engine.planning import backend_layout, choose_backend, request_plan, resolve
from aegis.engine.sources import find_source
from aegis.errors import AegisError
from aegis.kernels import registry
from aegis.kernels.mlx.probe import lacks_cuda_headers
from aegis.settings import DEFAULT_CAP, Settings, default_backend

Found = TypeVar("Found")

MIB = 1 << 20
SHORT_CONTEXT = 512
LEAST_MARGIN_NBYTES = 16 * MIB
MARGIN_SHARE = 8
_COMPILERS = ("c++", "g++", "clang++")
_INSTALL = {
    "native": "a C++17 compiler (g++ or clang++) and Python's headers, then aegis-moe again: "
    "pip install --force-reinstall --no-cache-dir --no-deps, from where it was installed",
}
"""What to install for a backend that cannot run; nothing helps those that are not named."""


@dataclass(frozen=True)
class BackendFact:
    """One backend, and why it cannot run here."""

    name: str
    reason: str | None
    """None where it can run."""
    install: str | None
    """What to install for it; None where nothing helps, or nothing need be done."""


@dataclass(frozen=True)
class EmbeddedModel:
    """What the embedded model takes with the default backend."""

    name: str
    context: int
    """The default one; the figures below are for it unless they say otherwise."""
    min_cap_nbytes: int
    """The smallest cap that opens it."""
    short_min_cap_nbytes: int
    """The same with a context of SHORT_CONTEXT tokens."""
    everything_nbytes: int
    """The cap at which every expert stays in memory."""
    record_nbytes: int


@dataclass(frozen=True)
class Facts:
    """The whole machine; what is None could not be found out."""

    versions: Mapping[str, str]
    processor: Processor
    memory: MemoryLimits
    swap_nbytes: int | None
    """Size of all swap space, used or not."""
    address_space_nbytes: int | None
    """What this process may map at most; None: no limit."""
    huge_pages: HugePages
    cache: CacheFolder | None
    cache_error: str | None
    disk: DiskTest
    backends: tuple[BackendFact, ...]
    default_backend: str
    compiler: str | None
    model: EmbeddedModel | None
    model_error: str | None
    wanted_backend: str = "auto"
    """What $AEGIS_BACKEND says."""
    lacks_cuda_headers: bool = False
    """MLX would fail to compile kernels for the NVIDIA GPU that is here."""

    @property
    def margin_nbytes(self) -> int | None:
        """What the sensible cap leaves to other programs: an eighth of what is free."""
        free = self.memory.free
        return None if free is None else max(free // MARGIN_SHARE, LEAST_MARGIN_NBYTES)

    @property
    def sensible_cap_nbytes(self) -> int | None:
        """Free memory less the margin, in whole MiB; 0 where nothing is left."""
        free, margin = self.memory.free, self.margin_nbytes
        return None if free is None or margin is None else max(0, free - margin) // MIB * MIB

    @property
    def default_cap_nbytes(self) -> int | None:
        """The cap of a run without --cap."""
        return None if self.memory.free is None else min(DEFAULT_CAP, self.memory.free // 2)


def gather(disk: bool = True, root: Path = Path("/")) -> Facts:
    """Look at everything; ``root`` is where /proc and /sys are read."""
    memory = memory_limits(root)
    model, model_error = _or_reason(embedded_model)
    cache, error = _or_reason(lambda: inspect_cache(cache_folder(), root))
    test = DiskTest(skipped=error or "asked for")
    if disk and cache is not None:
        records = (USUAL_RECORD_NBYTES, *([] if model is None else [model.record_nbytes]))
        test = measure_disk(cache.folder, records, memory.free)
    return Facts(
        versions=versions(),
        processor=read_processor(root),
        memory=memory,
        swap_nbytes=_swap_nbytes(root),
        address_space_nbytes=_address_space_nbytes(),
        huge_pages=try_huge_pages(memory.free, root),
        cache=cache,
        cache_error=error,
        disk=test,
        backends=tuple(
            BackendFact(name, reason, None if reason is None else _INSTALL.get(name))
            for name, reason in registry.available()
        ),
        default_backend=_default_backend(),
        compiler=next((path for name in _COMPILERS if (path := shutil.which(name))), None),
        model=model,
        model_error=model_error,
        wanted_backend=default_backend(),
        lacks_cuda_headers=lacks_cuda_headers(),
    )


def _default_backend() -> str:
    """What computes without ``--backend``. Where the environment asks for one that cannot run here,
    so that nothing does: what would without it."""
    usual = default_backend()
    runs = usual != "auto" and registry.reason(usual) is None
    return usual if runs else registry.resolve()


def embedded_model(backend: str | None = None) -> EmbeddedModel:
    """Plan the embedded model, from headers alone; None: for the default backend.

    Raises:
        CheckpointError, BackendError: it is damaged, or the backend cannot run here.
    """
    name = choose_backend(backend or _default_backend(), checked=False)
    source = find_source(None, backend_layout(name))
    request = resolve(source, Settings(cap_nbytes=1, backend=name), name)
    short = replace(request, context=min(SHORT_CONTEXT, request.context))
    everything = replace(request, settings=Settings(cap_nbytes=1 << 60, backend=name))
    smallest = request_plan(request).min_cap_nbytes
    return EmbeddedModel(
        name=EMBEDDED_NAME,
        context=request.context,
        min_cap_nbytes=smallest,
        short_min_cap_nbytes=request_plan(short).min_cap_nbytes,
        everything_nbytes=max(smallest, request_plan(everything).total_nbytes),
        record_nbytes=request.layout.geometry("4bit").stride,
    )


def versions() -> dict[str, str]:
    """Of aegis, what it is built on, and the system."""
    found = {"aegis": _version("aegis-moe"), "python": platform.python_version()}
    found |= {name: _version(name) for name in ("numpy", "tokenizers")}
    found["os"] = _os_name()
    found["kernel"] = f"{platform.system()} {platform.release()}"
    return found


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _os_name() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _or_reason(look: Callable[[], Found]) -> tuple[Found | None, str | None]:
    """What ``look`` finds, or the sentence with which it fails: the rest must still be said."""
    try:
        return look(), None
    except (AegisError, OSError, RuntimeError) as error:
        return None, str(error)


def _address_space_nbytes() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _swap_nbytes(root: Path) -> int | None:
    try:
        found = re.search(r"(?m)^SwapTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
