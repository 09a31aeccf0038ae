"""A folder for a while: gone at the end, whatever raises; a killed one goes next time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from aegis.checkpoint.storage import IN_MEMORY, scratch_folders
from aegis.child import deferred_signals
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
    found = dict(scratch_folders(cache, needed_nbytes))
    for reason in (None, IN_MEMORY):
        if (folder := next((f for f, r in found.items() if r == reason), None)) is not None:
            return folder
    against = ", ".join(f"{folder} {reason}" for folder, reason in found.items())
    raise AegisError(
        f"the embedded model's store takes {-(-needed_nbytes >> 20)} MiB: {against}; set"
        " AEGIS_CACHE or TMPDIR to another folder"
    )


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
