"""A folder for a while: gone at the end, whatever raises; a killed one goes next time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aegis.checkpoint.storage import free_nbytes, nearest_folder, storage_of
from aegis.child import deferred_signals
from aegis.doctor.cache import is_writable
from aegis.errors import AegisError

_PREFIX = ".aegis-doctor-"


@contextlib.contextmanager
def temporary_folder(cache: Path, needed_nbytes: int) -> Iterator[Path]:
    """A folder beside the cache's stores, or where temporary files go.

    Raises:
        AegisError: there is no place to write that much.
    """
    parent = _place(cache, needed_nbytes)
    _remove_leftovers(parent)
    folder = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    fd = -1
    try:
        folder.mkdir(mode=0o700)
        # The lock says that somebody is alive; it ends with the process.
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield folder
    finally:
        with deferred_signals():
            shutil.rmtree(folder, ignore_errors=True)
            if fd >= 0:
                os.close(fd)


def _place(cache: Path, needed_nbytes: int) -> Path:
    """On a disk rather than in memory, and beside the cache rather than elsewhere."""
    folders = dict.fromkeys((nearest_folder(cache), Path(tempfile.gettempdir())))
    fit = [
        folder
        for folder in folders
        if is_writable(folder) and (free_nbytes(folder) or 0) >= needed_nbytes
    ]
    if not fit:
        names = " and ".join(map(str, folders))
        raise AegisError(
            f"{names} cannot be written or have less than {-(-needed_nbytes >> 20)} MiB free, which"
            " the embedded model's store takes; set AEGIS_CACHE or TMPDIR to another folder"
        )
    return min(fit, key=lambda folder: storage_of(folder).kind == "memory")


def _remove_leftovers(parent: Path) -> None:
    """Folders of doctors that were killed: nobody holds their lock."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
