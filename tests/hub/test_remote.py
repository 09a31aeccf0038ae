"""A model on the hub is described without its weights, and refused with one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import GOLDEN, NAMES, REPO, FakeHub, Repo, breaks_off

from aegis import Engine, plan
from aegis.checkpoint.hub_cache import HubName, hub_cache
from aegis.checkpoint.source import Checkpoint
from aegis.convert.cache import cache_folder, cached_store_path, hub_store
from aegis.convert.layout import layout_of_checkpoint
from aegis.errors import (
    AegisError,
    CheckpointError,
    HubError,
    PlanError,
    StoreError,
    TokenizerError,
)
from aegis.hub import remote, worker
from aegis.hub.remote import describe, download
from aegis.hub.sentences import hub_errors

NAME = HubName(REPO)
SMALL = {"context": 64, "backend": "reference"}


def described_here(name: HubName) -> dict[str, object]:
    """As the worker describes it, in this process."""
    with hub_errors(name):
        return worker.describe(name)


def test_a_description_is_that_of_the_files_and_reads_no_weights(hub: FakeHub) -> None:
    found = describe(NAME)
    there = Checkpoint.open(GOLDEN)
    assert found.config.raw == there.config.raw
    places = {name: (t.dtype, t.shape, t.offset, t.nbytes) for name, t in there.tensors.items()}
    assert {n: (t.dtype, t.shape, t.offset, t.nbytes) for n, t in found.tensors.items()} == places
    assert layout_of_checkpoint(found) == layout_of_checkpoint(GOLDEN)
    assert found.tokenizer_nbytes == (GOLDEN / "tokenizer.json").stat().st_size
    assert set(found.sizes) == set(NAMES)
    assert found.missing_nbytes == sum((GOLDEN / name).stat().st_size for name in NAMES)
    assert hub.sent["model.safetensors"] <= 100_000
    assert "tokenizer.json" not in hub.sent
    assert not hub_cache().exists()


def test_a_header_that_is_longer_than_usual_is_read_whole(
    here: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_FIRST_NBYTES", 100)
    header = int.from_bytes((GOLDEN / "model.safetensors").read_bytes()[:8], "little")
    found = described_here(NAME)
    assert isinstance(found["headers"], dict)
    assert len(found["headers"]["model.safetensors"]) == header
    assert here.sent["model.safetensors"] == 8 + header


def test_a_hub_that_knows_no_ranges_is_refused_before_it_sends_everything(here: FakeHub) -> None:
    repo = here.repos[REPO]
    repo.files["model.safetensors"] += bytes(50 << 20)
    from fake_hub import sends

    here.fault = sends(lambda data: data)
    with pytest.raises(HubError, match="does not serve ranges"):
        described_here(NAME)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"config.json": None}, CheckpointError, r"has no config.json, so it is no model"),
        ({"config.json": b"{"}, CheckpointError, r"config.json of org/tiny-moe is not valid JSON"),
        ({"config.json": b""}, CheckpointError, r"config.json of org/tiny-moe has 0 bytes"),
        ({"config.json": b'{"model_type": "bert"}'}, CheckpointError, r"'bert' is not supported"),
        ({"tokenizer.json": None}, TokenizerError, r"org/tiny-moe has no tokenizer.json; download"),
        ({"model.safetensors": None}, CheckpointError, r"model.safetensors is missing, though"),
        ({"model.safetensors": b"x" * 99}, CheckpointError, r"is not a whole safetensors file"),
        ({"model.safetensors.index.json": b"[]"}, CheckpointError, r"holds a list; expected"),
        ({"model.safetensors.index.json": b"{}"}, CheckpointError, r"has no weight_map"),
        (
            {"model.safetensors": None, "model.safetensors.index.json": None},
            CheckpointError,
            r"holds no model\*.safetensors file",
        ),
    ],
)
def test_what_is_no_model_of_ours_is_refused_before_any_weights(
    here: FakeHub, change: dict[str, bytes | None], error: type[AegisError], match: str
) -> None:
    files = here.repos[REPO].files
    files |= {name: data for name, data in change.items() if data is not None}
    for name in (name for name, data in change.items() if data is None):
        del files[name]
    with pytest.raises(error, match=match):
        remote.RemoteCheckpoint.described(NAME, described_here(NAME))
    if "config.json" in change:
        assert set(here.sent) <= {"", "config.json"}


def test_what_tokenizer_json_is_made_from_stands_for_it(here: FakeHub) -> None:
    files = here.repos[REPO].files
    del files["tokenizer.json"]
    config = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    files |= {"tiktoken.model": bytes(1000), "tokenizer_config.json": json.dumps(config).encode()}
    files["tokenization_kimi.py"] = b"raise AssertionError"
    found = remote.RemoteCheckpoint.described(NAME, described_here(NAME))
    assert found.tokenizer_nbytes == 5000
    assert set(found.sizes) == {*NAMES, "tiktoken.model"} - {"tokenizer.json"}
    files["tokenizer_config.json"] = b"{"
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config.json of org/tiny-moe is not valid"
    ):
        described_here(NAME)
    files["tokenizer_config.json"] = b"{}"
    match = r"has no tokenizer.json \(aegis makes it from tiktoken.model for .* names none\); down"
    with pytest.raises(TokenizerError, match=match):
        remote.RemoteCheckpoint.described(NAME, described_here(NAME))
    assert "tiktoken.model" not in here.sent


def test_errors_of_the_worker_are_raised_here_with_their_type(hub: FakeHub) -> None:
    hub.repos[REPO].files["config.json"] = b'{"model_type": "bert"}'
    with pytest.raises(CheckpointError, match="'bert' is not supported"):
        describe(NAME)


@pytest.mark.parametrize(
    ("fields", "token", "match"),
    [
        ({"gated": True}, None, r"is gated: accept its terms at http.*/org/tiny-moe, and log in"),
        ({"gated": True}, "hf_other", r"is gated: accept its terms"),
        ({"hidden": True, "token": "hf_right"}, None, r"no folder here and no model on .* log in"),
        ({"hidden": True, "token": "hf_right"}, "hf_other", r"no folder here and no model on"),
    ],
)
def test_what_is_not_for_everybody_says_how_to_get_it(
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object],
    token: str | None,
    match: str,
) -> None:
    hub.repos[REPO] = Repo(hub.repos[REPO].files, **fields)  # type: ignore[arg-type]
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=match):
        describe(NAME)


def test_the_saved_token_opens_what_is_hidden(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[REPO] = Repo(hub.repos[REPO].files, hidden=True, gated=True, token="hf_right")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_right")
    assert download(describe(NAME), 0, cache_folder()) == NAME.snapshot()
    assert {token for _, path, token in hub.asked if REPO in path} == {"hf_right"}


def test_a_revision_that_there_is_not_is_named(here: FakeHub) -> None:
    with pytest.raises(HubError, match=r"has no revision v9; give a branch, a tag or a commit"):
        described_here(HubName(REPO, "v9"))


def test_a_hub_that_is_not_there_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"127.0.0.1:9 cannot be reached \(Connection refused\)"):
        describe(NAME)


def test_offline_nothing_is_asked(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=r"is not in the cache, and HF_HUB_OFFLINE forbids"):
        describe(NAME)
    assert hub.asked == []


def test_a_download_is_complete_and_only_what_is_needed(hub: FakeHub) -> None:
    told: list[tuple[int, int, str]] = []
    path = download(describe(NAME), 0, cache_folder(), lambda *now: told.append(now))
    assert NAME.snapshot() == path
    assert {file.name for file in path.iterdir()} == set(NAMES)
    for name in NAMES:
        assert (path / name).read_bytes() == (GOLDEN / name).read_bytes()
    total = sum((GOLDEN / name).stat().st_size for name in NAMES)
    assert told[0][:2] == (0, total)
    assert told[-1][:2] == (total, total)
    assert "downloading org/tiny-moe, 636.3 KiB, into" in told[0][2]
    assert hub_cache().as_posix() in told[0][2]


def test_where_it_does_not_fit_nothing_is_downloaded(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = describe(NAME)
    monkeypatch.setattr(remote, "free_nbytes", lambda folder: 1 << 20)
    with pytest.raises(
        StoreError, match=r"has 1 MiB free, but org/tiny-moe takes 1.1 MiB there; make room, or set"
    ):
        download(found, 500_000, cache_folder())  # Each of both would fit alone.
    assert "tokenizer.json" not in hub.sent
    download(found, 300_000, cache_folder())


def test_what_was_changed_on_the_hub_meanwhile_is_downloaded_as_it_was(hub: FakeHub) -> None:
    found = describe(NAME)
    old = hub.repos[REPO].commit
    hub.repos[REPO].refs[old], hub.repos[REPO].commit = old, "b" * 40
    path = download(found, 0, cache_folder())
    assert path.name == old
    assert HubName(REPO, old).snapshot() == path
    assert NAME.snapshot() is None  # The branch is elsewhere now.


def test_a_worker_ends_with_the_process_that_asked(hub: FakeHub) -> None:
    """However that dies."""
    code = (
        "import os, sys\n"
        "from aegis.child import worker\n"
        "with worker('aegis.hub.worker', [sys.argv[1]]) as process:\n"
        "    print(process.pid, flush=True)\n"
        "    os.read(0, 1)\n"
    )
    stuck = {"repo": REPO, "revision": "main"}
    hub.fault = lambda handler, file: bool(handler.rfile.read(1))  # It never answers.
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(stuck)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        descriptor = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
        parent.kill()
    if descriptor is None:
        pytest.skip("a process that is nobody's child cannot be waited for here")
    import select

    assert select.select([descriptor], [], [], 300)[0]
    os.close(descriptor)


def test_a_worker_that_is_killed_is_told_of(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(handler: object, file: str) -> bool:
        for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        return True

    if not Path("/proc/self/task").exists():
        pytest.skip("children cannot be found here")
    hub.fault = kill
    with pytest.raises(HubError, match=r"asks the hub for .* was ended by SIGKILL; run the"):
        describe(NAME)


def test_a_model_of_the_hub_is_planned_from_its_headers(hub: FakeHub) -> None:
    there = plan(GOLDEN, cap="1GiB", **SMALL).to_json()
    here = plan(REPO, cap="1GiB", **SMALL).to_json()
    assert {**here, "free_nbytes": 0} == {**there, "free_nbytes": 0}
    assert set(hub.sent) == {"", "config.json", "model.safetensors", "model.safetensors.index.json"}
    assert not cache_folder().exists()
    assert not hub_cache().exists()


def test_a_plan_that_does_not_fit_downloads_nothing(hub: FakeHub) -> None:
    with pytest.raises(PlanError):
        Engine.open(REPO, cap="1MiB", **SMALL)
    assert not hub_cache().exists()


def test_a_model_is_downloaded_and_converted_once_then_needs_no_hub(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fault = breaks_off(90_000, 3)
    converted: list[int] = []
    with Engine.open(REPO, cap="1GiB", progress=lambda d, t: converted.append(d), **SMALL) as first:
        assert first.name == REPO
        logits = first.score([1, 2, 3])
        source = first.store.manifest.source
    assert converted
    assert (source["repo"], source["commit"]) == (REPO, "a" * 40)
    assert source["revisions"] == ["main"]
    monkeypatch.setattr(remote, "_ask", lambda *request: pytest.fail("the hub was asked"))
    converted.clear()
    for _ in range(2):
        with Engine.open(REPO, cap="1GiB", progress=converted.append, **SMALL) as again:
            assert again.name == REPO
            assert (again.score([1, 2, 3]) == logits).all()
        # The download is not needed any more.
        import shutil

        shutil.rmtree(hub_cache(), ignore_errors=True)
    assert not converted


def test_a_tag_of_a_commit_that_is_here_needs_no_download(hub: FakeHub) -> None:
    Engine.open(REPO, cap="1GiB", **SMALL).close()
    hub.repos[REPO].refs["v1"] = "a" * 40
    hub.sent.clear()
    with Engine.open(f"{REPO}@v1", cap="1GiB", **SMALL) as engine:
        assert engine.store.path == hub_store(NAME, "il16")
    assert hub.sent["model.safetensors"] <= 100_000


def test_an_edited_config_of_the_download_makes_another_store(hub: FakeHub) -> None:
    with Engine.open(REPO, cap="1GiB", **SMALL) as engine:
        before = engine.store.path
    snapshot = NAME.snapshot()
    assert snapshot is not None
    config = json.loads((snapshot / "config.json").read_text()) | {"rope_theta": 5e5}
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text(json.dumps(config))
    assert hub_store(NAME, "il16") is None
    assert cached_store_path(snapshot) != before


def test_a_folder_wins_over_a_name_on_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, tmp_path / REPO)
    assert plan(REPO, cap="1GiB", **SMALL).feasible
    assert hub.asked == []
