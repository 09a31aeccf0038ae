"""Conversion on disks that fill up, quotas, failing disks, several processes at once, and folders
that cannot be used."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fault_tools import Failing, check_kept, contents, python_script
from strategies import write_checkpoint

from aegis.checkpoint.store import Store
from aegis.cli.report import note_older_stores
from aegis.convert import build
from aegis.convert.cache import cache_folder, cached_store_path, ensure_store, older_stores
from aegis.convert.convert import convert
from aegis.convert.identity import model_name
from aegis.convert.three_bit import add_3bit
from aegis.convert.verify import verify
from aegis.errors import CheckpointError, StoreError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "m", 3)


@pytest.fixture(scope="module")
def sound(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file of an undisturbed conversion."""
    return contents(convert(source, tmp_path_factory.mktemp("sound") / "s").path)


FINISHED = {"resident.bin", "experts/layer_000.bin", "experts/layer_001.bin"}
"""What is not made again once it is there."""

SENTENCES = {
    errno.ENOSPC: r"the disk of .* is full; make room or choose",
    errno.EDQUOT: r"your quota on the disk of .* is used up; make room or choose",
    errno.EFBIG: r"takes no file so large; raise the limit \(ulimit -f\)",
    errno.EIO: r"writing to .* failed: Input/output error",
    errno.EROFS: r"writing to .* failed: Read-only file system",
    errno.EMFILE: r"too many files are open; close some or raise the limit \(ulimit -n\)",
}


@pytest.mark.parametrize("error", SENTENCES)
@pytest.mark.parametrize("names", [("pwrite",), ("fsync",), ("mkdir",), ("rename",)])
def test_whatever_fails_is_a_sentence_and_leaves_what_is_finished(
    error: int, names: tuple[str, ...], source: Path, sound: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(patch, error, 0, *names)
        convert(source, tmp_path / "counted")
    parent = tmp_path / "parent"
    parent.mkdir()
    # The first folder that is made is there already.
    calls = range(1 + (names == ("mkdir",)), failing.calls + 1)
    for at in random.Random(error).sample(calls, min(3, len(calls))):
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, error, at, *names)
            with pytest.raises(StoreError, match=SENTENCES[error]) as raised:
                convert(source, parent / "s")
        # The very last is to make the rename durable: then all is there.
        if names == ("fsync",) and at == failing.calls:
            assert contents(parent) == {f"s/{name}": data for name, data in sound.items()}
            kept = {name: (parent / "s" / name).stat().st_ino for name in sound}
        else:
            kept = check_kept(parent, sound, raised.value)
        # What is finished is there when it is renamed, and nothing before the first fsync is.
        assert names != ("rename",) or len(kept) == len(FINISHED)
        assert at > 1 or names == ("rename",) or not kept
        assert contents(convert(source, parent / "s").path) == sound
        assert [path.name for path in parent.iterdir()] == ["s"]
        for name, inode in kept.items():
            assert (parent / "s" / name).stat().st_ino == inode, f"{name} was written again"
        shutil.rmtree(parent / "s")


