"""A model of the hub is brought here, for verbs that need it whole."""

from __future__ import annotations

from pathlib import Path

from aegis.checkpoint.remote import RemoteCheckpoint
from aegis.checkpoint.source import Checkpoint
from aegis.cli.progress import DownloadBar


def here(
    source: Path | Checkpoint, quiet: bool, store_nbytes: int = 0, folder: Path | None = None
) -> Path:
    """The folder of a model, which is downloaded if it is not here.

    store_nbytes: what converting it takes in ``folder`` (None: the cache), for which there has to
    be room too.
    """
    if not isinstance(source, RemoteCheckpoint):
        return Path(source)
    from aegis.convert.cache import cache_folder
    from aegis.hub.remote import download

    return download(source, store_nbytes, folder or cache_folder(), DownloadBar(quiet))
