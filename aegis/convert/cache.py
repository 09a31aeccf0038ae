"""Where converted stores live, and getting one for whatever path the user names."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aegis.checkpoint.manifest import FORMAT_VERSION
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import Store, is_store, without_3bit
from aegis.convert.identity import embedded_path, identity_of, model_name
from aegis.errors import StoreError
from aegis.kernels.base import Layout

if TYPE_CHECKING:
    from aegis.convert.convert import Progress

_VERSION = r"-v\d+-[0-9a-f]{12}"
_REMAINS = re.compile(rf"\.(.+{_VERSION})\.(?:lock|partial-.+)", re.DOTALL)
_LONGEST_NAME = 150
"""Bytes of a model's name in a store's: with all that is put around it, file systems take it."""

__all__ = [
    "cache_folder",
    "cached_store_path",
    "embedded_path",
    "ensure_store",
    "older_stores",
    "open_store",
    "refuse_without_3bit",
]


def cache_folder() -> Path:
    """$AEGIS_CACHE, or the user's cache folder for aegis.

    Raises:
        StoreError: nothing says where the user's files are.
    """
    named = os.environ.get("AEGIS_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "aegis"
    home = _home()
    return home / "Library/Caches/aegis" if sys.platform == "darwin" else home / ".cache/aegis"


def _home() -> Path:
    """$HOME where it is a path at all, else what the system's user list says."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        import pwd

        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = ""
    if not os.path.isabs(home):
        raise StoreError(
            "there is no home folder to keep converted models in; set AEGIS_CACHE to a folder"
        )
    return Path(home)


def cached_store_path(path: str | os.PathLike[str], layout: Layout = "il16") -> Path:
    """Where the store of a checkpoint lies in the cache, converted or not.

    Raises:
        CheckpointError: ``path`` is no readable checkpoint.
    """
    checkpoint = Checkpoint.open(path)
    name = model_name(checkpoint.path)
    while len(os.fsencode(name)) > _LONGEST_NAME:
        name = name[:-1]
    return cache_folder() / f"{name}-{layout}-v{FORMAT_VERSION}-{identity_of(checkpoint)[:12]}"


def open_store(path: str | os.PathLike[str], layout: Layout) -> Store:
    """The store in a folder.

    Raises:
        StoreError: it is damaged or has another layout.
    """
    store = Store.open(path)
    if store.layout.layout != layout:
        other = "mlx" if layout == "il16" else "native"
        raise StoreError(
            f"{path} has layout {store.layout.layout}, but {layout} is needed; convert the"
            f" checkpoint with --layout {layout}, or use --backend {other}"
        )
    return store


def refuse_without_3bit(path: str | os.PathLike[str], layout: Layout) -> None:
    """Before anything is converted, which may take minutes and would not make them.

    Raises:
        StoreError: the store of ``path``, made already or not, has no 3-bit experts.
    """
    if is_store(path):
        Store.open(path).expert_paths("3bit")
        return
    other = False
    with contextlib.suppress(StoreError):  # Not there, or damaged: it will be made, without them.
        store = Store.open(cached_store_path(path, layout))
        if store.has_3bit:
            return
        other = store.manifest.other_3bit
    raise without_3bit(path, other)


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
        return open_store(path, layout)
    target = cached_store_path(path, layout)
    try:
        store = Store.open(target)
    except StoreError:
        from aegis.convert.build import prepare_parent
        from aegis.convert.convert import convert

        prepare_parent(target, "set AEGIS_CACHE to a folder that can be")
        return convert(path, target, layout=layout, progress=progress, replace_damaged=True)
    _clean_up(target)
    return store


def _clean_up(target: Path) -> None:
    """Whoever uses a store may be the last to come by: delete what killed conversions left."""
    owners = {found[1] for name in _names(target.parent) if (found := _REMAINS.fullmatch(name))}
    if any(".partial-" in name for name in _names(target)):
        owners.add(target.name)
    if owners:
        from aegis.convert.build import remove_remains

        for owner in owners:
            remove_remains(target.parent / owner)


def older_stores(path: str | os.PathLike[str], layout: Layout = "il16") -> list[Path]:
    """Stores in the cache of models of the same name that are not the one of ``path``.

    They come from a checkpoint that was changed since, from another one of that name, or from
    another version of aegis.
    """
    target = cached_store_path(path, layout)
    head = re.escape(target.name.rpartition("-v")[0])
    other = re.compile(head + _VERSION)
    found = [name for name in _names(target.parent) if other.fullmatch(name)]
    return [target.parent / name for name in sorted(found) if name != target.name]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
