"""The cache: one store per checkpoint and layout, made when needed, never trusted blindly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from strategies import write_checkpoint

from aegis.convert.cache import cache_folder, cached_store_path, embedded_path, ensure_store
from aegis.convert.convert import convert
from aegis.convert.verify import verify
from aegis.errors import CheckpointError, StoreError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-model", 1)


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AEGIS_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("AEGIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "aegis"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder().is_relative_to(tmp_path)


def test_a_checkpoint_is_converted_once(cache: Path, source: Path) -> None:
    calls: list[int] = []
    first = ensure_store(source, progress=lambda done, _: calls.append(done))
    assert calls
    assert first.path.parent == cache
    assert first.path.name.startswith("tiny-model-il16-")
    calls.clear()
    assert ensure_store(source, progress=lambda done, _: calls.append(done)).path == first.path
    assert not calls


def test_layouts_have_stores_of_their_own(cache: Path, source: Path) -> None:
    assert ensure_store(source, "row").layout.layout == "row"
    assert ensure_store(source, "il16").layout.layout == "il16"
    assert len(list(cache.iterdir())) == 2


def test_a_moved_checkpoint_keeps_its_store(cache: Path, source: Path, tmp_path: Path) -> None:
    before = cached_store_path(source)
    (tmp_path / "elsewhere").mkdir()
    moved = source.rename(tmp_path / "elsewhere" / source.name)
    assert cached_store_path(moved) == before


def test_a_changed_checkpoint_gets_another_store(cache: Path, source: Path) -> None:
    before = cached_store_path(source)
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert cached_store_path(source) != before
    before = cached_store_path(source)
    write_checkpoint(source, 2)
    assert cached_store_path(source) != before


def test_the_embedded_model_keeps_its_store_when_it_is_installed_again(cache: Path) -> None:
    before = cached_store_path(embedded_path())
    weights = embedded_path() / "model.safetensors"
    times = weights.stat()
    try:
        os.utime(weights, (1, 1))
    except PermissionError:
        pytest.skip("the installed package cannot be touched")
    try:
        assert cached_store_path(embedded_path()) == before
    finally:
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_damaged_store_in_the_cache_is_made_anew(cache: Path, source: Path) -> None:
    store = ensure_store(source)
    store.expert_paths()[0].unlink()
    again = ensure_store(source)
    assert verify(again).ok
    assert [path.name for path in cache.iterdir()] == [store.path.name]


def test_a_half_written_folder_in_the_cache_is_replaced(cache: Path, source: Path) -> None:
    path = cached_store_path(source)
    path.mkdir(parents=True)
    (path / "resident.bin").write_bytes(b"half")
    assert verify(ensure_store(source)).ok


def test_a_store_is_opened_where_it_lies(cache: Path, source: Path, tmp_path: Path) -> None:
    store = convert(source, tmp_path / "s")
    assert ensure_store(store.path).path == store.path
    assert not cache.exists()


def test_a_store_of_another_layout_is_refused(cache: Path, source: Path, tmp_path: Path) -> None:
    store = convert(source, tmp_path / "s", layout="row")
    with pytest.raises(StoreError, match="layout row, but il16"):
        ensure_store(store.path, "il16")


def test_a_store_is_not_converted_again(source: Path, tmp_path: Path) -> None:
    store = convert(source, tmp_path / "s")
    with pytest.raises(StoreError, match="is a store already"):
        convert(store.path, tmp_path / "t")


def test_what_is_neither_store_nor_checkpoint_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        ensure_store(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        ensure_store(tmp_path / "empty")


def test_a_cache_that_cannot_be_made_is_refused_with_a_way_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StoreError, match=r"cannot be written .*; set AEGIS_CACHE"):
        ensure_store(source)


def test_the_embedded_model_comes_with_its_licence() -> None:
    names = {path.name for path in embedded_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "LICENSE"} <= names
    assert "Apache License" in (embedded_path() / "LICENSE").read_text()


def test_removing_the_cache_only_costs_time(cache: Path, source: Path) -> None:
    ensure_store(source)
    shutil.rmtree(cache)
    assert verify(ensure_store(source)).ok
