"""A fake hub with one small model, and caches that are empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import GOLDEN, NAMES, REPO, FakeHub, Repo, fake_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """It has ``REPO``; processes that are started talk to it."""
    with fake_hub() as made:
        files = {name: (GOLDEN / name).read_bytes() for name in NAMES}
        files["pytorch_model.bin"] = files["original/model.safetensors"] = b"not wanted"
        made.repos[REPO] = Repo(files)
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "aegis"))
        yield made


@pytest.fixture
def here(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The same for ``huggingface_hub`` in this process, whose settings are those of its import."""
    from huggingface_hub import constants

    from aegis.hub import transfer

    files = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "PAUSES_S", (0.0,) * 5)
    return hub
