"""What is known of a place before anything is read from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aegis.checkpoint import storage
from aegis.checkpoint.storage import CACHED, DIRECT, REFUSED, UNKNOWN, Storage, storage_of

linux_flags = pytest.mark.skipif(
    not hasattr(os, "O_DIRECT") or not hasattr(os, "O_TMPFILE"), reason="flags of Linux"
)


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that no file system in memory holds, as far as anybody says."""
    monkeypatch.setattr(storage, "file_system", lambda place: "ext4")
    return tmp_path


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (DIRECT, "direct reads"),
        (REFUSED, "buffered reads, since the file system refuses direct ones"),
        (CACHED, "buffered reads, since the file system answers direct ones from the page cache"),
        (Storage("memory", "the store lies on tmpfs"), "in memory, since the store lies on tmpfs"),
        (UNKNOWN, "whether reads can be direct is not known before the first run"),
    ],
)
def test_each_kind_is_said_in_words(found: Storage, words: str) -> None:
    assert found.describe() == words


@linux_flags
def test_where_there_are_no_direct_reads_they_are_buffered(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    (on_disk / "file").write_bytes(b"1")
    for place, there in ((on_disk / "file", True), (on_disk / "new", False)):
        assert storage_of(place) == Storage("buffered", "this system has no direct ones", there)


@linux_flags
def test_what_cannot_be_tried_without_leaving_a_file_behind_is_unknown(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    assert storage_of(on_disk / "new") == UNKNOWN
    assert list(on_disk.iterdir()) == []


@linux_flags
def test_a_file_that_cannot_be_mapped_counts_as_not_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    for flags, cached in ((os.O_RDONLY, True), (os.O_WRONLY, False)):
        fd = os.open(tmp_path / "file", flags)
        assert storage._is_cached(fd) is cached
        os.close(fd)
