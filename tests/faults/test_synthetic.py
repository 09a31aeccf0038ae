"""Synthetic stores on disks that are full, fill up, or see the writing ended."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from fault_tools import Failing
from synthetic_tools import write_shape

from aegis.checkpoint.fileio import ALIGN, aligned_buffer
from aegis.checkpoint.overlapped import OverlappedWriter
from aegis.errors import StoreError
from aegis.synthetic.recipe import Recipe, recipe
from aegis.synthetic.write import make


@pytest.fixture
def shape(tmp_path: Path) -> Recipe:
    return recipe(write_shape(tmp_path / "shape"))


def test_a_full_disk_is_refused_before_anything_is_written(
    shape: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "parent"
    space = namedtuple("space", "f_bavail f_frsize f_blocks f_flag")
    monkeypatch.setattr(os, "statvfs", lambda path: space(1, 4096, 100, 0))
    with pytest.raises(StoreError, match=r"has 0 MiB free, but the store takes \d+ MiB; make room"):
        make(shape, parent / "s", "il16")
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("name", ["pwrite", "fsync", "rename"])
def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    name: str, error: int, shape: Recipe, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counted = Failing(patch, error, 0, name)
        make(shape, tmp_path / "counted", "il16")
    parent = tmp_path / "parent"
    parent.mkdir()
    # The last fsync makes the rename durable: then all is there.
    last = counted.calls - (name == "fsync")
    for at in random.Random(error).sample(range(1, last + 1), min(3, last)):
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, error, at, name)
            with pytest.raises(StoreError, match=r"make room|failed"):
                make(shape, parent / "s", "il16")
        assert list(parent.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_writing_that_is_ended_leaves_nothing(
    number: signal.Signals, shape: Recipe, tmp_path: Path
) -> None:
    """The signal comes while experts are written: the process says when that is."""
    code = (
        "import sys; from aegis.synthetic import write; import os, time\n"
        "pool = write._Job._write_records\n"
        "def told(*args):\n"
        "    print('begun', flush=True); time.sleep(60)\n"
        "    return pool(*args)\n"
        "write._Job._write_records = told\n"
        "from aegis.cli import main; main()\n"
    )
    cache = tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "convert", shape.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AEGIS_CACHE": str(cache), "PYTHONSAFEPATH": "1"},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert len(list(cache.glob(".*.partial-*"))) == 1
        process.send_signal(number)
        process.communicate()
    assert process.returncode == 128 + number
    assert list(cache.iterdir()) == []


def test_overlapped_writes_arrive_in_order(tmp_path: Path) -> None:
    data = aligned_buffer(50 * ALIGN)
    data[:] = np.frombuffer(random.Random(1).randbytes(data.size), np.uint8)
    with OverlappedWriter(tmp_path / "file", 3 * ALIGN) as writer:
        for start in range(0, data.size, 1000):
            writer.write(data[start : start + 1000])
    assert (tmp_path / "file").read_bytes() == data.tobytes()


@pytest.mark.parametrize("at", [1, 2, 5])
def test_what_fails_in_the_background_is_raised_and_nothing_more_is_written(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, plain = 0, os.pwrite

    def failing(fd: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    data = aligned_buffer(20 * ALIGN)
    with (
        pytest.raises(OSError, match="No space"),
        OverlappedWriter(tmp_path / "file", 4 * ALIGN) as writer,
    ):
        writer.write(data)
    assert calls <= at + 1
    shutil.rmtree(tmp_path)
