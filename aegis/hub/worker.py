"""A process of its own that talks to the hub: ``python -m aegis.hub.worker REQUEST``.

Prints lines of JSON: ``progress``, and at last ``result`` or ``error``. It ends at once on any
signal: what was downloaded so far stays.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.checkpoint.config import COPIED_FILES, ModelConfig
from aegis.checkpoint.hub_cache import HubName
from aegis.checkpoint.plainfile import MAX_JSON_NBYTES, FileDamageError, parse_object
from aegis.checkpoint.remote import TEXT
from aegis.checkpoint.safetensors import MAX_HEADER_NBYTES, header_nbytes
from aegis.checkpoint.source import INDEX, shard_names
from aegis.checkpoint.vocabulary import TOKENIZER_CONFIG, TOKENIZER_JSON
from aegis.child import die_with_parent
from aegis.errors import AegisError, CheckpointError, HubError
from aegis.models import family

if TYPE_CHECKING:
    from aegis.hub.transfer import Repository

CONNECTIONS = 4
_FIRST_NBYTES = 100_000
"""Of a file with tensors: nearly every header is in it."""
_STEP_S = 0.1
"""Between two lines of progress."""


def describe(name: HubName) -> dict[str, Any]:
    """What a plan needs of a model on the hub: config, index, headers, and the sizes of files.

    Raises:
        AegisError: it is none that aegis can run, by its config.json; nothing else was read then.
    """
    from huggingface_hub import HfApi

    from aegis.hub.transfer import Repository

    info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    if info.sha is None:
        raise HubError(f"the hub does not say which commit {name} is; try again later")
    files = {
        file.rfilename: (file.size or 0, file.blob_id if file.lfs is None else file.lfs.sha256)
        for file in info.siblings or ()
    }
    if "config.json" not in files:
        raise CheckpointError(
            f"{name} has no config.json, so it is no model that aegis reads (GGUF files are not"
            " read either); choose a repository with safetensors"
        )
    repository = Repository(name.repo, info.sha)
    config = _read_json(repository, files, "config.json")
    known = ModelConfig(_object(name, "config.json", config), f"config.json of {name}")
    family(known.model_type).shape(known)
    index = _read_json(repository, files, INDEX) if INDEX in files else None
    content = None if index is None else _object(name, INDEX, index)
    tokenizer = None
    if TOKENIZER_JSON not in files and TOKENIZER_CONFIG in files:  # Says what it is made from.
        tokenizer = _read_json(repository, files, TOKENIZER_CONFIG)
        _object(name, TOKENIZER_CONFIG, tokenizer)
    shards = shard_names(Path(name.repo), content, files)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        headers = pool.map(lambda shard: _read_header(repository, shard, files[shard][0]), shards)
        found = {shard: _text(header) for shard, header in zip(shards, headers, strict=True)}
    kept = {file: files[file] for file in (*COPIED_FILES, INDEX, *shards) if file in files}
    return {
        "commit": info.sha,
        "files": kept,
        "config": _text(config),
        "index": None if index is None else _text(index),
        "tokenizer": None if tokenizer is None else _text(tokenizer),
        "headers": found,
    }


def _text(data: bytes) -> str:
    return data.decode(TEXT)


def _object(name: HubName, file: str, data: bytes) -> dict[str, Any]:
    try:
        return parse_object(data)
    except FileDamageError as error:
        raise CheckpointError(f"{file} of {name} {error}; tell its publisher") from error


def _read_json(
    repository: Repository, files: Mapping[str, tuple[int, str | None]], file: str
) -> bytes:
    size, _ = files[file]
    if not 0 < size <= MAX_JSON_NBYTES:
        raise CheckpointError(
            f"{file} of {repository.repo} has {size} bytes, which no such file has; tell its"
            " publisher"
        )
    return repository.read(file, 0, size)


def _read_header(repository: Repository, file: str, size: int) -> bytes:
    """The header of a file with tensors, without its length."""
    data = repository.read(file, 0, min(size, _FIRST_NBYTES))
    length = header_nbytes(Path(repository.repo, file), size, data[:8])
    if length > MAX_HEADER_NBYTES:
        raise CheckpointError(
            f"{repository.repo}/{file} has a header of {length} bytes, which none has; tell its"
            " publisher"
        )
    missing = 8 + length - len(data)
    if missing > 0:
        data += repository.read(file, len(data), missing)
    return data[8 : 8 + length]


def download(name: HubName, commit: str, files: Mapping[str, tuple[int, str]]) -> None:
    """Put files into the hub's cache, small ones first; at last note what the revision means."""
    from aegis.hub.transfer import Repository

    repository = Repository(name.repo, commit)
    shards = [file for file in files if file.endswith(".safetensors")]
    progress = _Progress(sum(size for size, _ in files.values()))
    for file in files.keys() - set(shards):
        repository.keep_small(file)
        progress(files[file][0])
    pool = ThreadPoolExecutor(CONNECTIONS)
    jobs = [pool.submit(repository.keep, shard, *files[shard], progress) for shard in shards]
    for job in as_completed(jobs):
        job.result()  # Its failure ends this process, and the others' work with it.
    repository.keep_small("config.json", name.revision)


class _Progress:
    """Counts bytes, from several threads."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._lock, self._told = threading.Lock(), 0.0

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._told >= _STEP_S or self._done >= self._total:
                self._told = now
                _tell({"progress": [self._done, self._total]})


def _tell(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    name = HubName(request["repo"], request["revision"])
    try:
        from aegis.hub.sentences import hub_errors

        with hub_errors(name):
            if "files" in request:
                download(name, request["commit"], request["files"])
                return {"result": None}
            return {"result": describe(name)}
    except AegisError as error:
        return {"error": [type(error).__name__, str(error)]}
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return {"error": ["HubError", f"asking the hub for {name} failed: {said}"]}


def main() -> None:
    """Answer the request of the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()
    _tell(_answer(json.loads(sys.argv[1])))
    os._exit(0)  # Threads that still download are not waited for.


if __name__ == "__main__":
    main()
