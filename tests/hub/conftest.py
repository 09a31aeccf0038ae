"""A fake hub with one small model, and caches that are empty."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_here import Done, command_here
from fake_hub import GOLDEN, NAMES, REPO, FakeHub, Repo, fake_hub

from aegis import errors
from aegis.hub import remote, worker


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
    """The same without worker processes: what they do is done in this one, which is quicker."""
    from huggingface_hub import constants, file_download

    from aegis.hub import transfer

    files = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    for module in (constants, file_download):  # Older versions have a copy of their own.
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", files, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "PAUSES_S", (0.0,) * 5)
    monkeypatch.setattr(remote, "_ask", _ask)
    return hub


def _ask(request: Mapping[str, Any], progress: Callable[[int, int], None] | None = None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_tell", lambda line: progress and progress(*line["progress"]))
        answer = json.loads(json.dumps(worker._answer(json.loads(json.dumps(request)))))
    if "error" in answer:
        kind, sentence = answer["error"]
        raise getattr(errors, kind)(sentence)
    return answer["result"]


@pytest.fixture
def aegis(
    here: FakeHub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """Run ``aegis ARGUMENTS`` in this process, with nothing on stdin."""
    return command_here(capfd, monkeypatch)
