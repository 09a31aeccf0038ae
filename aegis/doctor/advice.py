"""What is wrong with a machine, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from aegis.doctor.cache import NETWORK_FILE_SYSTEMS
from aegis.doctor.facts import SHORT_CONTEXT, EmbeddedModel, Facts
from aegis.planner import format_least, format_size

GIB = 1 << 30
SLOW_NBYTES_PER_S = 1 * GIB
LARGE_STORE_NBYTES = 20 * GIB
"""A model of 35 billion parameters in 4 bits, converted."""
SMALL_STORE_NBYTES = 256 << 20
"""The embedded model, converted, while it is being written."""

Severity = Literal["problem", "note"]


@dataclass(frozen=True)
class Problem:
    """Something that costs speed or stops aegis from working, and its remedy."""

    name: str
    """Stays the same from version to version."""
    severity: Severity
    """``problem``: nothing runs, or much slower than it could; ``note``: good to know."""
    what: str
    advice: str


def find_problems(facts: Facts) -> list[Problem]:
    """Every problem of a machine, those that stop it first."""
    looks = (_memory, _backends, _processor, _huge_pages, _cache, _disk)
    found = [problem for look in looks for problem in look(facts)]
    return sorted(found, key=lambda problem: problem.severity == "note")


def _memory(facts: Facts) -> Iterator[Problem]:
    model, cap = facts.model, facts.sensible_cap_nbytes
    if model is None:
        yield Problem(
            "embedded_model",
            "problem",
            f"the embedded model cannot be used: {facts.model_error}",
            "install aegis-moe again, or name another model",
        )
    elif cap is not None:
        yield from _small_caps(cap, facts.default_cap_nbytes or 0, model)
    limit = facts.address_space_nbytes
    if limit is not None and cap is not None and limit < cap:
        yield Problem(
            "address_space",
            "problem",
            f"the address space is limited to {format_size(limit)} (ulimit -v), less than the"
            " memory that can be used",
            "ulimit -v unlimited, and a smaller --cap to limit memory instead",
        )
    if facts.swap_nbytes:
        yield Problem(
            "swap",
            "note",
            f"{format_size(facts.swap_nbytes)} of swap space may take parts of the model out of"
            " memory, which is slower than reading them again",
            "run it in a memory cgroup without swap (systemd-run -p MemorySwapMax=0), or swapoff",
        )


def _small_caps(cap: int, default: int, model: EmbeddedModel) -> Iterator[Problem]:
    needed = format_least(model.min_cap_nbytes)
    if cap < model.short_min_cap_nbytes:
        yield Problem(
            "little_memory",
            "problem",
            f"a sensible cap is {format_size(cap)}, but the embedded model opens from"
            f" {format_least(model.short_min_cap_nbytes)} with -c {SHORT_CONTEXT}",
            "end other programs or raise the container's limit",
        )
    elif cap < model.min_cap_nbytes:
        yield Problem(
            "little_memory_for_context",
            "problem",
            f"a sensible cap is {format_size(cap)}, but the embedded model opens from {needed}"
            f" with its context of {model.context} tokens",
            f"use a shorter context, as with -c {SHORT_CONTEXT} --cap {_flag(cap)}",
        )
    elif default < model.min_cap_nbytes:
        yield Problem(
            "default_cap_too_small",
            "problem",
            f"without --cap half of the free memory, {format_size(default)}, is used, but the"
            f" embedded model opens from {needed}",
            f"give --cap {_flag(cap)}",
        )


def _flag(cap_nbytes: int) -> str:
    """A cap as --cap takes it without quotes; sensible ones are whole MiB."""
    return f"{cap_nbytes >> 20}MiB"


def _backends(facts: Facts) -> Iterator[Problem]:
    wanted = next((b for b in facts.backends if b.name == facts.wanted_backend), None)
    if wanted is not None and wanted.reason is not None:
        yield Problem(
            "backend_not_available",
            "problem",
            f"AEGIS_BACKEND asks for the {wanted.name} backend, which cannot run: {wanted.reason}",
            "unset AEGIS_BACKEND, or set it to another backend",
        )
    if facts.lacks_cuda_headers:
        yield Problem(
            "no_cuda_headers",
            "problem",
            "MLX compiles kernels for the NVIDIA GPU with CUDA's headers, of which crt/mma.h is not"
            " installed",
            "pip install 'nvidia-cuda-crt==13.*', as the extra cuda13 does",
        )
    native = next((b for b in facts.backends if b.name == "native"), None)
    if native is None or native.reason is None or facts.default_backend != "reference":
        return
    if facts.compiler is None:
        found = "and no C++ compiler was found"
        remedy = f"install {native.install}"
    else:
        found = f"though there is a C++ compiler, {facts.compiler}"
        remedy = (
            "install aegis-moe again with pip install -v --force-reinstall --no-cache-dir"
            " --no-deps, which shows why the build failed"
        )
    yield Problem(
        "no_native_backend",
        "problem",
        f"the compiled kernels are missing, so numpy computes (the reference backend), over ten"
        f" times slower, {found}",
        remedy,
    )


def _processor(facts: Facts) -> Iterator[Problem]:
    processor = facts.processor
    cores = processor.usable_cores
    busy = cores if processor.quota_cores is None else min(cores, processor.quota_cores)
    if busy < 2:
        why = "" if cores < 2 else " (a container's CPU quota)"
        yield Problem(
            "one_core",
            "problem",
            f"only {busy:g} core can be used{why}: computing and reading share it",
            "give the process two cores or more (taskset, docker run --cpus)",
        )
    wanted = processor.wanted_isa
    if wanted and processor.isas and wanted not in processor.isas:
        yield Problem(
            "isa_not_available",
            "problem",
            f"AEGIS_ISA asks for {wanted}, which the kernels do not have here",
            f"unset AEGIS_ISA, or use one of {', '.join(processor.isas)}",
        )
    elif processor.isas and processor.isa != processor.isas[0]:
        yield Problem(
            "isa_not_best",
            "problem" if processor.isa == "scalar" else "note",
            f"AEGIS_ISA chooses {processor.isa} where {processor.isas[0]} is available",
            "unset AEGIS_ISA",
        )
    elif processor.isas == ("scalar",):
        yield Problem(
            "no_vector_instructions",
            "problem",
            "the processor has neither AVX2 with FMA and F16C nor NEON, so the kernels use no"
            " vector instructions and are many times slower",
            "use a processor with AVX2 (a virtual machine may hide it: choose the host's model)",
        )


def _huge_pages(facts: Facts) -> Iterator[Problem]:
    pages = facts.huge_pages
    if pages.setting == "never":
        yield Problem(
            "huge_pages_never",
            "problem",
            "huge pages are off (never), so reads land in small pages, up to 2.5 times slower",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif pages.huge_nbytes is not None and pages.huge_nbytes < pages.arena_nbytes // 2:
        yield Problem(
            "huge_pages_not_given",
            "problem",
            f"a test arena of {format_size(pages.arena_nbytes)} got"
            f" {format_size(pages.huge_nbytes)} in huge pages though the setting is"
            f" {pages.setting or 'unknown'}, so reads may be up to 2.5 times slower",
            "memory may be fragmented (as root: echo 1 > /proc/sys/vm/compact_memory), or huge"
            " pages are off for this process (prctl PR_SET_THP_DISABLE)",
        )


def _cache(facts: Facts) -> Iterator[Problem]:
    cache = facts.cache
    if cache is None:
        yield Problem(
            "no_cache_folder",
            "problem",
            f"the cache folder is not known: {facts.cache_error}",
            "set AEGIS_CACHE to a folder that can be written",
        )
        return
    if not cache.writable:
        yield Problem(
            "cache_read_only",
            "note" if cache.stores else "problem",
            f"{cache.folder} cannot be written, so only models that are converted already can"
            f" be used ({cache.stores} are there)",
            "set AEGIS_CACHE to a folder that can be written",
        )
    if cache.storage.kind == "memory":
        yield Problem(
            "cache_in_memory",
            "problem",
            f"{cache.folder} lies in memory ({cache.file_system or 'unknown'}): a converted model"
            " there takes the memory that the cap is meant to save",
            "set AEGIS_CACHE to a folder on an SSD",
        )
    elif cache.direct is False:
        yield Problem(
            "no_direct_io",
            "problem",
            f"{cache.folder} ({cache.file_system or 'file system unknown'}) has"
            f" {cache.storage.describe()}; they are slower, and their pages have to be dropped",
            "set AEGIS_CACHE to a folder on ext4, XFS or btrfs on an SSD",
        )
    if cache.file_system in NETWORK_FILE_SYSTEMS:
        yield Problem(
            "cache_on_network",
            "problem",
            f"{cache.folder} lies on a network file system ({cache.file_system}); every"
            " expert that is not in memory is read over the network",
            "set AEGIS_CACHE to a folder on a local SSD",
        )
    elif cache.file_system == "overlay":
        yield Problem(
            "cache_in_container",
            "note",
            f"{cache.folder} lies in a container's own layer (overlay) and goes with it",
            "mount a volume and set AEGIS_CACHE to it",
        )
    yield from _space(cache.folder, cache.free_nbytes)


def _space(folder: object, free: int | None) -> Iterator[Problem]:
    if free is None or free >= LARGE_STORE_NBYTES:
        return
    small = free < SMALL_STORE_NBYTES
    what = "not even the embedded model" if small else "not a model of 35 billion parameters"
    needed = SMALL_STORE_NBYTES if small else LARGE_STORE_NBYTES
    yield Problem(
        "little_disk",
        "problem" if small else "note",
        f"{format_size(free)} are free in {folder}: {what} can be converted there, which takes"
        f" up to {format_size(needed)}",
        "make room, or set AEGIS_CACHE to a folder on another disk",
    )


def _disk(facts: Facts) -> Iterator[Problem]:
    if facts.disk.failed:
        yield Problem(
            "disk_failed",
            "problem",
            f"the disk could not be measured: {facts.disk.skipped}",
            "look at quotas, ulimit -f and the system's log, or set AEGIS_CACHE to another disk",
        )
    best = max((speed.nbytes_per_s for speed in facts.disk.speeds), default=None)
    if best is not None and best < SLOW_NBYTES_PER_S:
        yield Problem(
            "slow_disk",
            "note",
            f"the disk gives at most {format_size(best)} per second, which bounds the speed of"
            " models larger than their cap",
            "set AEGIS_CACHE to a folder on an NVMe SSD",
        )
