"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aegis.convert.build import (
    check_space,
    disk_errors,
    locked,
    partial_folder,
    prepare_parent,
    remove_leftovers,
)
from aegis.errors import CheckpointError, StoreError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with partial_folder(tmp_path / "d") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "d").exists()
    assert names(tmp_path) == ["d"]
    assert names(tmp_path / "d") == ["file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_folder_vanishes(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with partial_folder(tmp_path / "d") as folder:
            (folder / "file").write_text("x")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "cause", "kept"),
    [
        (KeyboardInterrupt, None, True),
        (OSError, None, True),
        (RuntimeError, None, True),
        (CheckpointError, OSError, True),
        (CheckpointError, None, False),
        (CheckpointError, EOFError, False),
        (StoreError, FileNotFoundError, False),
    ],
)
def test_what_could_be_gone_on_with_stays_unless_the_source_is_to_blame(
    tmp_path: Path,
    error: type[BaseException],
    cause: type[BaseException] | None,
    kept: bool,
) -> None:
    for anything in (False, True):

        def keep(folder: Path, anything: bool = anything) -> bool:
            (folder / "unfinished").unlink()
            return anything

        def fail(keep: Callable[[Path], bool] = keep) -> None:
            with partial_folder(tmp_path / "d", keep=keep) as folder:
                (folder / "finished").touch()
                (folder / "unfinished").touch()
                raise error from (cause and cause())

        with pytest.raises(error):
            fail()
        left = [sorted(p.name for p in path.iterdir()) for path in tmp_path.iterdir()]
        assert left == ([["finished"]] if kept and anything else [])


def test_a_failure_of_writing_says_what_was_noted_about_it(tmp_path: Path) -> None:
    def fail() -> None:
        with disk_errors(tmp_path):
            error = OSError(errno.ENOSPC, "full")
            error.add_note("something is kept")
            raise error

    with pytest.raises(StoreError) as raised:
        fail()
    assert raised.value.__notes__ == ["something is kept"]


def test_what_was_there_first_stays_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    for replace, expected in ((False, "old"), (True, "new")):
        with partial_folder(tmp_path / "d", replace) as folder:
            (folder / "file").write_text("new")
            (tmp_path / "d").mkdir(exist_ok=True)
            (tmp_path / "d" / "file").write_text("old")
        assert (tmp_path / "d" / "file").read_text() == expected
    assert names(tmp_path) == ["d"]


def test_the_lock_is_held_by_one_at_a_time_and_leaves_no_file(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with locked(tmp_path / "d"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert names(tmp_path) == []


def test_leftovers_of_the_dead_are_removed_and_of_the_living_kept(tmp_path: Path) -> None:
    for name in (".d.partial-1-aaaaaaaa", ".dead.partial-2-bbbbbbbb", ".alive.partial-3-cccccccc"):
        (tmp_path / name).mkdir()
    (tmp_path / ".dead.lock").touch()
    with locked(tmp_path / "alive"), locked(tmp_path / "d"):
        remove_leftovers(tmp_path, tmp_path / "d")
        assert names(tmp_path) == [".alive.lock", ".alive.partial-3-cccccccc", ".d.lock"]


def test_a_build_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(StoreError, match=r"MiB free, but the store takes 1099511627776 MiB"):
        check_space(tmp_path, 1 << 60)


def test_a_parent_that_cannot_be_made_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be written .*; go elsewhere"):
        prepare_parent(tmp_path / "file" / "d", "go elsewhere")


def test_other_failures_of_writing_become_a_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match=r"writing to .* failed: Input/output error"),
        disk_errors(tmp_path),
    ):
        raise OSError(5, "Input/output error")


def test_a_lock_is_let_go_of_when_its_file_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "broken", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(OSError, match="broken"), locked(tmp_path / "s"):
            pass
    with locked(tmp_path / "s", lambda: pytest.fail("somebody still holds it")) as alone:
        assert alone
