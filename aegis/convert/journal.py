"""What of an unfinished folder is finished, so that whoever goes on with it need not do it again.

The journal is a small file in the folder. It is replaced as a whole after every file, once that is
on the disk: what it names is there, whatever ended its process, and nothing else is where an error
or a signal did. It holds for one key only, a digest of everything that the files' bytes follow
from.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from aegis.checkpoint.fileio import sync_folder, write_file
from aegis.checkpoint.plainfile import (
    MAX_JSON_NBYTES,
    FileDamageError,
    is_sealed,
    parse_object,
    read_regular,
    sealed,
)
from aegis.convert.behind import Behind
from aegis.convert.build import JOURNAL, files_nbytes, owner_of, partial_path, partials_of


class Journal:
    """The finished files of a folder, each with the checksums of what it holds."""

    def __init__(
        self, folder: Path, key: str, files: dict[str, tuple[int, ...]] | None = None
    ) -> None:
        self.folder, self.key, self._files = folder, key, files or {}

    @property
    def nbytes(self) -> int:
        """What the folder takes of the disk: unfinished files too, which make room for others."""
        return files_nbytes(self.folder)

    def fill(
        self,
        path: Path,
        nbytes: int,
        count: int,
        make: Callable[[], Sequence[int]],
        behind: Behind,
        report: Callable[[int], None] = lambda nbytes: None,
    ) -> tuple[int, ...]:
        """The ``count`` checksums of a file of so many bytes: of the one that is finished, of which
        ``report`` is told, or of what ``make`` writes in its place, and ``behind`` finishes."""
        found = self._files.get(self._name(path), ())
        if len(found) == count and path.is_file() and path.stat().st_size == nbytes:
            report(nbytes)
            return found
        path.unlink(missing_ok=True)
        try:
            made = tuple(make())
            behind.submit(partial(self._note, path, made))
        except BaseException:
            path.unlink(missing_ok=True)  # Its room may be what the journal lacks.
            raise
        return made

    def names(self, path: Path) -> bool:
        """Whether a file is among the finished ones."""
        return self._name(path) in self._files

    def _note(self, path: Path, checksums: tuple[int, ...]) -> None:
        """A file is finished and on the disk."""
        sync_folder(path.parent)
        self._files[self._name(path)] = checksums
        data = sealed({"key": self.key, "files": self._files})
        # What it names is on the disk. That it is there itself is not worth what making a disk
        # write at once costs, after each file: without it all is made anew.
        write_file(self.folder / JOURNAL, data, durable=False)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def unfinished_of(destination: Path, key: str) -> Journal | None:
    """The fullest of the folders that other builds of a destination with this key left.

    The caller holds the destination's lock.
    """
    read = filter(None, map(_read, partials_of(destination)))
    found = [journal for journal in read if journal.key == key]
    return max(found, key=lambda journal: journal.nbytes, default=None)


def begin_again(destination: Path, key: str) -> None:
    """Make a destination whose build ended before it counted what it was: an unfinished folder.

    The caller holds the destination's lock.
    """
    journal = _read(destination)
    if journal is not None and journal.key == key:
        destination.rename(partial_path(destination))


def keep_finished(folder: Path) -> bool:
    """Delete all of a folder but what its journal says is finished, and what is finished of folders
    begun inside of it; whether anything is kept."""
    journal = _read(folder)
    if journal is None:
        return False
    for place, folders, files in os.walk(folder):
        for inner in [Path(place, name) for name in folders]:
            if owner_of(inner) is None and not (inner / JOURNAL).exists():
                continue
            folders.remove(inner.name)  # It has a journal of its own.
            if not keep_finished(inner):
                shutil.rmtree(inner, ignore_errors=True)
        for path in (Path(place, name) for name in files):
            if path != folder / JOURNAL and not journal.names(path):
                with contextlib.suppress(OSError):
                    path.unlink()
    return True


def _read(folder: Path) -> Journal | None:
    try:
        data = read_regular(folder / JOURNAL, MAX_JSON_NBYTES)
        content = parse_object(data)
    except (OSError, FileDamageError):
        return None
    key, files = content.get("key"), content.get("files")
    if not is_sealed(data) or not isinstance(key, str) or not isinstance(files, dict):
        return None
    return Journal(folder, key, {name: tuple(values) for name, values in files.items()})
