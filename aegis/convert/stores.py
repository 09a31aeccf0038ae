"""What lies in the cache: stores, also damaged and half-finished ones, and how they are deleted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aegis.checkpoint.config import COPIED_FILES
from aegis.checkpoint.hold import Hold, is_held
from aegis.checkpoint.store import EXPERT_FOLDERS, MANIFEST, RESIDENT, VISION, Store, is_store
from aegis.convert.build import JOURNAL, discard, is_being_built, owner_of, remains_of
from aegis.convert.cache import STORE_NAME, cache_folder
from aegis.errors import StoreError

_OURS = {
    MANIFEST,
    f".{MANIFEST}.new",
    RESIDENT,
    VISION,
    JOURNAL,
    *EXPERT_FOLDERS.values(),
    *COPIED_FILES,
}


@dataclass(frozen=True)
class Place:
    """A place in the cache that has a store, or will have or would have had one."""

    path: Path
    store: Store | None
    """None: there is none yet, or it cannot be used."""
    damage: str | None
    """What is wrong with the one that is there."""
    nbytes: int
    """What all of it takes on the disk, half-finished conversions included."""
    unfinished_nbytes: int
    in_use: bool
    being_built: bool

    @property
    def source(self) -> dict[str, Any]:
        """Where its model came from."""
        return {} if self.store is None else dict(self.store.manifest.source)

    @property
    def model(self) -> str:
        """What people call the model."""
        for known in ("repo", "name"):
            if isinstance(name := self.source.get(known), str):
                return name
        match = STORE_NAME.fullmatch(self.path.name)
        return self.path.name if match is None else match[1]

    @property
    def state(self) -> str:
        """One word for people."""
        if self.being_built:
            return "converting"
        if self.damage is not None:
            return "damaged"
        return "unfinished" if self.store is None else "in use" if self.in_use else "ready"


def places() -> list[Place]:
    """Every place in the cache, by name."""
    folder = cache_folder()
    names = {name for entry in _entries(folder) if (name := _place_name(entry)) is not None}
    found = [place_at(folder / name) for name in sorted(names)]
    return [place for place in found if place.nbytes or place.being_built]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _place_name(entry: Path) -> str | None:
    if (owner := owner_of(entry)) is not None:
        return owner if STORE_NAME.fullmatch(owner) else None
    return entry.name if STORE_NAME.fullmatch(entry.name) or is_store(entry) else None


def place_at(path: Path) -> Place:
    """What is at a place."""
    store, damage = None, None
    if os.path.lexists(path):
        try:
            store = Store.open(path)
        except StoreError as error:
            damage = str(error)
    unfinished = sum(map(disk_nbytes, remains_of(path)))
    inside = sum(disk_nbytes(left) for left in remains_of(path) if left.parent == path)
    return Place(
        path=path,
        store=store,
        damage=damage,
        nbytes=disk_nbytes(path) + unfinished - inside,
        unfinished_nbytes=unfinished,
        in_use=path.is_dir() and is_held(path),
        being_built=is_being_built(path),
    )


def disk_nbytes(path: Path) -> int:
    """What deleting a folder, or a file, would free: nothing for what has another name too."""
    total = 0
    for file in (path, *_below(path)):
        try:
            status = file.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode) or status.st_nlink == 1:
            total += status.st_blocks * 512
    return total


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        yield from (Path(root, name) for name in (*folders, *files))


def remove(place: Place) -> None:
    """Delete a store, what is half-finished of it and its lock.

    Raises:
        StoreError: a process uses or makes it, it holds what is no part of a store, or the disk
            refuses.
    """
    path = place.path
    if place.damage is not None and STORE_NAME.fullmatch(path.name) is None:
        raise StoreError(f"{path} is left alone, for it may be no store: {place.damage}")
    foreign = sorted({entry.name for entry in _entries(path)} - _OURS)
    foreign = [name for name in foreign if owner_of(path / name) is None]
    if foreign or path.is_symlink() or (path.exists() and not path.is_dir()):
        what = f"holds {foreign[0]}, which is no part" if foreign else "is no folder"
        raise StoreError(f"{path} {what} of a store, so it is left alone; delete it yourself")
    try:
        if path.exists():
            with Hold(path, alone=True):
                discard(path)
        else:
            discard(path)
    except BlockingIOError:
        raise StoreError(f"{path} is being converted; end that first") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be deleted ({error.strerror})") from error
