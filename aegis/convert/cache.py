"""Where converted stores live, and getting one for whatever path the user names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aegis.checkpoint.manifest import FORMAT_VERSION
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import Store, is_store
from aegis.convert.identity import embedded_path, identity_of, model_name
from aegis.errors import StoreError
from aegis.kernels.base import Layout

if TYPE_CHECKING:
    from aegis.convert.convert import Progress

__all__ = ["cache_folder", "cached_store_path", "embedded_path", "ensure_store"]


def cache_folder() -> Path:
    """$AEGIS_CACHE, or the user's cache folder for aegis."""
    named = os.environ.get("AEGIS_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "aegis"
    home = Path.home()
    return home / "Library/Caches/aegis" if sys.platform == "darwin" else home / ".cache/aegis"


def cached_store_path(path: str | os.PathLike[str], layout: Layout = "il16") -> Path:
    """Where the store of a checkpoint lies in the cache, converted or not.

    Raises:
        CheckpointError: ``path`` is no readable checkpoint.
    """
    checkpoint = Checkpoint.open(path)
    name = model_name(checkpoint.path)
    return cache_folder() / f"{name}-{layout}-v{FORMAT_VERSION}-{identity_of(checkpoint)[:12]}"


def ensure_store(
    path: str | os.PathLike[str],
    layout: Layout = "il16",
    progress: Progress | None = None,
) -> Store:
    """The opened store for a store or checkpoint folder; converts into the cache when needed.

    A damaged store in the cache is converted anew.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or not supported.
        StoreError: the store is damaged or has another layout, or the cache cannot be written.
    """
    if is_store(path):
        store = Store.open(path)
        if store.layout.layout != layout:
            raise StoreError(
                f"{path} has layout {store.layout.layout}, but {layout} is needed; convert the"
                f" checkpoint with --layout {layout}"
            )
        return store
    target = cached_store_path(path, layout)
    try:
        return Store.open(target)
    except StoreError:
        from aegis.convert.build import prepare_parent
        from aegis.convert.convert import convert

        prepare_parent(target, "set AEGIS_CACHE to a folder that can be")
        return convert(path, target, layout=layout, progress=progress, replace_damaged=True)
