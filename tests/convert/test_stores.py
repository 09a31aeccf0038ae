"""Stores in the cache are listed, and deleted wholly or not at all; nothing else ever is."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from strategies import write_checkpoint

from aegis import Engine
from aegis.checkpoint.hold import Hold, is_held
from aegis.convert import build
from aegis.convert.cache import ensure_store
from aegis.convert.convert import convert
from aegis.convert.stores import disk_nbytes, place_at, places, remove
from aegis.engine.places import find_places
from aegis.errors import StoreError, UsageError
from aegis.hub.downloads import Download, downloads

LEFT = ".gone-il16-v2-0123456789ab.partial-1-aaaaaaaa"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def store(cache: Path, tmp_path: Path) -> Path:
    return ensure_store(write_checkpoint(tmp_path / "tiny", 1)).path


def free_of(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bfree * disk.f_frsize


def test_an_empty_cache_and_none_at_all_have_no_stores(cache: Path) -> None:
    assert places() == []
    cache.rmdir()
    assert places() == []


def test_a_store_is_listed_by_what_it_was_made_of(store: Path) -> None:
    [place] = places()
    assert (place.path, place.model, place.state, place.damage) == (store, "tiny", "ready", None)
    assert place.nbytes == disk_nbytes(store)
    assert (place.in_use, place.being_built, place.unfinished_nbytes) == (False, False, 0)


def test_what_is_damaged_unfinished_or_being_made_is_listed_as_that(
    cache: Path, store: Path
) -> None:
    (cache / LEFT).mkdir()
    (cache / LEFT / "resident.bin").write_bytes(bytes(100_000))
    (store / "resident.bin").write_bytes(b"short")
    made = cache / "made-row-v2-0123456789ab"
    states = {place.model: place.state for place in places()}
    assert states == {"tiny": "damaged", "gone": "unfinished"}
    with build.locked(made):
        states = {place.model: place.state for place in places()}
        assert states == {"tiny": "damaged", "gone": "unfinished", "made": "converting"}
    gone = place_at(cache / LEFT[1:].partition(".")[0])
    assert gone.unfinished_nbytes == gone.nbytes == disk_nbytes(cache / LEFT) > 100_000


def test_other_files_in_the_cache_are_nothing_of_ours(cache: Path) -> None:
    (cache / "notes").mkdir()
    (cache / "notes.txt").write_text("mine")
    (cache / ".hidden.lock").write_text("not one of ours")
    assert places() == []


def test_an_open_store_is_in_use_and_stays(store: Path) -> None:
    with Engine.open(store, cap="1GiB", backend="reference", context=64):
        [place] = places()
        assert (place.state, place.in_use) == ("in use", True)
        with pytest.raises(StoreError, match=r"is in use by a running process; end that first"):
            remove(place)
        assert store.is_dir()
    remove(place)
    assert not store.exists()


def test_a_store_that_a_killed_process_had_open_is_free(store: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from aegis.checkpoint.hold import Hold\n"
        "hold = Hold(Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert is_held(store)
        process.send_signal(signal.SIGKILL)
    assert not is_held(store)


def test_looking_whether_a_store_is_held_lets_nobody_fail(store: Path) -> None:
    with Hold(store), Hold(store):
        assert is_held(store)
        assert is_held(store)
    assert not is_held(store)


def test_who_opens_what_is_deleted_just_now_is_told(store: Path) -> None:
    shutil.rmtree(store)
    with pytest.raises(StoreError, match=r"was deleted just now; run the command again"):
        Hold(store)


def test_a_file_system_without_locks_holds_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(fd: int, mode: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with Hold(store):
        assert not is_held(store)


def test_a_conversion_under_way_stays(cache: Path, store: Path) -> None:
    with build.locked(store):
        [place] = places()
        assert place.state == "converting"
        with pytest.raises(StoreError, match=r"is being converted; end that first"):
            remove(place)
    assert place_at(store).state == "ready"


def test_deleting_takes_what_is_half_finished_and_the_lock_too(cache: Path, store: Path) -> None:
    beside = cache / f".{store.name}.partial-1-aaaaaaaa"
    inside = store / ".experts-3bit.partial-1-aaaaaaaa"
    for folder in (beside, inside):
        folder.mkdir()
        (folder / "layer_000.bin").write_bytes(bytes(50_000))
    (cache / f".{store.name}.lock").touch()
    other = cache / LEFT
    other.mkdir()
    place = place_at(store)
    assert place.nbytes == disk_nbytes(store) + disk_nbytes(beside)
    assert place.unfinished_nbytes == disk_nbytes(beside) + disk_nbytes(inside)
    remove(place)
    assert list(cache.iterdir()) == [other]
    remove(place_at(cache / LEFT[1:].partition(".")[0]))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("foreign", ["notes.txt", "experts.old", ".git"])
def test_a_store_with_something_of_the_users_is_left_alone(store: Path, foreign: str) -> None:
    (store / foreign).mkdir()
    with pytest.raises(StoreError, match=rf"holds {foreign}, which is no part of a store"):
        remove(place_at(store))
    assert (store / foreign).is_dir()


def test_what_may_be_no_store_is_left_alone(cache: Path) -> None:
    other = cache / "other"
    other.mkdir()
    (other / "store.json").write_text('{"shop": "books"}')
    with pytest.raises(StoreError, match=r"may be no store: .* does not describe an aegis store"):
        remove(place_at(other))
    link = cache / "link-il16-v2-0123456789ab"
    (cache.parent / "mine").mkdir()
    link.symlink_to(cache.parent / "mine")
    with pytest.raises(StoreError, match="is no folder of a store"):
        remove(place_at(link))
    assert (cache.parent / "mine").is_dir()


def test_a_deletion_that_is_cut_off_leaves_no_half_of_a_store(
    cache: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(path: Path, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_off)
        with pytest.raises(KeyboardInterrupt):
            remove(place_at(store))
    assert not store.exists()
    [place] = places()
    assert (place.path, place.state) == (store, "unfinished")
    ensure_store(tmp_path / "tiny")  # Whoever comes by cleans up.
    assert {path.name for path in cache.iterdir()} == {store.name}


def test_a_disk_that_refuses_is_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(StoreError, match=r"cannot be deleted \(Operation not permitted\)"):
        remove(place_at(store))


def test_what_has_another_name_too_is_not_counted_as_freed(store: Path, tmp_path: Path) -> None:
    whole = disk_nbytes(store)
    file = store / "resident.bin"
    os.link(file, tmp_path / "copy")
    assert disk_nbytes(store) == whole - file.stat().st_blocks * 512
    assert disk_nbytes(tmp_path / "nowhere") == 0


def test_stores_are_found_by_name_folder_and_model(store: Path, tmp_path: Path) -> None:
    row = ensure_store(tmp_path / "tiny", "row").path
    both = {store, row}
    assert {place.path for place in find_places("tiny")} == both
    assert {place.path for place in find_places(str(tmp_path / "tiny"))} == both
    assert [place.path for place in find_places(store.name)] == [store]
    assert [place.path for place in find_places(str(store))] == [store]


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("nothing", r"has no store of nothing; aegis list shows"),
        ("org/name", r"has no store of org/name"),
        ("other", r"has no store of other"),
        ("mine", r"is a store, but not in .*; rm -r deletes it"),
    ],
)
def test_what_the_cache_does_not_have_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    convert(write_checkpoint(tmp_path / "other", 2), tmp_path / "mine")
    with pytest.raises(UsageError, match=match):
        find_places(model)


def test_downloads_that_no_store_needs_and_unfinished_ones_are_told(
    cache: Path, tmp_path: Path
) -> None:
    for repo in ("models--org--done", "models--org--begun", "models--org--other", "datasets--o--n"):
        (tmp_path / "hub" / repo / "blobs").mkdir(parents=True)
        (tmp_path / "hub" / repo / "blobs" / "abc").write_bytes(bytes(5000))
    begun = tmp_path / "hub" / "models--org--begun" / "blobs" / "abc.incomplete"
    begun.write_bytes(bytes(70_000))
    first, second = downloads(["org/done"])
    assert (first.repo, first.unfinished_nbytes, first.converted) == (
        "org/begun",
        disk_nbytes(begun),
        False,
    )
    assert (second.repo, second.converted) == ("org/done", True)
    assert "aegis pull org/begun goes on with it" in str(first.describe())
    assert "(hf cache rm model/org/done)" in str(second.describe())
    assert Download("org/x", 1, 0, False).describe() is None
