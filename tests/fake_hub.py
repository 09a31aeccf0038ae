"""A hub on loopback that serves a few repositories, and fails as the real one does."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent / "goldens" / "qwen2_moe"
REPO = "org/tiny-moe"
NAMES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""The model that tests serve, and those of its files that are wanted."""

LARGE = (".safetensors", "tokenizer.json")
"""What the hub keeps outside of Git, with its SHA-256 as the hash."""

Fault = Callable[["Handler", str], bool]
"""Called with a GET's handler and file; True: it has answered (or broken off) instead."""


@dataclass
class Repo:
    """One model at one commit."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    refs: dict[str, str] = field(default_factory=dict)
    """Commits by branch or tag; ``main`` is there anyway."""
    token: str | None = None
    """What files are shown for; None: to everybody."""
    gated: bool = False
    hidden: bool = False

    def commit_of(self, revision: str) -> str | None:
        refs = {"main": self.commit, **self.refs}
        return revision if revision in refs.values() else refs.get(revision)

    def etag(self, name: str) -> str:
        data = self.files[name]
        if name.endswith(LARGE):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @classmethod
    def of(cls, folder: Path, **fields: object) -> Repo:
        """Every file of a folder."""
        paths = (path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return cls(files, **fields)  # type: ignore[arg-type]


class FakeHub(ThreadingHTTPServer):
    """Repositories by ORG/NAME, and what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.fault: Fault | None = None
        self.asked: list[tuple[str, str, str | None]] = []
        """(method, path, token) of every request."""
        self.sent: dict[str, int] = {}
        """Bytes of each file that went out."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is what many tests are about."""


class Handler(BaseHTTPRequestHandler):
    """/api/models/ORG/NAME[/revision/R] and /ORG/NAME/resolve/R/FILE."""

    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path, self.token))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repo = self.server.repos.get(match[1]) if match else None
        if match is None or repo is None or (repo.hidden and self.token != repo.token):
            return self.refuse(401 if self.token is None else 404, "RepoNotFound")
        commit = repo.commit_of((match[2] or "main").replace("%2F", "/"))
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        if api:
            return self._describe(match[1], repo, commit)
        return self._serve(repo, commit, match[3])

    def refuse(self, status: int, code: str | None = None, message: str = "no") -> None:
        """An error as the hub tells it."""
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def part(self, file: str) -> bytes:
        """What was asked for of a file."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-")
        assert match is not None
        data = self._repo.files[file]
        return data[int(match[1]) : int(match[2] or len(data) - 1) + 1]

    def begin(self, nbytes: int) -> None:
        """The head of an answer that promises so many bytes."""
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(nbytes))
        self.end_headers()

    def whole(self, file: str, change: Callable[[bytes], bytes]) -> None:
        """All of a file, changed."""
        self._send(200, change(self._repo.files[file]), {}, file)

    @property
    def _repo(self) -> Repo:
        return self.server.repos["/".join(self.path.split("/")[1:3])]

    def _describe(self, name: str, repo: Repo, commit: str) -> None:
        siblings = []
        for file, data in repo.files.items():
            entry: dict[str, object] = {"rfilename": file, "size": len(data), "blobId": "b" * 40}
            if file.endswith(LARGE):
                entry["lfs"] = {"sha256": repo.etag(file), "size": len(data), "pointerSize": 1}
            else:
                entry["blobId"] = repo.etag(file)
            siblings.append(entry)
        found = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": []}
        data = json.dumps({**found, "siblings": siblings, "downloads": 0, "likes": 0}).encode()
        self._send(200, data, {"Content-Type": "application/json"})

    def _serve(self, repo: Repo, commit: str, file: str) -> None:
        if repo.gated and (self.token is None or self.token != repo.token):
            return self.refuse(401 if self.token is None else 403, "GatedRepo")
        if file not in repo.files:
            return self.refuse(404, "EntryNotFound")
        if self.command == "GET" and self.server.fault and self.server.fault(self, file):
            return None
        data = repo.files[file]
        headers = {"ETag": f'"{repo.etag(file)}"', "X-Repo-Commit": commit}
        headers["Accept-Ranges"] = "bytes"
        if file.endswith(LARGE):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(data))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            return self._send(200, data, headers, file)
        start, stop = int(wanted[1]), int(wanted[2] or len(data) - 1) + 1
        if start >= len(data):
            return self.refuse(416)
        part = data[start:stop]
        headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        return self._send(206, part, headers, file)

    def _send(self, status: int, data: bytes, headers: dict[str, str], file: str = "") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
            self.server.sent[file] = self.server.sent.get(file, 0) + len(data)


def breaks_off(after: int, times: int, file: str = "model.safetensors") -> Fault:
    """The first ``times`` answers end after so many bytes, though more were promised."""
    left = [times]

    def fault(handler: Handler, asked: str) -> bool:
        if asked != file or not left[0]:
            return False
        left[0] -= 1
        data = handler.part(asked)
        handler.begin(len(data))
        handler.wfile.write(data[:after])
        handler.server.sent[asked] = handler.server.sent.get(asked, 0) + after
        handler.close_connection = True
        return True

    return fault


def answers(status: int, times: int, file: str = "model.safetensors") -> Fault:
    """The first ``times`` answers are an error."""
    left = [times]

    def fault(handler: Handler, asked: str) -> bool:
        if asked != file or not left[0]:
            return False
        left[0] -= 1
        handler.refuse(status)
        return True

    return fault


def sends(change: Callable[[bytes], bytes], file: str = "model.safetensors") -> Fault:
    """The whole file is sent, changed, whatever range was asked for."""

    def fault(handler: Handler, asked: str) -> bool:
        if asked != file:
            return False
        handler.whole(asked, change)
        return True

    return fault


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers until the end of a ``with``."""
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