@pytest.mark.parametrize("what", ["short", "refused"])
def test_writes_that_come_short_or_are_refused_directly_go_on(
    what: str,
    source: Path,
    sound: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A nearly full disk takes a part of what it is given; some refuse direct writes when they see
    one, not when the file is opened."""
    pwrite, rng, odd = os.pwrite, random.Random(1), 0

    def grudging(fd: int, data: memoryview, offset: int) -> int:
        nonlocal odd
        direct = getattr(os, "O_DIRECT", 0) & fcntl.fcntl(fd, fcntl.F_GETFL)
        if direct and (what == "refused" or offset % 4096):
            odd += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if not direct:
            return pwrite(fd, data[: rng.randint(1, len(data))], offset)
        plain = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            return pwrite(plain, data[: rng.randint(1, len(data))], offset)
        finally:
            os.close(plain)

    monkeypatch.setattr(os, "pwrite", grudging)
    assert contents(convert(source, tmp_path / "s", piece_nbytes=64 << 10).path) == sound
    assert odd or not hasattr(os, "O_DIRECT")


def test_a_source_that_comes_in_pieces_is_read_whole(
    source: Path, sound: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pread, rng = os.preadv, os.pread, random.Random(2)
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, views, offset: (
            rng.randint(1, max(1, preadv(fd, views, offset)))
            if os.fstat(fd).st_size
            else preadv(fd, views, offset)
        ),
    )
    monkeypatch.setattr(
        os, "pread", lambda fd, nbytes, offset: pread(fd, rng.randint(1, nbytes), offset)
    )
    assert contents(convert(source, tmp_path / "s").path) == sound


def test_a_source_that_cannot_be_read_is_what_is_named(
    source: Path, sound: dict[str, bytes], tmp_path: Path
) -> None:
    """A disk that does not answer now may do so later: what is finished is kept."""
    with pytest.MonkeyPatch.context() as patch:
        reads = Failing(patch, 0, 0, "preadv")
        convert(source, tmp_path / "counted")
    for name, after in (("preadv", 8), ("preadv", reads.calls - 1), ("pread", 8)):
        parent = tmp_path / f"{name}{after}"
        with pytest.MonkeyPatch.context() as patch:
            function, calls = getattr(os, name), 0

            def failing(fd: int, *rest: Any, _function: Any = function, after: int = after) -> Any:
                nonlocal calls
                calls += 1
                if calls > after:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return _function(fd, *rest)

            patch.setattr(os, name, failing)
            with pytest.raises(CheckpointError, match=r"safetensors cannot be read") as raised:
                convert(source, parent / "s")
        if parent.exists():
            kept = check_kept(parent, sound, raised.value)
            assert after <= 8 or "resident.bin" in kept
        assert contents(convert(source, parent / "s").path) == sound


def test_a_copied_file_that_cannot_be_read_is_what_is_named(tmp_path: Path) -> None:
    """Reading a process's first page fails with EIO."""
    if not Path("/proc/self/mem").exists():
        pytest.skip("there is no file here that cannot be read")
    source = write_checkpoint(tmp_path / "m", 5)
    (source / "generation_config.json").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read \(Input"):
        convert(source, tmp_path / "parent" / "s")
    assert not any((tmp_path / "parent").iterdir())


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 5)
    weights = source / "model.safetensors"

    def change(done: int, total: int) -> None:
        os.utime(weights, (1, 1))

    # What is finished is of no use: the source is another one then.
    with pytest.raises(CheckpointError, match="was changed while it was converted"):
        convert(source, tmp_path / "parent" / "s", progress=change)
    assert not any((tmp_path / "parent").iterdir())


BOTH = """
import sys
from aegis.convert.cache import ensure_store
print(ensure_store(sys.argv[1]).path)
"""


def test_two_at_once_make_one_store(source: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONSAFEPATH": "1", "AEGIS_CACHE": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BOTH, str(source)], env=env, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(said) == 1
    [path] = (tmp_path / "cache").iterdir()
    assert verify(Store.open(path)).ok


def test_who_waits_for_another_process_shows_a_bar_and_then_uses_its_store(
    source: Path, tmp_path: Path
) -> None:
    target, shown = tmp_path / "s", list[tuple[int, int]]()
    begun, waiting = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        begun.set()
        waiting.wait(10)

    def note(done: int, total: int) -> None:
        shown.append((done, total))
        waiting.set()

    first = threading.Thread(target=convert, args=(source, target), kwargs={"progress": hold})
    first.start()
    assert begun.wait(60)
    store = convert(source, target, progress=note)
    first.join()
    assert [done for done, _ in shown] == [0]
    assert verify(store).ok


def test_a_lock_of_the_dead_never_blocks(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".s.lock").write_text("12345")
    assert verify(convert(source, tmp_path / "s")).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_still_makes_whole_stores(
    error: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(fd: int, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refused)
    # Without locks nobody can tell whether another process is alive: its folder stays.
    (tmp_path / ".s.partial-1-aaaaaaaa").mkdir()
    assert verify(convert(source, tmp_path / "s")).ok
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".s.partial-1-aaaaaaaa", "s"]


def test_files_of_others_with_similar_names_are_left_alone(source: Path, tmp_path: Path) -> None:
    others = [".x.partial-2-file", ".y.partial-backup", ".partial-1-aaaaaaaa", ".z.lock"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".f.partial-1-aaaaaaaa").touch()
    convert(source, tmp_path / "s")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, ".f.partial-1-aaaaaaaa", "s"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_lives_is_not_cleaned_up(source: Path, cache: Path) -> None:
    """Somebody makes 3-bit files, and somebody else another store, while a third one opens."""
    store = ensure_store(source)
    other = cache / "other-il16-v2-0123456789ab"
    alive = [
        store.path / ".experts-3bit.partial-1-aaaaaaaa",
        cache / f".{other.name}.partial-1-bbbbbbbb",
    ]
    for folder in alive:
        folder.mkdir()
    with build.locked(store.path), build.locked(other):
        ensure_store(source)
        assert all(folder.is_dir() for folder in alive)
    ensure_store(source)
    assert list(cache.iterdir()) == [store.path]
    assert not alive[0].exists()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_a_store_that_merely_cannot_be_read_now_is_not_replaced(
    error: int, source: Path, cache: Path
) -> None:
    """Or 19 GB were written anew for want of a file descriptor."""
    store = ensure_store(source)
    before = store.path.stat().st_ino
    with pytest.MonkeyPatch.context() as patch:
        real = os.open

        def refusing(path: Any, *rest: Any, **options: Any) -> int:
            if str(path).endswith("store.json"):
                raise OSError(error, os.strerror(error), str(path))
            return real(path, *rest, **options)

        patch.setattr(os, "open", refusing)
        with pytest.raises(StoreError, match=os.strerror(error)):
            ensure_store(source)
        with pytest.raises(StoreError, match=os.strerror(error)):
            convert(source, store.path, replace_damaged=True)
    assert ensure_store(source).path.stat().st_ino == before


def test_a_store_elsewhere_that_cannot_be_used_is_said_to_be_in_the_way(
    source: Path, tmp_path: Path
) -> None:
    store = convert(source, tmp_path / "s")
    (store.path / "store.json").write_text("{}")
    with pytest.raises(StoreError, match=r"/s holds a store that cannot be used; remove it or"):
        convert(source, tmp_path / "s")


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_whatever_lies_in_the_place_of_a_cached_store_is_replaced(
    kind: str, source: Path, cache: Path
) -> None:
    place = cached_store_path(source)
    cache.mkdir()
    if kind == "file":
        place.write_text("in the way")
    elif kind == "link":
        place.symlink_to(cache / "nowhere")
    else:
        (place / "deep").mkdir(parents=True)
    assert verify(ensure_store(source)).ok
    assert list(cache.iterdir()) == [place]


def test_older_stores_of_a_name_are_listed_and_others_are_not(
    source: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = ensure_store(source).path
    older = [cache / "m-il16-v1-0123456789ab", cache / "m-il16-v2-ba9876543210"]
    others = ["m-row-v1-0123456789ab", "m2-il16-v1-0123456789ab", "m-il16-v1-short", "x"]
    for path in (*older, *(cache / name for name in others)):
        path.mkdir()
        (path / "file").write_bytes(bytes(3 << 20))
    assert older_stores(now) == older
    note_older_stores(now)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" is an older store")[0] for line in lines] == [
        f"{path} (3 MiB)" for path in older
    ]
    assert now.exists()


def test_a_destination_that_cannot_be_renamed_to_is_refused_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "s")
    with pytest.raises(StoreError, match=r"is a mount point, .* name a folder inside of it"):
        convert(source, tmp_path / "s", progress=lambda done, total: pytest.fail("work"))


