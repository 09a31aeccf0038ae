"""What a path or a name means: a folder here, or a model on the hub, downloaded already or not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

from aegis.checkpoint.hub_cache import HubName
from aegis.checkpoint.remote import RemoteCheckpoint
from aegis.convert.cache import embedded_path, hub_store
from aegis.errors import StoreError
from aegis.kernels.base import Layout

Model = str | Path | RemoteCheckpoint | None
"""A folder, or a name on the hub as text, or what the hub says of it; None: the embedded model."""


def hub_name(model: Model) -> HubName | None:
    """The name on the hub that is meant; None where it is a folder. A folder that is there wins."""
    if not isinstance(model, str) or os.path.isdir(model):
        return None
    return HubName.parse(model)


def find_local(name: HubName, layout: Layout) -> Path | None:
    """The store, or else the complete download, of a model on the hub; None: it is not here."""
    return hub_store(name, layout) or name.snapshot()


def find_source(model: Model, layout: Layout) -> Path | RemoteCheckpoint:
    """The folder of a store or checkpoint, or what the hub says of a model that is not here.

    What is here is used without asking the hub; ``aegis pull`` asks for something newer.

    Raises:
        HubError: the hub cannot be reached or refuses.
        CheckpointError, TokenizerError: it is no model that aegis can run.
    """
    if model is None:
        return embedded_path()
    if isinstance(model, RemoteCheckpoint):
        return model
    name = hub_name(model)
    if name is None:
        return Path(model)
    return find_local(name, layout) or _ask_hub(name, layout)


def _ask_hub(name: HubName, layout: Layout) -> Path | RemoteCheckpoint:
    """A tag of a commit that is here already needs no download."""
    from aegis.hub.remote import describe

    found = describe(name)
    return find_local(HubName(name.repo, found.commit), layout) or found


def find_converted(model: Model) -> Path:
    """The folder of a model; of one on the hub that of a store, or else what was downloaded.

    Raises:
        StoreError: a model on the hub is not here; nobody is asked for it.
    """
    name = hub_name(model)
    if name is None:
        return Path(find_source(model, "il16"))
    for layout in get_args(Layout):
        if (store := hub_store(name, layout)) is not None:
            return store
    snapshot = name.snapshot()
    if snapshot is None:
        raise StoreError(f"{name} has not been converted; run aegis pull {name} first")
    return snapshot
