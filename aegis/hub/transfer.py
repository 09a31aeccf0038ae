"""Bytes of one repository on the hub: into memory, or into the hub's cache.

Only the worker imports this: it loads ``huggingface_hub``, whose sessions bring the token, proxies
and certificates. Its own downloads begin anew when they were cut off; those here go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, hf_hub_url
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from aegis.checkpoint.fileio import PIECE_NBYTES, drop_pages
from aegis.checkpoint.hub_cache import HubName, hub_cache
from aegis.errors import HubError
from aegis.hub.sentences import is_transient

PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Before each further attempt in a row that brings nothing."""

SYNC_NBYTES = 64 << 20
"""What may wait to be written: dirty pages count as memory of a container."""

_PIECE_NBYTES = 64 << 10
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Repository:
    """A model on the hub at one commit."""

    def __init__(self, repo: str, commit: str) -> None:
        self.repo, self.commit = repo, commit
        self.folder = HubName(repo).folder

    def read(self, name: str, start: int, nbytes: int) -> bytes:
        """A range of a file; fewer bytes where it ends.

        Raises:
            HubError: more come than were asked for.
        """
        for pause in (*PAUSES_S, None):
            data = bytearray()
            try:
                with self._stream(name, start, start + nbytes) as (_, pieces):
                    for piece in pieces:
                        data += piece
                        if len(data) > nbytes:
                            raise HubError(
                                f"{constants.ENDPOINT} sends more of {self.repo}/{name} than was"
                                " asked for; it does not serve ranges as the hub does"
                            )
                return bytes(data)
            except Exception as error:
                _pause(error, pause)
        raise AssertionError("the last failure is raised")

    def keep_small(self, name: str, revision: str | None = None) -> None:
        """Put a small file into the snapshot; ``revision`` is then known to be this commit."""
        hf_hub_download(self.repo, name, revision=revision or self.commit, cache_dir=hub_cache())

    def keep(self, name: str, size: int, digest: str, on_bytes: Callable[[int], None]) -> None:
        """Put a file of ``size`` bytes into the snapshot, going on where another attempt ended.

        ``digest``: SHA-256 of the content, or its hash as a blob of Git. ``on_bytes`` is called
        with every number of bytes that is there.

        Raises:
            HubError: what comes is not that file.
        """
        if _HASH.fullmatch(digest) is None:
            raise HubError(f"{constants.ENDPOINT} says no hash of {self.repo}/{name}; try later")
        if (self.folder / "snapshots" / self.commit / name).exists():
            on_bytes(size)
            return
        blob = self.folder / "blobs" / digest
        lock = hub_cache() / ".locks" / self.folder.name / f"{digest}.lock"
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        # The lock is the one that huggingface_hub takes: whoever comes second waits and finds it.
        with WeakFileLock(lock):
            if blob.exists():
                on_bytes(size)
            else:
                partial = blob.with_name(f"{digest}.incomplete")
                with _Partial(partial, size, digest, on_bytes) as file:
                    self._fill(name, file)
                partial.rename(blob)
        self.keep_small(name)

    def _fill(self, name: str, file: _Partial) -> None:
        pauses = iter((*PAUSES_S, None))
        while file.have < file.size:
            before = file.have
            try:
                with self._stream(name, before, None) as (status, pieces):
                    if before and status != 206:
                        file.restart()
                    for piece in pieces:
                        file.append(piece)
            except Exception as error:
                if file.have > before:
                    pauses = iter((*PAUSES_S, None))
                _pause(error, next(pauses))
            else:
                if file.have == before:
                    raise HubError(f"{constants.ENDPOINT} sends nothing of {self.repo}/{name}")
        if not file.is_sound():
            file.restart()
            raise HubError(
                f"{self.repo}/{name} was damaged on its way from {constants.ENDPOINT}: its hash is"
                " another; download it again"
            )

    @contextlib.contextmanager
    def _stream(
        self, name: str, start: int, stop: int | None
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The status of a response and its pieces, from ``start`` to before ``stop``."""
        headers = {**build_hf_headers(library_name="aegis"), "Accept-Encoding": "identity"}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        url = hf_hub_url(self.repo, name, revision=self.commit)
        session: Any = get_session()
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        # Until version 1 the sessions are those of requests, whose stream is a flag; then of httpx.
        modern = callable(getattr(session, "stream", None))
        if modern:
            opened = session.stream("GET", url, headers=headers, timeout=timeout)
        else:
            opened = session.get(url, headers=headers, timeout=timeout, stream=True)
        with opened as response:
            hf_raise_for_status(response)
            # As they come: of larger pieces what has come is lost where the connection breaks.
            pieces = response.iter_bytes() if modern else response.iter_content(_PIECE_NBYTES)
            yield response.status_code, pieces


def _pause(error: Exception, seconds: float | None) -> None:
    """Wait before another attempt, where there is one to be made after such a failure."""
    if seconds is None or not is_transient(error):
        raise error
    time.sleep(seconds)


class _Partial:
    """A file that is not whole yet, and the hash of what is there."""

    def __init__(self, path: Path, size: int, digest: str, on_bytes: Callable[[int], None]) -> None:
        self.size, self._wanted, self._on_bytes = size, digest, on_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._synced = 0
        self._begin()
        if os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, 0)
        while piece := os.pread(self._fd, PIECE_NBYTES, self.have):
            self._count(piece)
        drop_pages(self._fd)

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *ending: object) -> None:
        try:
            self._sync()
        finally:
            os.close(self._fd)

    def _begin(self) -> None:
        self.have = 0
        self._hash = hashlib.sha256() if len(self._wanted) == 64 else hashlib.sha1()
        if len(self._wanted) == 40:
            self._hash.update(b"blob %d\0" % self.size)

    def restart(self) -> None:
        """Forget what is there."""
        self._on_bytes(-self.have)
        os.ftruncate(self._fd, 0)
        self._begin()

    def append(self, piece: bytes) -> None:
        """Write behind what is there.

        Raises:
            HubError: that is more than the whole file.
        """
        if self.have + len(piece) > self.size:
            raise HubError(f"{constants.ENDPOINT} sends more than the {self.size} bytes of a file")
        view = memoryview(piece)
        while view:
            count = os.pwrite(self._fd, view, self.have)
            self._count(view[:count])
            view = view[count:]
        if self.have - self._synced >= SYNC_NBYTES:
            self._sync()

    def _count(self, piece: bytes | memoryview) -> None:
        self._hash.update(piece)
        self.have += len(piece)
        self._on_bytes(len(piece))

    def _sync(self) -> None:
        os.fsync(self._fd)
        drop_pages(self._fd)
        self._synced = self.have

    def is_sound(self) -> bool:
        """Whether the whole has the hash that it should have."""
        return self._hash.hexdigest() == self._wanted
