"""The facts as people read them, and as the one object of --json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aegis.doctor.advice import Problem
from aegis.doctor.cache import CacheFolder
from aegis.doctor.facts import LEAST_MARGIN_NBYTES, MARGIN_SHARE, SHORT_CONTEXT, Facts
from aegis.planner import format_least, format_size

_INDENT = 14


def describe(facts: Facts, problems: Sequence[Problem]) -> Iterator[str]:
    """The whole report, line by line."""
    rows = [
        ("versions", _versions(facts)),
        ("processor", _processor(facts)),
        ("instructions", _instructions(facts)),
        ("memory", _memory(facts)),
        ("huge pages", _huge_pages(facts)),
        ("cache", [facts.cache_error or ""] if facts.cache is None else [_cache(facts.cache)]),
        ("disk", list(_disk(facts))),
        ("backends", list(_backends(facts))),
        ("cap", list(_cap(facts))),
    ]
    for name, lines in rows:
        for index, line in enumerate(lines):
            yield f"{name if index == 0 else '':<{_INDENT}}{line}"
    yield ""
    if not problems:
        yield "no problems found"
    for problem in problems:
        yield f"{problem.severity}: {problem.what}"
        yield f"{'':{len(problem.severity)}}  -> {problem.advice}"


def _versions(facts: Facts) -> list[str]:
    v = facts.versions
    built_on = ", ".join(f"{name} {v[name]}" for name in ("python", "numpy", "tokenizers"))
    return [f"aegis {v['aegis']}, {built_on}; {v['os']}, {v['kernel']}"]


def _processor(facts: Facts) -> list[str]:
    p = facts.processor
    quota = "" if p.quota_cores is None else f", a quota of {p.quota_cores:g}"
    return [f"{p.name}: {p.usable_cores} of {p.cores} cores can be used{quota}"]


def _instructions(facts: Facts) -> list[str]:
    p = facts.processor
    if p.isa is None:
        has = ", ".join(p.instructions) or "no vector instructions that kernels are written for"
        return [f"none in use, since there are no compiled kernels; the processor has {has}"]
    others = ", ".join(name for name in p.isas if name != p.isa)
    return [f"{p.isa} in use" + (f"; {others} available" if others else "")]


def _memory(facts: Facts) -> list[str]:
    m = facts.memory
    parts = [f"{_size(m.available)} available of {_size(m.total)}"]
    if m.container_limit is None:
        parts.append("no container limit")
    else:
        parts.append(
            f"container limit {_size(m.container_limit)} (cgroup v{m.version}, {m.source}), "
            f"{_size(m.free)} of it free"
        )
    swap = facts.swap_nbytes
    parts.append("no swap" if swap == 0 else f"swap {_size(swap)}")
    return [", ".join(parts)]


def _huge_pages(facts: Facts) -> list[str]:
    h = facts.huge_pages
    setting = h.setting or "setting unknown"
    if not h.arena_nbytes:
        return [f"{setting}; too little memory is free to try"]
    got = "an unknown part" if h.huge_nbytes is None else format_size(h.huge_nbytes)
    return [f"{setting}; a test arena of {format_size(h.arena_nbytes)} got {got} in huge pages"]


def _cache(c: CacheFolder) -> str:
    parts = [c.file_system or "file system unknown", f"{_size(c.free_nbytes)} free"]
    parts += [c.storage.describe(), *([] if c.writable else ["cannot be written"])]
    return f"{c.folder}: {', '.join(parts)}"


def _disk(facts: Facts) -> Iterator[str]:
    test = facts.disk
    if test.skipped is not None:
        yield f"not measured: {test.skipped}"
        return
    speed = {(s.record_nbytes, s.huge_pages): s.nbytes_per_s for s in test.speeds}
    for record in sorted({s.record_nbytes for s in test.speeds}, reverse=True):
        huge, small = (f"{format_size(speed[record, pages])}/s" for pages in (True, False))
        yield f"records of {format_size(record)}: {huge} into huge pages, {small} into small ones"
    how = "direct" if test.direct else "buffered"
    yield f"{how} reads at random places of {format_size(test.file_nbytes)} in {test.folder}"


def _backends(facts: Facts) -> Iterator[str]:
    for backend in facts.backends:
        if backend.reason is None:
            default = " (the default here)" if backend.name == facts.default_backend else ""
            yield f"{backend.name}: available{default}"
        else:
            yield f"{backend.name}: {backend.reason}"


def _cap(facts: Facts) -> Iterator[str]:
    if facts.sensible_cap_nbytes is None:
        yield "what is sensible is not known, since nothing says how much memory is free"
    else:
        free = f"{_size(facts.memory.free)} free{_within(facts)}"
        upto = facts.sensible_cap_nbytes
        yield (
            f"{f'up to {format_size(upto)}' if upto else 'none'} is sensible: {free}, less"
            f" {_size(facts.margin_nbytes)} for others"
        )
        yield f"without --cap a run takes {_size(facts.default_cap_nbytes)}"
    if (model := facts.model) is not None:
        yield (
            f"{model.name} opens from {format_least(model.min_cap_nbytes)} and stays in memory"
            f" whole from {format_least(model.everything_nbytes)} (context {model.context})"
        )
        yield f"with -c {SHORT_CONTEXT} it opens from {format_least(model.short_min_cap_nbytes)}"


def _within(facts: Facts) -> str:
    return "" if facts.memory.container_limit is None else " within the container's limit"


def _size(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else format_size(nbytes)


CAP_RULE = (
    "free memory (the least that the machine and the containers around the process allow) less "
    f"1/{MARGIN_SHARE} of it, at least {format_size(LEAST_MARGIN_NBYTES)}, for other programs"
)


def to_json(facts: Facts, problems: Sequence[Problem]) -> dict[str, Any]:
    """The object of --json without its schema_version and selftest."""
    return {
        "versions": dict(facts.versions),
        "processor": _processor_json(facts),
        "memory": _memory_json(facts),
        "huge_pages": vars(facts.huge_pages) | {},
        "cache": _cache_json(facts),
        "disk": _disk_json(facts),
        "backends": [
            {"name": b.name, "available": b.reason is None, "reason": b.reason}
            | {"install": b.install}
            for b in facts.backends
        ],
        "default_backend": facts.default_backend,
        "compiler": facts.compiler,
        "cap": _cap_json(facts),
        "problems": [vars(problem) | {} for problem in problems],
    }


def _processor_json(facts: Facts) -> dict[str, Any]:
    p = facts.processor
    fields = ("name", "architecture", "cores", "usable_cores", "quota_cores", "isa")
    lists = {"isas": list(p.isas), "instructions": list(p.instructions)}
    return {name: getattr(p, name) for name in fields} | lists


def _memory_json(facts: Facts) -> dict[str, Any]:
    m = facts.memory
    return {
        "total_nbytes": m.total,
        "available_nbytes": m.available,
        "free_nbytes": m.free,
        "limit_nbytes": m.container_limit,
        "limit_version": m.version,
        "limit_source": None if m.source is None else str(m.source),
        "swap_nbytes": facts.swap_nbytes,
        "swap_free_nbytes": m.swap,
        "address_space_nbytes": facts.address_space_nbytes,
    }


def _cache_json(facts: Facts) -> dict[str, Any]:
    c = facts.cache
    fields = ("writable", "file_system", "free_nbytes", "direct", "stores")
    known = {name: None if c is None else getattr(c, name) for name in fields}
    return {
        "folder": None if c is None else str(c.folder),
        **known,
        "reads": "unknown" if c is None else c.storage.kind,
        "reads_reason": "" if c is None else c.storage.reason,
        "error": facts.cache_error,
    }


def _disk_json(facts: Facts) -> dict[str, Any]:
    test = facts.disk
    return {
        "skipped": test.skipped,
        "failed": test.failed,
        "folder": None if test.folder is None else str(test.folder),
        "direct": test.direct,
        "file_nbytes": test.file_nbytes,
        "reads": [vars(speed) | {} for speed in test.speeds],
    }


def _cap_json(facts: Facts) -> dict[str, Any]:
    model = facts.model
    return {
        "sensible_nbytes": facts.sensible_cap_nbytes,
        "rule": CAP_RULE,
        "margin_nbytes": facts.margin_nbytes,
        "default_nbytes": facts.default_cap_nbytes,
        "embedded_model": None if model is None else vars(model) | {},
    }
