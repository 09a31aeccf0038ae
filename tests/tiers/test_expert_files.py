import errno
import os
from pathlib import Path

import pytest
from tier_fakes import STRIDE, write_expert_files

from aegis.tiers import ExpertFileError, ExpertFiles
from aegis.tiers.read_pool import UNCHECKED


def test_an_expert_is_where_the_store_wrote_it(tmp_path: Path) -> None:
    paths = write_expert_files(tmp_path, 2, 3)
    with ExpertFiles(paths, STRIDE - 64, STRIDE, 3) as files:
        fd, offset, nbytes = files.locate(1, 2)
        assert (fd, offset, nbytes) == (files.fds[1], 2 * STRIDE, STRIDE)
        assert files.num_layers == 2
        with pytest.raises(IndexError, match="expert 3"):
            files.locate(0, 3)
    assert files.fds == []


@pytest.mark.parametrize("change", [-1, -STRIDE, 1])
def test_a_file_of_another_size_is_refused_at_open(tmp_path: Path, change: int) -> None:
    paths = write_expert_files(tmp_path, 2, 3)
    os.truncate(paths[1], 3 * STRIDE + change)
    with pytest.raises(ExpertFileError, match=r"layer_001\.bin: expected 12288 bytes"):
        ExpertFiles(paths, STRIDE, STRIDE, 3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExpertFileError, match=r"layer_000\.bin: cannot be opened"):
        ExpertFiles([tmp_path / "layer_000.bin"], STRIDE, STRIDE, 3)


def test_a_checksum_is_told_until_the_record_has_arrived_intact(tmp_path: Path) -> None:
    paths = write_expert_files(tmp_path, 2, 3)
    checksums = [[1, 2, 0], [4, 5, 0xFFFFFFFF]]
    with ExpertFiles(paths, STRIDE, STRIDE, 3, checksums=checksums) as files:
        assert [[files.checksum(i, e) for e in range(3)] for i in range(2)] == checksums
        files.note_intact(1, 0)
        assert [files.checksum(1, expert) for expert in range(3)] == [UNCHECKED, 5, 0xFFFFFFFF]
        assert files.checksum(0, 0) == 1
    with ExpertFiles(paths, STRIDE, STRIDE, 3) as files:
        assert files.checksum(1, 2) == UNCHECKED
    with pytest.raises(ExpertFileError, match="4 checksums for 6 expert records"):
        ExpertFiles(paths, STRIDE, STRIDE, 3, checksums=[[1, 2, 3], [4]])


@pytest.mark.parametrize(("record", "stride"), [(100, 4000), (4097, 4096), (0, 4096)])
def test_a_stride_that_direct_reads_cannot_have_is_refused(
    tmp_path: Path, record: int, stride: int
) -> None:
    with pytest.raises(ExpertFileError, match="multiple of 4096"):
        ExpertFiles([], record, stride, 3)


def test_the_mode_and_its_reason_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_expert_files(tmp_path, 1, 3)
    with ExpertFiles(paths, STRIDE, STRIDE, 3, direct=False) as files:
        assert (files.mode, files.reason) == ("buffered", "asked for")
    real_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, "Invalid argument", path)
        return real_open(path, flags, mode)

    if hasattr(os, "O_DIRECT"):
        monkeypatch.setattr(os, "open", refuse)
        with ExpertFiles(paths, STRIDE, STRIDE, 3) as files:
            assert (files.mode, files.reason) == (
                "buffered",
                "the file system refuses direct reads",
            )
            assert len(files.fds) == 1


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct reads")
def test_a_system_without_direct_reads_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_expert_files(tmp_path, 2, 3)
    monkeypatch.delattr(os, "O_DIRECT")
    with ExpertFiles(paths, STRIDE, STRIDE, 3) as files:
        assert (files.mode, files.reason) == ("buffered", "this system has no direct reads")
        assert len(files.fds) == 2


@pytest.mark.parametrize("direct", [True, False])
def test_too_many_open_files_are_an_error_that_says_so_and_none_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    paths = write_expert_files(tmp_path, 3, 3)
    real_open, opened = os.open, list[int]()

    def run_out(path: str, flags: int, mode: int = 0o777) -> int:
        if len(opened) == 2:
            raise OSError(errno.EMFILE, "Too many open files", path)
        opened.append(real_open(path, flags, mode))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", run_out)
        with pytest.raises(ExpertFileError, match=r"no more than 2 of the 3 .*ulimit -n"):
            ExpertFiles(paths, STRIDE, STRIDE, 3, direct=direct)
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
