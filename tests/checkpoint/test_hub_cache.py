"""Names on the hub, and its cache read without its library."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from fake_hub import GOLDEN, NAMES
from fault_tools import python_script
from hypothesis import given
from hypothesis import strategies as st

from aegis.checkpoint.hub_cache import HubName, Origin, hub_cache, is_revision, revisions_at

COMMIT = "0123456789abcdef" * 2 + "01234567"


def lay_out(cache: Path, repo: str, *names: str, commit: str = COMMIT, ref: str = "main") -> Path:
    """A model as the hub's library keeps it: blobs, links to them, and a ref."""
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (snapshot, home / "blobs", (home / "refs" / ref).parent):
        folder.mkdir(parents=True, exist_ok=True)
    (home / "refs" / ref).write_text(commit)
    for name in names:
        shutil.copy(GOLDEN / name, home / "blobs" / f"hash-of-{name}")
        (snapshot / name).symlink_to(f"../../blobs/hash-of-{name}")
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", "main"),
        ("mlx-community/Qwen3-30B-A3B-4bit", "mlx-community/Qwen3-30B-A3B-4bit", "main"),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/7", "org/name", "refs/pr/7"),
        (f"01-ai/Yi@{COMMIT}", "01-ai/Yi", COMMIT),
        ("and/or", "and/or", "main"),
    ],
)
def test_a_name_has_two_parts_and_may_have_a_revision(text: str, repo: str, revision: str) -> None:
    assert HubName.parse(text) == HubName(repo, revision)


@pytest.mark.parametrize(
    "text",
    [
        *("24/7", "3/4", "name", "a/b/c", "/org/name", "./name", "org/", "org/name@", "org/na me"),
        *("org/../name", "org/a..b", "org--x/name", "org/-name", "org/name.", "über/oder"),
        *("org/name@../x", "org/name@-x", "org/name@a//b", "org/name@.hidden", "Why and/or how?"),
        *("org/" + "x" * 97, "org/name.git", "org/name\n", "", "@", "org/name@/x"),
    ],
)
def test_what_the_hub_takes_for_no_name_is_none(text: str) -> None:
    assert HubName.parse(text) is None


@given(st.text(st.sampled_from("abZ09-_./@ \u00e9"), max_size=12))
def test_a_name_reads_back_as_it_is_written_and_stays_inside_the_cache(text: str) -> None:
    name = HubName.parse(text)
    if name is not None:
        assert HubName.parse(str(name)) == name
        assert is_revision(name.revision)
        inside = os.path.normpath(name.folder / "refs" / name.revision)
        assert Path(inside).is_relative_to(hub_cache() / name.folder.name / "refs")
        assert Origin.of(name.folder / "snapshots" / COMMIT) == Origin(name.repo, COMMIT)


def test_the_cache_is_where_the_hubs_library_has_it(tmp_path: Path) -> None:
    code = (
        "import importlib, os, json\n"
        "import huggingface_hub.constants as constants\n"
        "from aegis.checkpoint.hub_cache import hub_cache\n"
        "names = ['HF_HUB_CACHE', 'HUGGINGFACE_HUB_CACHE', 'HF_HOME', 'XDG_CACHE_HOME']\n"
        "for bits in range(16):\n"
        "    for i, name in enumerate(names):\n"
        "        os.environ.pop(name, None)\n"
        "        if bits >> i & 1: os.environ[name] = ['~/a', '$HOME/b', '~/c', '/d'][i]\n"
        "    importlib.reload(constants)\n"
        "    if str(hub_cache()) != constants.HF_HUB_CACHE: print(bits, hub_cache())\n"
    )
    done = python_script(code, env={"HOME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_whole_download_is_found_by_branch_and_by_commit(cache: Path) -> None:
    folder = lay_out(cache, "org/name", *NAMES)
    lay_out(cache, "org/name", ref="refs/pr/1")
    for text in ("org/name", f"org/name@{COMMIT}", "org/name@refs/pr/1"):
        name = HubName.parse(text)
        assert name is not None
        assert name.snapshot() == folder
    assert Origin.of(folder) == Origin("org/name", COMMIT)
    assert revisions_at(folder) == ["main", "refs/pr/1"]
    for text in ("org/other", "org/name@v2", "org/name@" + "f" * 40):
        name = HubName.parse(text)
        assert name is not None
        assert name.snapshot() is None


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_download_that_lacks_a_needed_file_is_none(cache: Path, lost: str) -> None:
    folder = lay_out(cache, "org/name", *NAMES)
    (cache / "models--org--name" / "blobs" / f"hash-of-{lost}").unlink()  # The link stays.
    assert HubName("org/name").snapshot() is None
    (folder / lost).unlink()
    assert HubName("org/name").snapshot() is None


def test_a_download_that_lacks_one_of_its_shards_is_none(cache: Path) -> None:
    folder = lay_out(cache, "org/name", *NAMES)
    index = folder / "model.safetensors.index.json"
    index.unlink()
    assert HubName("org/name").snapshot() == folder
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.x"}}))
    assert HubName("org/name").snapshot() is None
    index.write_text("{")
    assert HubName("org/name").snapshot() is None


@pytest.mark.parametrize("content", ["", "not a commit", "../../../etc", COMMIT + "0", "\x00"])
def test_a_ref_that_is_no_commit_leads_nowhere(cache: Path, content: str) -> None:
    lay_out(cache, "org/name", *NAMES)
    (cache / "models--org--name" / "refs" / "main").write_text(content)
    assert HubName("org/name").snapshot() is None


@pytest.mark.parametrize(
    "folder",
    ["models--org--name/snapshots/main", "org--name/snapshots/" + COMMIT, "snapshots/" + COMMIT],
)
def test_folders_that_only_look_alike_come_from_nowhere(tmp_path: Path, folder: str) -> None:
    assert Origin.of(tmp_path / folder) is None