def test_file_systems_that_count_no_blocks_are_not_full(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: empty)
    assert verify(convert(source, tmp_path / "s")).ok


def test_copied_files_count_when_room_is_looked_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = convert(source, tmp_path / "s")
    files = sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file())
    asked: list[int] = []
    monkeypatch.setattr(
        "aegis.convert.convert.check_space", lambda folder, nbytes, hint: asked.append(nbytes)
    )
    convert(source, tmp_path / "t")
    # All but store.json.
    assert files - (store.path / "store.json").stat().st_size == asked[0]


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_do_not_take_advice_or_sync_folders_serve_too(
    error: int, source: Path, sound: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fsync = os.fsync

        def refused(*ignored: object) -> None:
            raise OSError(error, os.strerror(error))

        def files_only(fd: int) -> None:
            refused() if os.path.isdir(f"/proc/self/fd/{fd}") else fsync(fd)

        patch.setattr(os, "posix_fadvise", refused)
        patch.setattr(os, "fsync", files_only)
        assert contents(convert(source, tmp_path / "s").path) == sound
        add_3bit(tmp_path / "s")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AEGIS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("home", [None, "", "relative/place"])
def test_without_a_usable_home_the_user_list_says_where_the_cache_is(
    home: str | None, nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pwd

    entry = list(pwd.getpwuid(os.getuid()))
    entry[5] = str(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(entry))
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert cache_folder().is_relative_to(tmp_path)


def test_a_user_nobody_knows_is_told_to_name_a_cache(
    nowhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(StoreError, match=r"there is no home folder .*; set AEGIS_CACHE"):
        cache_folder()


def test_a_tilde_in_the_cache_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_CACHE", "~/there")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/there")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file", "File exists"),
        ("file/inside", "Not a directory"),
        ("loop/inside", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        ("dangling", "File exists"),
    ],
)
def test_a_cache_that_cannot_be_a_folder_is_refused_in_a_sentence(
    place: str, reason: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / place))
    with pytest.raises(StoreError, match=rf"cannot be written \({reason}\); set AEGIS_CACHE"):
        ensure_store(source)


