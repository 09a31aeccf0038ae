"""The cache's folder: its file system, its free space, and how reads go there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aegis.checkpoint.storage import (
    PAGE_NBYTES,
    Storage,
    file_system,
    free_nbytes,
    is_writable,
    nearest_folder,
    storage_of,
)

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs")

_DIRECT = {"direct": True, "buffered": False, "memory": False}


@dataclass(frozen=True)
class CacheFolder:
    """Where converted models go."""

    folder: Path
    """There or not."""
    writable: bool
    """Whether files can be made there (in the nearest parent while it does not exist)."""
    file_system: str | None
    """Its type as /proc names it; None: unknown."""
    free_nbytes: int | None
    storage: Storage
    """How files there are read."""
    stores: int
    """Converted models that lie there."""

    @property
    def direct(self) -> bool | None:
        """Whether reads bypass the page cache; None: it cannot be told."""
        return _DIRECT.get(self.storage.kind)


def inspect_cache(folder: Path, root: Path = Path("/")) -> CacheFolder:
    """Look at ``folder`` without leaving anything there."""
    existing = nearest_folder(folder)
    return CacheFolder(
        folder=folder,
        writable=is_writable(existing) and not _blocked(folder),
        file_system=file_system(existing, root),
        free_nbytes=free_nbytes(existing),
        storage=_storage(existing),
        stores=_count_stores(folder),
    )


def _blocked(folder: Path) -> bool:
    """Whether something that is no folder lies where it, or one of its parents, should be."""
    places = (folder.absolute(), *folder.absolute().parents)
    return any(os.path.lexists(path) and not os.path.isdir(path) for path in places)


def _count_stores(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.glob("*/store.json"))
    except OSError:
        return 0


def _storage(folder: Path) -> Storage:
    """By a file without a name, or where none can be made by a store that is there."""
    found = storage_of(folder)
    files = _stored_files(folder) if found.kind == "unknown" else iter(())
    known = (judged for path in files if (judged := storage_of(path)).kind != "unknown")
    return next(known, found)


def _stored_files(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for path in folder.glob("*/resident.bin"):
            if path.is_file() and path.stat().st_size >= PAGE_NBYTES:
                yield path
