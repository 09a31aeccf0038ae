"""Downloads go on where they were cut off, and what comes is what the hub says it is."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_hub import GOLDEN, NAMES, REPO, FakeHub, Handler, answers, breaks_off, sends

from aegis.checkpoint.hub_cache import HubName
from aegis.errors import AegisError, HubError, StoreError
from aegis.hub.sentences import hub_errors
from aegis.hub.transfer import PAUSES_S, Repository

WEIGHTS = "model.safetensors"
DATA = (GOLDEN / WEIGHTS).read_bytes()
NAME = HubName(REPO)


def fetch(hub: FakeHub) -> tuple[Path, list[int]]:
    """The file in the snapshot, and all numbers of bytes that were reported."""
    repo, told = hub.repos[REPO], []
    with hub_errors(NAME):
        Repository(REPO, repo.commit).keep(WEIGHTS, len(DATA), repo.etag(WEIGHTS), told.append)
    return NAME.folder / "snapshots" / repo.commit / WEIGHTS, told


def partial(hub: FakeHub) -> Path:
    return NAME.folder / "blobs" / f"{hub.repos[REPO].etag(WEIGHTS)}.incomplete"


def test_a_file_lands_in_the_snapshot_as_the_hubs_own_library_puts_it(here: FakeHub) -> None:
    path, told = fetch(here)
    assert path.read_bytes() == DATA
    assert path.resolve() == NAME.folder / "blobs" / here.repos[REPO].etag(WEIGHTS)
    assert sum(told) == len(DATA)
    assert not partial(here).exists()
    here.sent.clear()
    assert sum(fetch(here)[1]) == len(DATA)
    assert here.sent == {}


@pytest.mark.parametrize(
    "fault", [breaks_off(100_000, 5), breaks_off(0, 5), answers(503, 5), answers(429, 1)]
)
def test_a_connection_that_breaks_off_is_gone_on_with(
    here: FakeHub, fault: Callable[[Handler, str], bool]
) -> None:
    here.fault = fault
    path, told = fetch(here)
    assert path.read_bytes() == DATA
    assert sum(told) == len(DATA)
    # Older versions of the hub's library lose the last piece of what has come, 64 KiB at most.
    assert here.sent[WEIGHTS] <= len(DATA) + 5 * (64 << 10)


def test_what_another_attempt_brought_is_not_downloaded_again(here: FakeHub) -> None:
    partial(here).parent.mkdir(parents=True)
    partial(here).write_bytes(DATA[:5000])
    path, told = fetch(here)
    assert path.read_bytes() == DATA
    assert (here.sent[WEIGHTS], sum(told)) == (len(DATA) - 5000, len(DATA))


@pytest.mark.parametrize("left", [b"x" * 5000, b"x" * (len(DATA) + 1), DATA])
def test_what_another_attempt_left_may_be_wrong_too_long_or_whole(
    here: FakeHub, left: bytes
) -> None:
    partial(here).parent.mkdir(parents=True)
    partial(here).write_bytes(left)
    if left == b"x" * 5000:
        with pytest.raises(HubError, match=r"was damaged on its way .* download it again"):
            fetch(here)
    assert fetch(here)[0].read_bytes() == DATA


def test_a_server_that_knows_no_ranges_sends_all_again(here: FakeHub) -> None:
    partial(here).parent.mkdir(parents=True)
    partial(here).write_bytes(b"x" * 5000)
    here.fault = sends(lambda data: data)
    path, told = fetch(here)
    assert path.read_bytes() == DATA
    assert sum(told) == len(DATA)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), r"was damaged on its way"),
        (lambda data: data + b"more", r"sends more than the \d+ bytes"),
        (lambda data: b"", r"sends nothing of"),
    ],
)
def test_what_is_not_the_file_never_gets_its_name(
    here: FakeHub, change: Callable[[bytes], bytes], match: str
) -> None:
    here.fault = sends(change)
    with pytest.raises(HubError, match=match):
        fetch(here)
    here.fault = None
    assert fetch(here)[0].read_bytes() == DATA


def test_a_hub_that_only_fails_is_given_up_and_what_came_stays(here: FakeHub) -> None:
    here.fault = breaks_off(100_000, 1)
    fault = answers(500, 100)
    broken = here.fault
    here.fault = lambda handler, file: broken(handler, file) or fault(handler, file)
    with pytest.raises(HubError, match=r"answers with an error \(500\); run the command again"):
        fetch(here)
    kept = partial(here).read_bytes()
    assert len(kept) >= 64 << 10
    assert DATA.startswith(kept)
    asked = [path for method, path, _ in here.asked if method == "GET"]
    assert len(asked) == 1 + len(PAUSES_S)


def test_slow_bytes_are_waited_for(here: FakeHub) -> None:
    def trickle(handler: Handler, file: str) -> bool:
        data = handler.part(file)
        handler.begin(len(data))
        for start in range(0, len(data), 4096):
            handler.wfile.write(data[start : start + 4096])
            handler.wfile.flush()
        return True

    here.fault = trickle
    assert fetch(here)[0].read_bytes() == DATA


def test_the_token_goes_to_the_hub(here: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(here)
    assert {token for _, _, token in here.asked} == {"hf_secret"}


def test_without_a_token_none_is_sent(here: FakeHub) -> None:
    fetch(here)
    assert {token for _, _, token in here.asked} == {None}


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ("pwrite", errno.ENOSPC, r"the disk of .* is full; make room or set HF_HOME"),
        ("fsync", errno.EDQUOT, r"your quota .* is used up; make room or set HF_HOME"),
        ("ftruncate", errno.EIO, r"writing to .* failed: Input/output error"),
    ],
)
def test_a_disk_that_refuses_is_named(
    here: FakeHub, monkeypatch: pytest.MonkeyPatch, call: str, error: int, match: str
) -> None:
    def failing(*arguments: Any) -> None:
        raise OSError(error, os.strerror(error))

    partial(here).parent.mkdir(parents=True)
    partial(here).write_bytes(b"x" * (len(DATA) + 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(StoreError, match=match):
            fetch(here)
    assert fetch(here)[0].read_bytes() == DATA


def test_a_cache_that_is_in_the_way_is_named(here: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "hub").touch()
    with pytest.raises(StoreError, match=r"/hf/hub failed: (Not a directory|File exists)"):
        fetch(here)


def test_two_that_want_the_same_file_download_it_once(here: FakeHub) -> None:
    first = threading.Event()

    def wait(handler: Handler, file: str) -> bool:
        first.set()
        return False

    here.fault = wait
    threads = [threading.Thread(target=fetch, args=(here,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert here.sent[WEIGHTS] == len(DATA)


@pytest.mark.parametrize("name", NAMES)
def test_every_hash_that_the_hub_gives_is_checked(here: FakeHub, name: str) -> None:
    """SHA-256 of what lies outside of Git, and Git's own of what lies in it."""
    repo = here.repos[REPO]
    size = len(repo.files[name])
    Repository(REPO, repo.commit).keep(name, size, repo.etag(name), lambda nbytes: None)
    repo.files[name] = bytes(size)
    repository = Repository(REPO, "c" * 40)
    repo.refs["c" * 40] = "c" * 40
    with pytest.raises(AegisError, match="was damaged on its way"):
        repository.keep(name, size, "0" * len(repo.etag(name)), lambda nbytes: None)
