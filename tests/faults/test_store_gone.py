"""The store disappears, shrinks or fails while a model is open; real files, real kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_tools import difference, result_of
from fault_tools import POOLS, always, faulty_disk
from small_model import IDS, PLENTY, SMALL, open_small

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.errors import AegisError, ReadError, StoreError
from aegis.tiers import ReadPoolError

TOKENS = 4
STREAMING = {"backend": "reference", "max_slots": SMALL.num_experts_per_tok}


@pytest.fixture(params=POOLS)
def streaming(
    request: pytest.FixtureRequest, store: Store, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """An engine over a store to hurt, with as few slots as there can be."""
    if request.param == "python":
        monkeypatch.setitem(__import__("sys").modules, "aegis.kernels.native._native", None)
    else:
        pytest.importorskip("aegis.kernels.native._native")
    with open_small(store, **STREAMING) as engine:
        yield engine


def test_a_file_cut_off_while_open_is_named_and_is_no_reason_to_open_again(
    streaming: Engine, store: Store
) -> None:
    expected = result_of(streaming, IDS, TOKENS)
    file = store.expert_paths()[1]
    whole = file.read_bytes()
    os.truncate(file, len(whole) // 2 + 100)
    with pytest.raises(ReadError, match=rf"{file.name}: expected .* .has the file been truncated"):
        result_of(streaming, IDS[::-1], TOKENS)
    file.write_bytes(whole)
    assert difference(expected, result_of(streaming, IDS, TOKENS)) == ""


def test_a_store_that_is_deleted_or_moved_serves_who_has_it_open(
    streaming: Engine, store: Store
) -> None:
    expected = result_of(streaming, IDS, TOKENS)
    elsewhere = store.path.with_name("elsewhere")
    store.path.rename(elsewhere)
    assert difference(expected, result_of(streaming, IDS, TOKENS)) == ""
    shutil.rmtree(elsewhere)
    assert difference(expected, result_of(streaming, IDS, TOKENS)) == ""
    with pytest.raises(AegisError, match=r"store"):
        open_small(store, **STREAMING)


def test_a_closed_engine_says_so_after_a_fault_too(streaming: Engine, store: Store) -> None:
    for file in store.expert_paths():
        os.truncate(file, 0)
    with pytest.raises(ReadError):
        streaming.score(IDS)
    streaming.close()
    with pytest.raises(AegisError, match="the engine is closed; open it again"):
        streaming.score(IDS)


def test_a_pipe_in_place_of_expert_files_is_refused_without_waiting(store: Store) -> None:
    file = store.expert_paths()[0]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StoreError, match=rf"{file.name} is not a regular file"):
        open_small(store, **STREAMING)


@pytest.fixture
def unreliable_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A mounted file system and the image that it lies in: cut off, its blocks cannot be read."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    commands = (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", image, mount])
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted here: {error}")
    yield mount, image
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_disk_that_fails_in_mid_token_is_a_sentence_and_heals(
    unreliable_disk: tuple[Path, Path], sound_store: Store
) -> None:
    mount, image = unreliable_disk
    shutil.copytree(sound_store.path, mount / "store")
    os.sync()
    with open_small(Store.open(mount / "store"), **STREAMING) as engine:
        expected = result_of(engine, IDS, TOKENS)
        whole = image.read_bytes()
        tokens = engine.generate(IDS, 40, ignore_eos=True)
        next(tokens)
        os.truncate(image, 1 << 20)
        with pytest.raises(ReadError, match="Input/output error; check the disk"):
            list(tokens)
        with pytest.raises(ReadError, match="Input/output error"):
            engine.score(IDS)
        with image.open("r+b") as file:
            file.write(whole)
            os.fsync(file.fileno())
        assert difference(expected, result_of(engine, IDS, TOKENS)) == ""


def test_the_weights_in_memory_are_read_in_a_sentence_or_not_at_all(store: Store) -> None:
    """Opening: what ``resident.bin`` cannot bring."""
    reads = 0
    preadv = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal reads
        reads += 1
        if reads > 1:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aegis.checkpoint.fileio.os.preadv", failing)
        with pytest.raises(StoreError, match=r"resident\.bin cannot be read: .*output error"):
            Engine.open(store.path, cap=PLENTY, context=64, backend="reference")


def test_a_disk_that_fails_while_the_books_are_put_in_order_is_tried_again(
    sound_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, and then no thread to read with: the next call makes it good."""
    with faulty_disk(always(0)) as disk:
        disk.install(monkeypatch, "python")
        with open_small(sound_store, **STREAMING) as engine:
            expected = result_of(engine, IDS, TOKENS)
            with pytest.MonkeyPatch.context() as patch:

                def interrupted(*ignored: object) -> int:
                    raise KeyboardInterrupt

                def refused(*ignored: object, **options: object) -> object:
                    raise ReadPoolError("no thread could be started for reading")

                patch.setattr(engine._opened.tiers, "guess", interrupted)
                patch.setattr("aegis.tiers.facade.open_read_pool", refused)
                with pytest.raises(KeyboardInterrupt):
                    engine.feed([*IDS[:3], 1])
                patch.undo()
                patch.setattr("aegis.tiers.facade.open_read_pool", refused)
                with pytest.raises(ReadError, match="no thread could be started"):
                    engine.feed(IDS)
            assert difference(expected, result_of(engine, IDS, TOKENS)) == ""
