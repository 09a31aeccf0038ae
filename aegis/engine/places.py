"""Which stores in the cache a model's name means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

from aegis.checkpoint.hub_cache import HubName
from aegis.checkpoint.store import is_store
from aegis.convert.build import partials_of
from aegis.convert.cache import cache_folder, hub_store, is_named_for, model_stores
from aegis.convert.identity import embedded_path, model_name
from aegis.convert.stores import Place, place_at, places
from aegis.engine.sources import EMBEDDED, Named, meaning
from aegis.errors import StoreError, UsageError
from aegis.kernels.base import Layout
from aegis.synthetic.names import is_synthetic
from aegis.synthetic.recipe import Recipe, cached_path

_LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def stores_of(named: Named) -> list[Path]:
    """Where its stores lie in the cache, there or not; a folder that is a store is its own.

    Nobody is asked for a model on the hub.

    Raises:
        CheckpointError: a folder holds no readable checkpoint.
        StoreError: a model on the hub is not here.
    """
    if isinstance(named, Recipe):
        return [cached_path(named, layout) for layout in _LAYOUTS]
    if not isinstance(named, HubName):
        return [named] if is_store(named) else model_stores(named)
    found = [store for layout in _LAYOUTS if (store := hub_store(named, layout)) is not None]
    snapshot = named.snapshot()
    if not found and snapshot is None:
        raise StoreError(f"{named} has not been converted; run aegis pull {named} first")
    return found if snapshot is None else [*found, *model_stores(snapshot)]


def find_places(model: str) -> list[Place]:
    """The places that are meant by a name that ``aegis list`` shows, the folder of a store in the
    cache or of a model, ORG/NAME[@REVISION], synthetic:SHAPE[@SEED], or embedded; or the one where
    a store would be, had its conversion not been ended.

    Raises:
        UsageError: there are none.
    """
    path = Path(os.path.abspath(os.path.expanduser(model)))
    if model == EMBEDDED and not path.is_dir():
        path = embedded_path()
    known = {place.path: place for place in places()}
    if path in known:
        return [known[path]]
    if not os.path.lexists(path) and partials_of(path):
        return [place_at(path)]
    if path.is_dir():
        if is_store(path):
            raise UsageError(f"{path} is a store, but not in {cache_folder()}; rm -r deletes it")
        name, meant = model_name(path), set(model_stores(path))
        found = [place for place in known.values() if place.path in meant]
    else:
        name, meant = model, _written(model)
        found = [p for p in known.values() if p.path in meant or _is_called(p, model)]
    if not found:
        raise UsageError(f"{cache_folder()} has no store of {name}; aegis list shows what there is")
    return found


def _written(model: str) -> set[Path]:
    """Where the stores of random weights lie, if that is what is named."""
    if not is_synthetic(model):
        return set()
    try:
        return set(stores_of(meaning(model)))
    except UsageError:  # Its config.json may be gone; then the name alone says it.
        return set()


def _is_called(place: Place, model: str) -> bool:
    if model in (place.path.name, place.model):
        return True
    name = HubName.parse(model)
    if place.store is None:  # What there is of it does not know its revision.
        return name is not None and "@" not in model and is_named_for(place.path, name.repo)
    revisions = (*place.source.get("revisions", ()), place.source.get("commit"))
    return name is not None and name.repo == place.model and name.revision in revisions
