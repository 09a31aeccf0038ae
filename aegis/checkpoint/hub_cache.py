"""Names of models on the Hugging Face hub, and its cache as it lies on the disk. No network.

``models--ORG--NAME/refs/REVISION`` holds a commit; ``snapshots/COMMIT/`` holds its files, as links
into ``blobs/``, each of which appears when it is whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aegis.checkpoint.source import weight_files
from aegis.checkpoint.vocabulary import Vocabulary
from aegis.errors import CheckpointError, TokenizerError

MAIN = "main"
"""The revision that is meant where none is named."""

_NAME = re.compile(r"([\w.-]+)/([\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_PART = re.compile(r"(?=.*[A-Za-z])\w(?:.{0,94}\w)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FOLDER = "models--"


@dataclass(frozen=True)
class HubName:
    """A model on the hub: ORG/NAME, and a branch, tag or commit of it."""

    repo: str
    revision: str = MAIN

    def __str__(self) -> str:
        return self.repo if self.revision == MAIN else f"{self.repo}@{self.revision}"

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """``ORG/NAME`` or ``ORG/NAME@REVISION``; None: this is no name of a model there.

        Both parts hold a letter, so that 24/7 is none.
        """
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        org, name, revision = match.groups()
        parts = all(map(_PART.fullmatch, (org, name)))
        if not parts or ".." in text or "--" in org + name or name.endswith(".git"):
            return None
        if revision is not None and not is_revision(revision):
            return None
        return cls(f"{org}/{name}", revision or MAIN)

    @property
    def folder(self) -> Path:
        """Where the hub's cache keeps it, there or not."""
        return hub_cache() / (_FOLDER + self.repo.replace("/", "--"))

    @property
    def commit(self) -> str | None:
        """The commit that the revision meant when it was last asked for; None: never."""
        if is_commit(self.revision):
            return self.revision
        commit = _read_ref(self.folder / "refs" / self.revision)
        return commit if is_commit(commit) else None

    def snapshot(self) -> Path | None:
        """The folder with its files, if all that a model needs is there."""
        commit = self.commit
        folder = None if commit is None else self.folder / "snapshots" / commit
        return folder if folder is not None and _is_complete(folder) else None


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint on this disk came from."""

    repo: str
    commit: str

    @classmethod
    def of(cls, folder: Path) -> Origin | None:
        """By the place of a snapshot in a cache of the hub's; None: elsewhere."""
        commit, snapshots, home = _names(folder.resolve())
        if snapshots != "snapshots" or not home.startswith(_FOLDER) or not is_commit(commit):
            return None
        name = HubName.parse(home.removeprefix(_FOLDER).replace("--", "/"))
        return None if name is None else cls(name.repo, commit)


def is_revision(text: str) -> bool:
    """Whether it could be the name of a branch or tag, or a commit."""
    parts = text.split("/")
    return all(part and part[0] not in ".-" and part != ".." for part in parts)


def is_commit(text: str) -> bool:
    """Whether it is a whole commit hash."""
    return _COMMIT.fullmatch(text) is not None


def hub_cache() -> Path:
    """$HF_HUB_CACHE, or hub/ in $HF_HOME, or in the user's cache folder."""
    home = _folder_of("XDG_CACHE_HOME") or Path(os.path.expanduser("~/.cache"))
    hub = (_folder_of("HF_HOME") or home / "huggingface") / "hub"
    return _folder_of("HF_HUB_CACHE") or _folder_of("HUGGINGFACE_HUB_CACHE") or hub


def revisions_at(folder: Path) -> list[str]:
    """The branches and tags that a snapshot was, by the cache that it lies in."""
    refs = folder.resolve().parent.parent / "refs"
    found = ((path.relative_to(refs), _read_ref(path)) for path in _files(refs))
    return sorted(str(name) for name, commit in found if commit == folder.resolve().name)


def _folder_of(variable: str) -> Path | None:
    named = os.environ.get(variable)
    return Path(os.path.expandvars(os.path.expanduser(named))) if named else None


def _names(path: Path) -> tuple[str, str, str]:
    return path.name, path.parent.name, path.parent.parent.name


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names)


def _read_ref(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _is_complete(folder: Path) -> bool:
    if not (folder / "config.json").exists():
        return False
    try:
        Vocabulary.of(folder)
        return bool(weight_files(folder))
    except (CheckpointError, TokenizerError):
        return False