def test_a_cache_that_is_read_only_serves_what_it_has(source: Path, cache: Path) -> None:
    """By a bind mount in a namespace of its own: root may write into any folder's mode."""
    store = ensure_store(source)
    (cache / ".left-il16-v2-0123456789ab.partial-1-aaaaaaaa").mkdir()
    code = (
        "import subprocess, sys\n"
        "from aegis.convert.cache import ensure_store\n"
        "from aegis.errors import StoreError\n"
        "cache, source, other = sys.argv[1:]\n"
        "for extra in ([], ['-o', 'remount,bind,ro']):\n"
        "    command = ['mount', *(extra or ['--bind']), *([] if extra else [cache]), cache]\n"
        "    if subprocess.run(command, capture_output=True).returncode: sys.exit(77)\n"
        "print(ensure_store(source).path)\n"
        "try: ensure_store(other)\n"
        "except StoreError as error: print(error)\n"
    )
    other = write_checkpoint(source.parent / "other", 9)
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", code, str(cache), str(source), str(other)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("folders cannot be mounted read-only here")
    said = done.stdout.splitlines()
    assert said[0] == str(store.path), done.stderr
    assert "cannot be written (Read-only file system); set AEGIS_CACHE" in said[1]


def test_a_full_table_of_files_is_a_sentence(source: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from aegis.convert.convert import convert\n"
        "import aegis.convert.three_bit\n"
        "from aegis.errors import AegisError\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))\n"
        "try: convert(sys.argv[1], sys.argv[2])\n"
        "except AegisError as error: print(error)\n"
    )
    done = python_script(code, str(source), str(tmp_path / "s"))
    assert "oo many" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("points_to", ["nowhere", "empty", "link"])
def test_a_link_is_refused_as_a_destination_before_any_work(
    points_to: str, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / points_to)
    with pytest.raises(StoreError, match=r"/link is a symbolic link, .* name the folder that it"):
        convert(source, tmp_path / "link", progress=lambda done, total: pytest.fail("work"))
    store = convert(source, tmp_path / "s")
    (tmp_path / "to store").symlink_to(store.path)
    assert verify(convert(source, tmp_path / "to store")).ok


def test_a_folder_may_have_the_longest_name_there_is(source: Path, cache: Path) -> None:
    longest = shutil.copytree(source, cache.parent / ("é" * 127))
    store = ensure_store(longest)
    assert ensure_store(longest).path == store.path
    assert model_name(longest) == longest.name
    with pytest.raises(StoreError, match=r"takes no name so long; choose a shorter one"):
        convert(longest, cache / ("x" * 250))


def test_what_was_left_of_a_folder_with_any_name_is_deleted(source: Path, cache: Path) -> None:
    odd = shutil.copytree(source, cache.parent / "a\nb \u2028")
    ensure_store(odd)
    place = cached_store_path(odd)
    for left in (f".{place.name}.partial-1-aaaaaaaa", ".x\ny.partial-1-aaaaaaaa"):
        (cache / left).mkdir()
    (cache / f".{place.name}.lock").touch()
    ensure_store(odd)
    assert list(cache.iterdir()) == [place]


def test_memory_that_is_refused_is_not_the_disks_fault(source: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def refused(nbytes: int) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        patch.setattr("aegis.convert.records.aligned_buffer", refused)
        with pytest.raises(StoreError, match=r"the system gave no memory to convert with; stop"):
            convert(source, tmp_path / "s")
    assert not (tmp_path / "s").exists()
