"""What the hub's cache holds that a store was made of, and downloads that are not finished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aegis.checkpoint.hub_cache import HubName, hub_cache
from aegis.convert.stores import disk_nbytes


@dataclass(frozen=True)
class Download:
    """One model in the hub's cache. Sizes in bytes on the disk."""

    repo: str
    nbytes: int
    unfinished_nbytes: int
    converted: bool
    """A store was made of it, which does not need it any more."""

    def describe(self) -> str | None:
        """What can be done about it, in a sentence; None: nothing."""
        from aegis.planner import format_size

        if self.converted:
            return (
                f"{self.repo}: the hub's cache holds its download too, {format_size(self.nbytes)};"
                f" its store does not need that (hf cache rm model/{self.repo})"
            )
        if self.unfinished_nbytes:
            return (
                f"{self.repo}: {format_size(self.unfinished_nbytes)} of an unfinished download;"
                f" aegis pull {self.repo} goes on with it"
            )
        return None


def downloads(converted: Iterable[str]) -> list[Download]:
    """Models in the hub's cache that were ``converted`` into stores, or are not whole."""
    known, found = set(converted), []
    for folder in sorted(hub_cache().glob("models--*--*")):
        name = HubName.parse(folder.name.removeprefix("models--").replace("--", "/"))
        if name is None:
            continue
        unfinished = sum(map(disk_nbytes, folder.glob("blobs/*.incomplete")))
        if unfinished or name.repo in known:
            whole = disk_nbytes(folder)
            found.append(Download(name.repo, whole, unfinished, name.repo in known))
    return found
