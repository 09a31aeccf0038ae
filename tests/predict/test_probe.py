"""A probe leaves nothing behind, and says what this machine does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from synthetic_tools import write_shape

from aegis.bench.worker import answered
from aegis.checkpoint.hold import Hold
from aegis.engine.planning import find_model, settings_for
from aegis.engine.sources import Source, SyntheticSource
from aegis.errors import AegisError, StoreError
from aegis.predict import probe as probing
from aegis.predict import worker
from aegis.predict.probe import probe_folder, run_probe
from aegis.settings import default_backend

SETTINGS = {
    "experts": "4bit",
    "policy": "lfu",
    "guess": "cross-layer",
    "guess_width": None,
    "io_threads": 2,
    "threads": 1,
    "activations": "auto",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("AEGIS_CACHE", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path, cache: Path) -> Source:
    shape = write_shape(tmp_path / "shape")
    return find_model(shape, default_backend(), settings_for(1, {}))


def test_a_folder_is_gone_whatever_ends_its_use(cache: Path) -> None:
    def use() -> None:
        with probe_folder(cache / "store") as folder:
            assert folder.parent == cache
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_bytes(b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert list(cache.iterdir()) == []


def test_what_a_killed_probe_left_goes_with_the_next_but_not_what_is_in_use(cache: Path) -> None:
    left, used = cache / ".aegis-probe-left", cache / ".aegis-probe-used"
    for folder in (left, used):
        folder.mkdir()
        (folder / "file").write_bytes(b"1")
    with Hold(used), probe_folder(cache):
        assert not left.exists()
        assert used.exists()
    with probe_folder(cache):
        assert not used.exists()


def test_without_room_nothing_is_written(cache: Path) -> None:
    refused = pytest.raises(StoreError, match=r"the probe needs .* AEGIS_CACHE")
    with refused, probe_folder(cache, 1 << 60):
        pass
    assert list(cache.iterdir()) == []


def test_a_model_is_probed_without_being_written(source: Source, cache: Path) -> None:
    done: list[int] = []
    found = run_probe(source, SETTINGS, default_backend(), "disk", 20, done.append)
    assert isinstance(source, SyntheticSource)
    assert list(cache.iterdir()) == []
    assert done == sorted(done)
    assert done[-1] == worker.STEPS
    kernels = found.kernels
    for name in ("attention_s", "delta_s", "router_s", "experts_s", "head_s", "between_s"):
        assert getattr(kernels, name) > 0, name
    assert kernels.mlp_s == 0
    assert kernels.read_s >= 0
    assert kernels.slower >= 1
    assert 0 < kernels.disk_left <= 1
    assert found.disk.nbytes_per_s > 0
    assert found.disk.latency_s >= 0
    assert not found.own_files
    assert found.to_json()["layers"] == 8


def test_a_store_that_is_there_is_read_and_stays_as_it_is(source: Source, cache: Path) -> None:
    store = source.make("il16" if default_backend() != "mlx" else "row", "4bit", None)
    there = find_model(store.path, default_backend(), settings_for(1, {}))
    found = run_probe(there, SETTINGS, default_backend(), "ram", 20)
    assert found.own_files
    assert list(cache.iterdir()) == [store.path]


def test_what_goes_wrong_in_the_probe_is_told_and_its_files_are_gone(
    source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def ask(request: dict[str, Any], *rest: Any) -> dict[str, Any]:
        asked.append(request)
        assert Path(request["folder"]).is_dir()
        json.dumps(request)
        raise AegisError("the probe ended with 1")

    monkeypatch.setattr(probing, "ask", ask)
    with pytest.raises(AegisError, match="ended with 1"):
        run_probe(source, SETTINGS, default_backend(), "ram", 20)
    assert len(asked) == 1
    assert list(cache.iterdir()) == []


def test_the_worker_answers_with_a_sentence(source: Source, tmp_path: Path) -> None:
    request = {"folder": str(tmp_path / "nowhere"), "config": {}}
    assert "nowhere" in answered(worker.probe, request)["error"]
    shutil.rmtree(tmp_path / "shape")
    assert answered(worker.probe, request)["exit_code"] == 1
