"""Building a folder so that it appears whole or not at all.

Everything is written into ``.NAME.partial-PID-RANDOM`` beside the destination and renamed when
complete. A lock file ``.NAME.lock`` lets one process build while others wait and then find the
result; the lock dies with its process, so a killed build never blocks the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from aegis.checkpoint.fileio import sync_folder
from aegis.errors import StoreError


@contextlib.contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Hold the lock that guards a destination, waiting for another holder."""
    path = _lock_path(destination)
    fd = _acquire(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _lock_path(destination: Path) -> Path:
    return destination.parent / f".{destination.name}.lock"


def _acquire(path: Path, mode: int = fcntl.LOCK_EX) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, mode)
            # The previous holder removed the file: the lock must be on the one that is there now.
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def remove_leftovers(destination: Path) -> None:
    """Delete what killed builds left in this folder; only while holding the destination's lock."""
    for path in destination.parent.glob(".*.partial-*"):
        owner = path.with_name(path.name[1:].rpartition(".partial-")[0])
        if owner.name == destination.name:
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            fd = _acquire(_lock_path(owner), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # a build that is alive
        shutil.rmtree(path, ignore_errors=True)
        _lock_path(owner).unlink(missing_ok=True)
        os.close(fd)


@contextlib.contextmanager
def partial_folder(destination: Path, replace: bool = False) -> Iterator[Path]:
    """A folder to fill that becomes ``destination`` on success and vanishes on any failure.

    ``replace``: whatever is at ``destination`` then is deleted first.
    """
    name = f".{destination.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    partial = destination.parent / name
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        if replace:
            shutil.rmtree(destination, ignore_errors=True)
        _rename(partial, destination)
        sync_folder(destination.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, destination: Path) -> None:
    try:
        partial.rename(destination)
    except OSError as error:
        # Somebody without the lock was faster; theirs is kept, and the caller opens and checks it.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def prepare_parent(destination: Path, hint: str = "choose another destination") -> None:
    """Create the folder that will hold ``destination`` and see that it can be written.

    Raises:
        StoreError: it cannot.
    """
    parent = destination.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise StoreError(f"{parent} cannot be written ({error.strerror}); {hint}") from error


def check_space(folder: Path, needed_nbytes: int) -> None:
    """Refuse a build that the disk has no room for.

    Raises:
        StoreError: with what is needed and what is free.
    """
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < needed_nbytes:
        raise StoreError(_space_sentence(folder, needed_nbytes, free))


def _space_sentence(folder: Path, needed: int, free: int) -> str:
    return (
        f"{folder} has {free >> 20} MiB free, but the store takes {-(-needed >> 20)} MiB;"
        " make room or set AEGIS_CACHE to a folder on another disk"
    )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn failures of writing into sentences."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"the disk of {folder} is full; make room or set AEGIS_CACHE to a folder on"
                " another disk"
            ) from error
        raise StoreError(f"writing to {folder} failed: {error.strerror or error}") from error
