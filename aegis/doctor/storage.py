"""The cache's folder: its file system, its free space, and whether reads can be direct there."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aegis.checkpoint.storage import MEMORY_FILE_SYSTEMS as MEMORY_FILE_SYSTEMS
from aegis.checkpoint.storage import file_system as file_system
from aegis.checkpoint.storage import nearest_folder as nearest_folder

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs")

_PROBE_NBYTES = 4096


@dataclass(frozen=True)
class Storage:
    """Where converted models go."""

    folder: Path
    """The cache folder, there or not."""
    writable: bool
    """Whether files can be made there (in the nearest parent while it does not exist)."""
    file_system: str | None
    """Its type as /proc names it; None: unknown."""
    free_nbytes: int | None
    direct: bool | None
    """Whether reads can bypass the page cache; None: it cannot be told."""
    stores: int
    """Converted models that lie there."""

    @property
    def in_memory(self) -> bool:
        """Whether what is kept there takes memory instead of a disk."""
        return self.file_system in MEMORY_FILE_SYSTEMS


def inspect_storage(folder: Path, root: Path = Path("/")) -> Storage:
    """Look at ``folder`` without leaving anything there."""
    existing = nearest_folder(folder)
    return Storage(
        folder=folder,
        writable=is_writable(existing) and not _blocked(folder),
        file_system=file_system(existing, root),
        free_nbytes=free_nbytes(existing),
        direct=_direct(existing),
        stores=_count_stores(folder),
    )


def _blocked(folder: Path) -> bool:
    """Whether something that is no folder lies where it, or one of its parents, should be."""
    places = (folder.absolute(), *folder.absolute().parents)
    return any(os.path.lexists(path) and not os.path.isdir(path) for path in places)


def is_writable(folder: Path) -> bool:
    """Whether this process may create files in a folder (a read-only mount counts too)."""
    return os.access(folder, os.W_OK | os.X_OK)


def free_nbytes(folder: Path) -> int | None:
    """Space that this user may still fill."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def _count_stores(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.glob("*/store.json"))
    except OSError:
        return 0


def direct_io(folder: Path) -> bool | None:
    """Whether files in ``folder`` (or its nearest existing parent) can bypass the page cache.

    None where that cannot be told without leaving a file behind.
    """
    temporary, direct = getattr(os, "O_TMPFILE", None), getattr(os, "O_DIRECT", None)
    if temporary is None or direct is None:
        return None
    try:
        fd = os.open(nearest_folder(folder), temporary | direct | os.O_RDWR, 0o600)
    except OSError as error:
        return False if error.errno == errno.EINVAL else None
    os.close(fd)
    return True


def _direct(folder: Path) -> bool | None:
    """By a file without a name, or where none can be made by reading one that is there."""
    found = direct_io(folder)
    if found is not None or not hasattr(os, "O_DIRECT"):
        return found
    for path in _some_files(folder):
        with contextlib.suppress(OSError):
            return _reads_direct(path)
    return None


def _some_files(folder: Path) -> Iterator[Path]:
    """A few files that are large enough to read from, of stores first of all."""
    with contextlib.suppress(OSError):
        for path in (*folder.glob("*/resident.bin"), *sorted(folder.iterdir())[:64]):
            if path.is_file() and path.stat().st_size >= _PROBE_NBYTES:
                yield path


def _reads_direct(path: Path) -> bool | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _PROBE_NBYTES) as page, memoryview(page) as view:
                os.preadv(fd, [view], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True
