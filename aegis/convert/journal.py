"""What of an unfinished folder is finished, so that whoever goes on with it need not do it again.

The journal is a small file in the folder. It is replaced as a whole after every file, once that is
on the disk: what it names is there, whatever ended its process. It holds for one key only, a digest
of everything that the files' bytes follow from.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from aegis.convert.build import JOURNAL, partials_of


class Journal:
    """The finished files of a folder, each with the checksums of what it holds."""

    def __init__(
        self, folder: Path, key: str, files: dict[str, tuple[int, ...]] | None = None
    ) -> None:
        self.folder, self._key, self._files = folder, key, files or {}

    @property
    def nbytes(self) -> int:
        """What the folder takes of the disk: unfinished files too, which make room for others."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def finished(self, path: Path, nbytes: int, count: int) -> tuple[int, ...] | None:
        """The checksums of a file that is finished; None: nothing is left in its place."""
        found = self._files.get(self._name(path), ())
        if len(found) == count and path.is_file() and path.stat().st_size == nbytes:
            return found
        path.unlink(missing_ok=True)
        return None

    def note(self, path: Path, checksums: Sequence[int]) -> None:
        """A file is finished and on the disk."""
        sync_folder(path.parent)
        self._files[self._name(path)] = tuple(checksums)
        write_file(self.folder / JOURNAL, sealed({"key": self._key, "files": self._files}))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def unfinished_of(destination: Path, key: str) -> Journal | None:
    """The fullest of the folders that killed builds of a destination with this key left.

    The caller holds the destination's lock.
    """
    found = [journal for path in partials_of(destination) if (journal := _read(path, key))]
    return max(found, key=lambda journal: journal.nbytes, default=None)


def _read(folder: Path, key: str) -> Journal | None:
    try:
        data = read_regular(folder / JOURNAL, MAX_JSON_NBYTES)
        content = parse_object(data)
    except (OSError, FileDamageError):
        return None
    files = content.get("files")
    if not is_sealed(data) or content.get("key") != key or not isinstance(files, dict):
        return None
    return Journal(folder, key, {name: tuple(values) for name, values in files.items()})
