"""Building a folder so that it appears whole or not at all.

Everything is written into ``.NAME.partial-PID-RANDOM`` beside the destination and renamed when
complete. A lock file ``.NAME.lock`` lets one process build while others wait and then find the
result; the lock dies with its process, so a killed build never blocks the next one. What a build
that was ended or killed leaves is gone on with where its journal says what is finished (see
journal), else it is deleted by whoever builds next in the same folder: once its journal is a week
old, if it is of another destination.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aegis.checkpoint.fileio import sync_folder
from aegis.checkpoint.storage import free_nbytes
from aegis.errors import AegisError, Note, StoreError

_PARTIAL = re.compile(r"\.(.+)\.partial-\d+-[0-9a-f]{8}", re.DOTALL)
_LOCK = re.compile(r"\.(.+)\.lock", re.DOTALL)
ELSEWHERE = "set AEGIS_CACHE to a folder on another disk"
JOURNAL = "unfinished.json"
_KEPT_SECONDS = 7 * 24 * 3600
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def locked(destination: Path, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the lock that guards a destination; False where the file system has no locks.

    on_wait: called once should another process hold it.
    """
    path = _lock_path(destination)
    fd = _acquire_or_wait(path, on_wait)
    try:
        yield fd is not None
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            if fd is not None:
                os.close(fd)


def _lock_path(destination: Path) -> Path:
    return destination.parent / f".{destination.name}.lock"


