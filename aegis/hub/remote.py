"""Models on the hub, asked for through a worker process: described, then downloaded."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aegis import errors
from aegis.checkpoint.hub_cache import HubName, hub_cache
from aegis.checkpoint.remote import RemoteCheckpoint
from aegis.checkpoint.storage import free_nbytes, nearest_folder
from aegis.child import worker
from aegis.errors import HubError, StoreError

OnDownload = Callable[[int, int, str], None]
"""Called with the bytes that are here, those of all, and a sentence that says what goes where."""

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    # Its downloads do not go on where they ended, and take memory that nothing bounds.
    "HF_HUB_DISABLE_XET": "1",
}


def describe(name: HubName) -> RemoteCheckpoint:
    """Config, headers and sizes of a model on the hub; none of its weights is read.

    Raises:
        HubError: the hub cannot be reached or refuses.
        CheckpointError, TokenizerError: it is no model that aegis can run.
    """
    return RemoteCheckpoint.described(name, _ask({"repo": name.repo, "revision": name.revision}))


def download(
    found: RemoteCheckpoint,
    store_nbytes: int,
    store_folder: Path,
    on_download: OnDownload | None = None,
) -> Path:
    """Download a model into the hub's cache, or what is missing of it; its folder there.

    store_nbytes: what converting it takes in ``store_folder`` afterwards; there has to be room.

    Raises:
        HubError: the hub cannot be reached or refuses.
        StoreError: a disk has no room for it.
    """
    missing = found.missing_nbytes
    _check_room({hub_cache(): missing, store_folder: store_nbytes}, found.name)
    what = _sentence(found, missing, store_nbytes, store_folder)

    def progress(done: int, total: int) -> None:
        if on_download is not None:
            on_download(done, total, what)

    if missing:
        progress(0, sum(size for size, _ in found.sizes.values()))
    _fetch(found, found.sizes, progress)
    return found.path


def note_revision(found: RemoteCheckpoint) -> None:
    """Let the hub's cache know which commit the name means now; nothing large is downloaded.

    Raises:
        HubError: the hub cannot be reached or refuses.
    """
    if found.name.commit != found.commit:
        _fetch(found, {})


def _fetch(
    found: RemoteCheckpoint,
    files: Mapping[str, tuple[int, str]],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    name = found.name
    request = {"repo": name.repo, "revision": name.revision, "commit": found.commit}
    _ask({**request, "files": files}, progress)


def _ask(request: Mapping[str, Any], progress: Callable[[int, int], None] | None = None) -> Any:
    """Have a worker answer; its error is raised here."""
    command = [json.dumps(request)]
    with worker("aegis.hub.worker", command, _QUIET, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for text in process.stdout:
            line = json.loads(text)
            if "progress" in line and progress is not None:
                progress(*line["progress"])
            elif "result" in line:
                return line["result"]
            elif "error" in line:
                kind, sentence = line["error"]
                raise getattr(errors, kind)(sentence)
        code = process.wait()
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    raise HubError(
        f"the process that asks the hub for {request['repo']} was {how}; run the command again"
    )


def _check_room(needs: Mapping[Path, int], name: HubName) -> None:
    """Refuse what the disks of some folders have no room for together."""
    from aegis.planner import format_least, format_size

    disks: dict[int, list[Path]] = {}
    for folder in needs:
        disks.setdefault(nearest_folder(folder).stat().st_dev, []).append(folder)
    for folders in disks.values():
        needed = sum(needs[folder] for folder in folders)
        free = free_nbytes(nearest_folder(folders[0]))
        if free is not None and free < needed:
            names = " and ".join(map(str, dict.fromkeys(folders)))
            raise StoreError(
                f"the disk of {names} has {format_size(free)} free, but {name} takes"
                f" {format_least(needed)} there; make room, or set HF_HOME (for the download) or"
                " AEGIS_CACHE (for what is made of it) to a folder on another disk"
            )


def _sentence(found: RemoteCheckpoint, missing: int, store_nbytes: int, folder: Path) -> str:
    from aegis.planner import format_size

    then = f"; converting it takes {format_size(store_nbytes)} in {folder}" if store_nbytes else ""
    return f"downloading {found.name}, {format_size(missing)}, into {hub_cache()}{then}"
