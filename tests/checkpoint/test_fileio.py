"""Files are the same whether the file system lets reads and writes past the page cache or not."""

from __future__ import annotations

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from aegis.checkpoint.fileio import (
    PlacedWriter,
    UncachedReader,
    UncachedWriter,
    aligned_buffer,
    open_uncached,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="a flag of Linux")

PAGE = 4096


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Direct files cannot be opened, for the reason that a test gives."""
    real_open = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(request.param, os.strerror(request.param), str(path))
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("refused", [errno.EINVAL, errno.ENOTSUP], indirect=True)
def test_where_direct_files_are_refused_at_open_nothing_else_changes(
    tmp_path: Path, refused: None
) -> None:
    data = np.random.default_rng(0).integers(0, 256, 9 * PAGE, dtype=np.uint8)
    with UncachedWriter(tmp_path / "file", 2 * PAGE) as writer:
        writer.write(data[:5000])
        writer.write(data[5000:])
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    out = np.zeros(6000, dtype=np.uint8)
    with UncachedReader(tmp_path / "file", PAGE, PAGE) as reader:
        for offset in (0, 12345, 9 * PAGE - out.size):
            reader.read_into(offset, out)
            assert (out == data[offset : offset + out.size]).all()
        with pytest.raises(EOFError, match="file ends before byte"):
            reader.read_into(9 * PAGE - out.size + 1, out)


@pytest.mark.parametrize("late", [errno.EINVAL, None])
def test_what_threads_write_in_any_order_is_the_file(
    tmp_path: Path, late: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where direct writes are refused only when one is tried."""
    data = aligned_buffer(9 * PAGE)
    data[:] = np.random.default_rng(0).integers(0, 256, data.size, dtype=np.uint8)
    real_write = os.pwrite

    def refuse(fd: int, view: memoryview, offset: int) -> int:
        if late and fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            raise OSError(late, os.strerror(late))
        return real_write(fd, view[: 2 * PAGE], offset)  # and short ones are gone on with

    monkeypatch.setattr(os, "pwrite", refuse)
    with PlacedWriter(tmp_path / "file", data.size) as writer, ThreadPoolExecutor(3) as threads:
        for page in (6, 0, 3):
            part = data[page * PAGE : (page + 3) * PAGE]
            threads.submit(writer.write, page * PAGE, part)
    assert (tmp_path / "file").read_bytes() == data.tobytes()


@pytest.mark.parametrize("refused", [errno.EACCES], indirect=True)
def test_a_file_that_may_not_be_opened_is_not_tried_another_way(
    tmp_path: Path, refused: None
) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(PermissionError):
        open_uncached(tmp_path / "file", os.O_RDONLY)


def test_a_file_that_cannot_be_made_as_long_as_it_will_be_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(fd: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, "too large")

    monkeypatch.setattr(os, "truncate", refused)
    free = os.dup(0)  # the lowest number that is free
    os.close(free)
    with pytest.raises(OSError, match="too large"):
        PlacedWriter(tmp_path / "file", PAGE)
    again = os.dup(0)
    os.close(again)
    assert again == free
