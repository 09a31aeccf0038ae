"""``aegis show``: what a model is, and where it lies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.list import words_of
from aegis.cli.options import json_option, quiet_option, usual_backend
from aegis.cli.plan import announce
from aegis.cli.report import SCHEMA_VERSION, note, print_json
from aegis.errors import AegisError, StoreError, UsageError
from aegis.planner import format_least, format_size

if TYPE_CHECKING:
    from aegis.checkpoint.layout import StoreLayout
    from aegis.checkpoint.store import Store
    from aegis.engine.sources import CheckpointSource, Source, SyntheticSource
    from aegis.kernels.base import Layout


@click.command("show", short_help="Show what a model is: family, sizes, experts, smallest cap.")
@click.argument("model", required=False, metavar="[MODEL]")
@json_option
@quiet_option
def command(model: str | None, **options: Any) -> int:
    """Show what MODEL is, where it lies and the smallest cap that opens it.

    MODEL is a folder, a name or store that ``aegis list`` shows, synthetic:SHAPE[@SEED], or
    ORG/NAME[@REVISION] on the hub, of which headers are read where it is not here; the embedded one
    if absent.
    """
    from aegis.checkpoint.store import Store
    from aegis.engine.planning import backend_layout, choose_backend
    from aegis.engine.sources import StoreSource

    backend = choose_backend(usual_backend())
    usual = backend_layout(backend)
    source = _source(model, usual)
    if isinstance(source, StoreSource):
        store = Store.open(source.path)
        facts = {**_store_facts(store), **_sizes(store.layout)}
    else:
        announce(source, source.place(usual), options)
        facts = {**_facts(source), **_sizes(source.layout(usual))}
    cap, reason = _smallest_cap(source, backend)
    if options["as_json"]:
        print_json({"schema_version": SCHEMA_VERSION, **facts, "min_cap_nbytes": cap})
        return 0
    for name, value in _lines(facts):
        click.echo(f"{name:<13} {value}")
    if cap is not None:
        click.echo(f"{'smallest cap':<13} {format_least(cap)} ({backend})")
    elif not options["quiet"]:
        note(f"no smallest cap: {reason}")
    return 0


def _source(model: str | None, layout: Layout) -> Source:
    """What MODEL means everywhere, or else what ``aegis list`` calls so."""
    from aegis.cli.source import resolve_model
    from aegis.engine.places import find_places
    from aegis.engine.sources import StoreSource, find_source, meaning

    if model and isinstance(named := meaning(model), Path) and not os.path.isdir(named):
        found = find_places(model)
        if len(found) > 1:
            names = ", ".join(place.path.name for place in found)
            raise UsageError(f"there are several stores of {model}; name one of {names}")
        if found[0].store is None:
            raise StoreError(found[0].damage or f"{found[0].path} has not been converted wholly")
        return StoreSource(found[0].path)
    return find_source(resolve_model(model), layout)


def _store_facts(store: Store) -> dict[str, Any]:
    """Where a store lies, and what only it knows."""
    from aegis.convert.stores import place_at

    place = place_at(store.path)
    return {
        "model": place.model,
        "kind": "store",
        "path": str(place.path),
        **{name: place.source.get(name) for name in ("repo", "commit")},
        "nbytes": place.nbytes,
        "has_3bit": store.has_3bit,
        "in_use": place.in_use,
    }


def _facts(source: CheckpointSource | SyntheticSource) -> dict[str, Any]:
    """Where a model lies that has no store."""
    from aegis.checkpoint.hub_cache import Origin

    known = None if source.folder is None else Origin.of(source.folder)
    missing = source.missing_nbytes
    kind = "synthetic" if source.folder is None else "checkpoint" if missing is None else "hub"
    return {
        "model": source.name,
        "kind": kind,
        "path": str(source.folder) if kind == "checkpoint" else None,
        "repo": known and known.repo,
        "commit": known and known.commit,
        "missing_nbytes": missing or 0,
    }


def _sizes(layout: StoreLayout) -> dict[str, Any]:
    """What follows from headers."""
    from aegis.models import family

    shape = family(layout.model_type).shape(layout.config)
    experts = layout.experts
    return {
        "family": layout.model_type,
        "layout": layout.layout,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_moe_layers": len(layout.moe_layers),
        "num_experts": layout.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "store_nbytes": layout.nbytes(),
        "resident_nbytes": layout.resident_file_nbytes,
        "experts_nbytes": layout.experts_nbytes(),
        "vision_nbytes": layout.vision_nbytes,
        "expert_nbytes": experts.stride,
        "experts": {name: words_of(part.format) for name, part in experts.segments.items()},
        "resident": dict(
            Counter(words_of(t.format) for t in layout.resident.values() if len(t.shape) > 1)
        ),
    }


def _smallest_cap(source: Source, backend: str) -> tuple[int, None] | tuple[None, str]:
    """In bytes at the usual context, or why there is none."""
    from aegis.engine.planning import make_plan, settings_for

    try:
        return make_plan(source, settings_for("4GiB", {"backend": backend})).min_cap_nbytes, None
    except AegisError as error:
        return None, str(error)


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", facts["model"]
    yield "family", facts["family"]
    missing = f"not downloaded yet: {format_size(facts.get('missing_nbytes', 0))} to download"
    nowhere = "random weights, not written yet" if facts["kind"] == "synthetic" else missing
    yield facts["kind"], facts["path"] or nowhere
    if facts["repo"] is not None:
        yield "source", f"{facts['repo']} at {facts['commit']}"
    if "nbytes" in facts:
        three = ", with 3-bit experts" if facts["has_3bit"] else ""
        used = ", in use" if facts["in_use"] else ""
        yield "on the disk", format_size(facts["nbytes"]) + three + used
    yield "as a store", f"{format_size(facts['store_nbytes'])}, layout {facts['layout']}"
    yield "layers", f"{facts['num_hidden_layers']}, {facts['num_moe_layers']} of them with experts"
    each = format_size(facts["expert_nbytes"])
    chosen = f"{facts['num_experts_per_tok']} for a token"
    yield "experts", f"{facts['num_experts']} in a layer, {chosen}, {each} each"
    kinds = Counter(facts["experts"].values())
    experts = next(iter(kinds)) if len(kinds) == 1 else ", ".join(facts["experts"].values())
    resident = ", ".join(f"{count} {kind}" for kind, count in facts["resident"].items())
    yield "numbers", f"experts {experts}; other matrices {resident}"
    yield "resident", format_size(facts["resident_nbytes"])
    if facts["vision_nbytes"]:
        yield "vision", f"{format_size(facts['vision_nbytes'])}, kept for later, never read"
    yield "context", f"up to {facts['max_position_embeddings']} tokens"