def _acquire_or_wait(path: Path, on_wait: Callable[[], None] | None) -> int | None:
    try:
        return _acquire(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if on_wait is not None:
            on_wait()
        return _acquire(path, fcntl.LOCK_EX)
    except OSError as error:
        # Without locks two builds at once do the work twice; the first to finish is kept.
        if error.errno in _NO_LOCKS:
            return None
        raise


def _acquire(path: Path, mode: int) -> int:
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


def remove_leftovers(folder: Path, own: Path | None = None, keep: Path | None = None) -> None:
    """Delete what killed builds left in a folder; builds that are alive are left alone, and so are
    those of others that may be gone on with.

    own: a destination whose lock the caller holds; keep: what it goes on with.
    """
    for path in _partial_folders(folder):
        owner = path.with_name(owner_of(path) or "")
        if path == keep or (owner != own and may_go_on(path)):
            continue
        if owner == own:
            shutil.rmtree(path, ignore_errors=True)
            continue
        # It may be alive, or the folder may be read-only.
        with contextlib.suppress(OSError):
            fd = _acquire(_lock_path(owner), fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                shutil.rmtree(path, ignore_errors=True)
                _lock_path(owner).unlink(missing_ok=True)
            finally:
                os.close(fd)


def remove_remains(destination: Path) -> None:
    """Delete what killed builds of a destination left beside it and inside of it, and their lock.

    Nothing happens while one is alive, or where nothing can be written.
    """
    lock = _lock_path(destination)
    with contextlib.suppress(OSError):
        fd = _acquire(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            remove_leftovers(destination.parent, destination)
            remove_leftovers(destination)
            lock.unlink(missing_ok=True)
        finally:
            os.close(fd)


def may_go_on(partial: Path) -> bool:
    """Whether a build left something finished there, and so lately, that its own destination may
    want it."""
    try:
        return time.time() - (partial / JOURNAL).stat().st_mtime < _KEPT_SECONDS
    except OSError:
        return False


def partials_of(destination: Path) -> list[Path]:
    """What builds of a destination have begun, dead or alive."""
    beside = _partial_folders(destination.parent)
    return [path for path in beside if owner_of(path) == destination.name]


def remains_of(destination: Path) -> list[Path]:
    """Folders that a build of a destination fills, or that killed ones left."""
    return partials_of(destination) + _partial_folders(destination)


def owner_of(path: Path) -> str | None:
    """The name of the destination that a partial folder or a lock belongs to; None: it is none."""
    match = _PARTIAL.fullmatch(path.name) or _LOCK.fullmatch(path.name)
    return None if match is None else match[1]


def is_being_built(destination: Path) -> bool:
    """Whether a process holds the lock of a destination."""
    try:
        fd = os.open(_lock_path(destination), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def discard(destination: Path) -> None:
    """Delete a destination, what killed builds left of it, and its lock.

    It is renamed first, so that it is there whole or not at all; who deletes what a killed build
    left would end a deletion that is killed.

    Raises:
        BlockingIOError: a process builds it.
        OSError: something could not be deleted.
    """
    lock = _lock_path(destination)
    fd = _acquire(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        doomed = remains_of(destination)
        if os.path.lexists(destination):
            old = partial_path(destination)
            destination.rename(old)
            sync_folder(destination.parent)
            doomed = [path for path in doomed if path.parent != destination] + [old]
        for path in doomed:
            shutil.rmtree(path)
        lock.unlink(missing_ok=True)
    finally:
        os.close(fd)


def _partial_folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.name[0] == "." and e.is_dir()]
    except OSError:
        return []
    return [folder / name for name in names if _PARTIAL.fullmatch(name)]


@contextlib.contextmanager
def partial_folder(
    destination: Path,
    replace: bool = False,
    unfinished: Path | None = None,
    keep: Callable[[Path], bool] = lambda folder: False,
    journal_stays: bool = False,
) -> Iterator[Path]:
    """A folder to fill that becomes ``destination`` on success and vanishes on any failure.

    ``replace``: whatever is at ``destination`` then is deleted. ``unfinished``: what another build
    left, to be gone on with. ``keep``: deletes all that nobody could go on with, and says whether
    something is left; then the folder stays, unless the failure was the source's.
    ``journal_stays``: something else has to be done before the destination counts.
    """
    partial, old = unfinished or partial_path(destination), partial_path(destination)
    doomed = [partial, old]
    try:
        if unfinished is None:
            partial.mkdir()
        yield partial
        sync_folder(partial)
        if replace:
            with contextlib.suppress(FileNotFoundError):
                destination.rename(old)
        _rename(partial, destination)
        if not journal_stays:
            # Not before: until it is renamed all of it is to be gone on with.
            (destination / JOURNAL).unlink(missing_ok=True)
        sync_folder(destination.parent)
    except BaseException as error:
        if not _is_of_the_source(error) and keep(partial):
            doomed.remove(partial)
        raise
    finally:
        for path in doomed:
            shutil.rmtree(path, ignore_errors=True)
            if path.is_file() or path.is_symlink():
                path.unlink()


def _is_of_the_source(error: BaseException) -> bool:
    """Whether what a folder is made of is wrong or gone, rather than the disk: then what was made
    of it before may be so too."""
    cause = error.__cause__
    read = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, AegisError) and not read


@contextlib.contextmanager
def telling_what_is_kept(destination: Path, by_aegis: bool) -> Iterator[None]:
    """A note on whatever ends a build of ``destination``: what is kept of it, and what becomes of
    that. The caller holds the lock.

    ``by_aegis``: ``aegis rm`` deletes what is kept, and nothing else with it.
    """
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # Or this would hide what it is about.
            kept = [path for path in partials_of(destination) if may_go_on(path)]
            nbytes = sum(map(files_nbytes, kept))
            command = ["aegis", "rm", destination] if by_aegis else ["rm", "-r", *kept]
            if kept:
                said = (
                    f"{-(-nbytes >> 20)} MiB that are finished are kept: the same command goes on"
                    f" with them, and '{shlex.join(map(str, command))}' deletes them"
                )
                error.add_note(Note(said))
        raise


def files_nbytes(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def partial_path(destination: Path) -> Path:
    name = f".{destination.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    return destination.parent / name


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
        if os.path.ismount(destination):
            raise StoreError(
                f"{destination} is a mount point, which cannot be replaced as a whole; name a"
                " folder inside of it"
            )
        if not os.access(parent, os.W_OK | os.X_OK):
            read_only = os.statvfs(parent).f_flag & os.ST_RDONLY
            refusal = errno.EROFS if read_only else errno.EACCES
            raise OSError(refusal, os.strerror(refusal))
    except OSError as error:
        raise StoreError(f"{parent} cannot be written ({error.strerror}); {hint}") from error


def check_space(folder: Path, needed_nbytes: int, hint: str = ELSEWHERE) -> str:
    """Refuse a build that the disk has no room for; a sentence about what it takes.

    Raises:
        StoreError: with what is needed and what is free.
    """
    free = free_nbytes(folder)
    # Some file systems (ramfs, a few in user space) count no blocks at all.
    if free is not None and free < needed_nbytes:
        raise StoreError(
            f"{folder} has {free >> 20} MiB free, but the store takes {-(-needed_nbytes >> 20)}"
            f" MiB; make room or {hint}"
        )
    there = "" if free is None else f" of {free >> 20} MiB that are free"
    return f"the store takes {-(-needed_nbytes >> 20)} MiB{there} in {folder}"


@contextlib.contextmanager
def disk_errors(folder: Path, hint: str = ELSEWHERE) -> Iterator[None]:
    """Turn failures of writing into sentences."""
    try:
        yield
    except OSError as error:
        failure = StoreError(_sentence(error, folder, hint))
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from error


def _sentence(error: OSError, folder: Path, hint: str) -> str:
    if error.errno == errno.ENOSPC:
        return f"the disk of {folder} is full; make room or {hint}"
    if error.errno == errno.EDQUOT:
        return f"your quota on the disk of {folder} is used up; make room or {hint}"
    if error.errno == errno.EFBIG:
        return f"{folder} takes no file so large; raise the limit (ulimit -f) or {hint}"
    if error.errno == errno.ENAMETOOLONG:
        return f"{folder} takes no name so long; choose a shorter one"
    if error.errno == errno.ENOMEM:
        return "the system gave no memory to convert with; stop other programs or raise ulimit -v"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open; close some or raise the limit (ulimit -n)"
    return f"writing to {folder} failed: {error.strerror or error}"
