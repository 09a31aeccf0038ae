"""What makes a checkpoint this checkpoint, cheap enough to compute at every start."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.hub_cache import Origin
from aegis.checkpoint.pagecache import drop_pages, expect_random_reads
from aegis.checkpoint.source import Checkpoint
from aegis.errors import CheckpointError

EMBEDDED_NAME = "smolmoe-135m"

_SAMPLES = 16
_SAMPLE_NBYTES = 4096


def embedded_path() -> Path:
    """The checkpoint folder of the model that is installed with aegis."""
    import aegis.embedded

    return Path(aegis.embedded.__path__[0])


def model_name(path: Path) -> str:
    """What people call the model in a folder: ORG/NAME where the hub's cache keeps it, else the
    folder's name, or the embedded model's own."""
    resolved = path.resolve()
    if resolved == embedded_path().resolve():
        return EMBEDDED_NAME
    origin = Origin.of(resolved)
    return resolved.name if origin is None else origin.repo


def identity_of(checkpoint: Checkpoint, quantize: QuantSpec | None = None) -> str:
    """A hex digest over config, tensor places, file sizes, times, and samples of the data.

    It does not depend on where the folder lies. Times don't count for the embedded model, which
    every installation writes anew; of what the hub's cache keeps the commit says what the data is,
    but for config.json, which people change there. ``quantize``: what is made of it while it is
    converted.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if quantize is not None:
        return quantised_identity(identity_of(checkpoint), quantize)
    digest = hashlib.sha256()
    origin = Origin.of(checkpoint.path)
    if origin is None:
        digest.update((checkpoint.path / "config.json").read_bytes())
    else:
        digest.update(json.dumps(checkpoint.config.raw, sort_keys=True).encode())
        digest.update(f"{origin.repo} {origin.commit}\n".encode())
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.offset}\n".encode())
    if origin is not None:
        return digest.hexdigest()
    timed = checkpoint.path.resolve() != embedded_path().resolve()
    for file in checkpoint.files:
        try:
            _update(digest, file, timed)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def quantised_identity(identity: str, quantize: QuantSpec) -> str:
    """The identity of what is made of a plain checkpoint that has this one."""
    said = f"{identity}: {quantize.bits} bits in groups of {quantize.group_size}"
    return hashlib.sha256(said.encode()).hexdigest()


def _update(digest: hashlib._Hash, file: Path, timed: bool) -> None:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns * timed}\n".encode())
        expect_random_reads(fd)
        step = max(_SAMPLE_NBYTES, status.st_size // _SAMPLES)
        for offset in range(0, status.st_size, step):
            digest.update(_sample(fd, min(_SAMPLE_NBYTES, status.st_size - offset), offset))
        drop_pages(fd)
    finally:
        os.close(fd)


def _sample(fd: int, nbytes: int, offset: int) -> bytes:
    """A read may bring less than there is: then another one goes on."""
    data = b""
    while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), offset + len(data))):
        data += more
    return data
