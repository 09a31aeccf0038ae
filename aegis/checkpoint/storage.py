"""What keeping files in a folder means for memory: a disk, a disk behind the page cache, or memory.

Whether a file system takes the flag for direct reads says little: tmpfs takes it and is memory, and
some take it and go through the page cache all the same (btrfs for compressed files, ext4 with its
data in the journal). So one page is tried, and the kernel is asked whether it is cached then.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from aegis.checkpoint.pagecache import drop_pages

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")

PAGE_NBYTES = 4096

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Storage:
    """How files of a folder are read, and why not directly."""

    kind: Literal["direct", "buffered", "memory", "unknown"]
    """buffered: through the page cache; memory: the files themselves take memory; unknown: it
    cannot be told without leaving a file behind."""
    reason: str = ""
    there: bool = False
    """Whether it was a file that was looked at, rather than the place for one."""

    def describe(self) -> str:
        """For people."""
        if self.kind == "unknown":
            return "whether reads can be direct is not known before the first run"
        word = {"direct": "direct reads", "buffered": "buffered reads", "memory": "in memory"}
        return word[self.kind] + (f", since {self.reason}" if self.reason else "")


DIRECT = Storage("direct")
UNKNOWN = Storage("unknown")
REFUSED = Storage("buffered", "the file system refuses direct ones")
CACHED = Storage("buffered", "the file system answers direct ones from the page cache")


def storage_of(place: Path) -> Storage:
    """Of a file, or of what would be written into a folder that need not exist yet."""
    if sys.platform == "darwin":
        return DIRECT
    there = place.is_file()
    existing = place if there else nearest_folder(place)
    kind = file_system(existing)
    if kind in MEMORY_FILE_SYSTEMS:
        return Storage("memory", f"the store lies on {kind}", there)
    if not hasattr(os, "O_DIRECT"):
        return Storage("buffered", "this system has no direct ones", there)
    if not there:
        return _tried(_try_folder, existing)
    found = _tried(_try_file, existing)
    if found.kind == "unknown":
        found = _tried(_try_folder, existing.parent)
    return replace(found, there=True)


def _tried(attempt: Callable[[Path], Storage], place: Path) -> Storage:
    try:
        return attempt(place)
    except OSError as error:
        return REFUSED if error.errno == errno.EINVAL else UNKNOWN


def _try_file(path: Path) -> Storage:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        drop_pages(fd, 0, PAGE_NBYTES)
        if _is_cached(fd):
            return UNKNOWN  # In memory, just written, mapped by someone, or not ours to ask about.
        with mmap.mmap(-1, PAGE_NBYTES) as page, memoryview(page) as view:
            os.preadv(fd, [view], 0)
        return _judge(fd)
    finally:
        os.close(fd)


def _try_folder(folder: Path) -> Storage:
    """By a file that never has a name."""
    temporary = getattr(os, "O_TMPFILE", None)
    if temporary is None:
        return UNKNOWN
    fd = os.open(folder, temporary | os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, PAGE_NBYTES) as page, memoryview(page) as view:
            os.pwrite(fd, view, 0)
        return _judge(fd)
    finally:
        os.close(fd)


def _judge(fd: int) -> Storage:
    """After a page was read or written directly: does it lie in memory, and does it stay there?"""
    if not _is_cached(fd):
        return DIRECT
    os.fdatasync(fd)
    drop_pages(fd, 0, PAGE_NBYTES)
    return Storage("memory", "its file system is one in memory") if _is_cached(fd) else CACHED


def _is_cached(fd: int) -> bool:
    """Whether the first page of a file lies in the page cache; False where nobody says."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, PAGE_NBYTES, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        return False
    try:
        pages = ctypes.create_string_buffer(1)
        return libc.mincore(address, PAGE_NBYTES, pages) == 0 and bool(pages.raw[0] & 1)
    finally:
        libc.munmap(address, PAGE_NBYTES)


def nearest_folder(folder: Path) -> Path:
    """``folder``, or the nearest parent that is there."""
    folder = folder.absolute()
    # Not Path.is_dir, which raises where a parent may not be looked into.
    return next((path for path in (folder, *folder.parents) if os.path.isdir(path)), Path("/"))


def free_nbytes(folder: Path) -> int | None:
    """Space that this user may still fill; None: unknown, or the file system counts none."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


IN_MEMORY = "lies in memory"
"""What ``scratch_folders`` says of a folder whose files take memory."""


def scratch_folders(cache: Path, needed_nbytes: int = 0) -> Iterator[tuple[Path, str | None]]:
    """Folders for files that last a while, the best first, each with what is against it, or None.

    The one that the cache lies in or would, then those for temporary files. They have to be
    writable, with room for ``needed_nbytes``, and on a disk.
    """
    folders = (nearest_folder(cache), Path(tempfile.gettempdir()), Path("/var/tmp"))
    for folder in dict.fromkeys(folders):
        yield folder, _against(folder, needed_nbytes)


def _against(folder: Path, needed_nbytes: int) -> str | None:
    if not is_writable(folder):
        return "cannot be written"
    free = free_nbytes(folder)
    if free is not None and free < needed_nbytes:
        return f"has {free >> 20} MiB free"
    return IN_MEMORY if storage_of(folder).kind == "memory" else None


def is_writable(folder: Path) -> bool:
    """Whether this process may create files in a folder (a read-only mount counts too)."""
    return os.access(folder, os.W_OK | os.X_OK)


def file_system(place: Path, root: Path = Path("/")) -> str | None:
    """The type of the mount that a place lies in, as /proc names it; None: unknown."""
    wanted, best, kind = str(place.resolve()), -1, None
    for mount, found in _mounts(root / "proc/self/mountinfo"):
        inside = wanted == mount or wanted.startswith(mount.rstrip("/") + "/")
        # Of mounts on top of each other the last one is seen.
        if inside and len(mount) >= best:
            best, kind = len(mount), found
    return kind


def _mounts(path: Path) -> Iterator[tuple[str, str]]:
    for line in lines_of(path):
        place, _, rest = line.partition(" - ")
        fields, kinds = place.split(" "), rest.split(" ")
        if len(fields) > 4:
            yield _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]), kinds[0]


def lines_of(path: Path) -> list[str]:
    """The lines of a file of the kernel's, none where there is no such file. Names in it may hold
    all that Python takes for the end of a line, but for the one that the kernel ends them with."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    return data.decode(errors="surrogateescape").removesuffix("\n").split("\n")
