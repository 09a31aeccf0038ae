"""What a run's routers chose and would have guessed, in a compact file.

The file is ``AEGISTRC``, the length of a JSON object as a little-endian uint32, that object, and
the ids: chosen [tokens, layers, K] ascending, then for one and for two layers ahead the experts
guessed for each layer, best first [tokens, layers - ahead, width]. Ids are bytes where there are no
more than 256 experts per layer, else uint16. The object says how many of each there are and holds a
checksum of the ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aegis.tiers.errors import TraceError

Ids = NDArray[np.integer[Any]]

AHEAD = (1, 2)
"""How many layers ahead guesses are recorded."""

_MAGIC = b"AEGISTRC"
_VERSION = 1
_MOST_HEADER_NBYTES = 1 << 20
_KEYS = {
    "version": int,
    "model": str,
    "num_layers": int,
    "num_experts": int,
    "num_experts_per_tok": int,
    "guess_width": int,
    "tokens": int,
    "ids_sha256": str,
    "crc32": int,
}


def ids_digest(ids: Sequence[int]) -> str:
    """What tells one sequence of token ids from another: a hex SHA-256 over int32 numbers."""
    return hashlib.sha256(array("i", ids).tobytes()).hexdigest()


@dataclass(frozen=True)
class RoutingTrace:
    """The routing of a sequence of tokens through every MoE layer."""

    model: str
    num_experts: int
    ids_sha256: str
    """``ids_digest`` of the tokens."""
    chosen: Ids
    """[tokens, layers, K], ascending."""
    guesses: tuple[Ids, ...]
    """By how many layers ahead, one first: [tokens, layers - ahead, width], best first. Entry l is
    for layer l + ahead, from the hidden state that layer l's router sees."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, layers, experts per token."""
        tokens, layers, per_token = self.chosen.shape
        return tokens, layers, per_token

    def twice(self) -> RoutingTrace:
        """The same tokens again behind themselves: what slots hold then does not come of their
        having been empty."""
        guesses = tuple(np.concatenate([part, part]) for part in self.guesses)
        return replace(self, chosen=np.concatenate([self.chosen, self.chosen]), guesses=guesses)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        tokens, layers, per_token = self.shape
        data = b"".join(part.astype(_dtype(self.num_experts)).tobytes() for part in self._parts())
        head = {
            "version": _VERSION,
            "model": self.model,
            "num_layers": layers,
            "num_experts": self.num_experts,
            "num_experts_per_tok": per_token,
            "guess_width": self.guesses[0].shape[-1],
            "tokens": tokens,
            "ids_sha256": self.ids_sha256,
            "crc32": zlib.crc32(data),
        }
        said = json.dumps(head).encode()
        target = Path(path)
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with beside.open("xb") as file:
                file.write(_MAGIC + len(said).to_bytes(4, "little") + said + data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    def _parts(self) -> tuple[Ids, ...]:
        return (self.chosen, *self.guesses)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingTrace:
        """Read a file.

        Raises:
            TraceError: it is missing, damaged, of another version or no trace.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise TraceError(f"{path} cannot be read ({error.strerror}); name a trace") from None
        if not data.startswith(_MAGIC):
            raise TraceError(f"{path} is not a trace of aegis; make one with 'aegis trace MODEL'")
        try:
            return _decoded(data)
        except ValueError as error:
            raise TraceError(f"{path} is damaged ({error}); record it again") from None


def _decoded(data: bytes) -> RoutingTrace:
    start = len(_MAGIC) + 4
    size = int.from_bytes(data[len(_MAGIC) : start], "little")
    if not 0 < size <= min(_MOST_HEADER_NBYTES, len(data) - start):
        raise ValueError("it ends early")
    head = json.loads(data[start : start + size])
    _check(head)
    ids = memoryview(data)[start + size :]
    dtype = _dtype(head["num_experts"])
    tokens, layers = head["tokens"], head["num_layers"]
    shapes = [(tokens, layers, head["num_experts_per_tok"])]
    shapes += [(tokens, max(layers - ahead, 0), head["guess_width"]) for ahead in AHEAD]
    counts = [a * b * c for a, b, c in shapes]
    if len(ids) != sum(counts) * dtype.itemsize:
        raise ValueError("its length is not what it says")
    if zlib.crc32(ids) != head["crc32"]:
        raise ValueError("checksum mismatch")
    flat = np.frombuffer(ids, dtype)
    if flat.size and int(flat.max()) >= head["num_experts"]:
        raise ValueError("it names an expert that there is not")
    starts = np.cumsum([0, *counts])
    chosen, *guesses = (
        flat[starts[i] : starts[i + 1]].reshape(shape) for i, shape in enumerate(shapes)
    )
    return RoutingTrace(
        head["model"], head["num_experts"], head["ids_sha256"], chosen, tuple(guesses)
    )


def _check(head: Any) -> None:
    if not isinstance(head, dict):
        raise ValueError("its description is no object")
    version = head.get("version")
    if type(version) is int and version > _VERSION:
        raise ValueError(f"its version is {version}, this aegis reads {_VERSION}")
    for key, kind in _KEYS.items():
        value = head.get(key)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 40):
            raise ValueError(f"its {key} is missing or wrong")
    sizes = head["num_layers"], head["num_experts"], head["num_experts_per_tok"]
    if not all(1 <= size <= 1 << 16 for size in sizes) or sizes[2] > sizes[1]:
        raise ValueError("its sizes are of no model")


def _dtype(num_experts: int) -> np.dtype[Any]:
    return np.dtype(np.uint8 if num_experts <= 256 else "<u2")


class TraceRecorder:
    """Collects a trace, one layer of one token after the other."""

    def __init__(self, num_layers: int, num_experts: int, width: int) -> None:
        """width: of every guess; ids that a shorter ranking lacks are those of its last."""
        self.num_experts, self.width = num_experts, width
        self._num_layers = num_layers
        self._kept = [bytearray() for _ in range(1 + len(AHEAD))]
        """Not lists of arrays: these would take many times what is recorded."""

    def guessed(self, ahead: int, ranked: NDArray[np.integer[Any]]) -> None:
        """A ranking of the experts of the layer ``ahead`` of the current one."""
        best = np.resize(ranked[: self.width], self.width) if len(ranked) else ranked
        self._kept[ahead] += best.astype(_dtype(self.num_experts)).tobytes()

    def chose(self, experts: NDArray[np.integer[Any]]) -> None:
        """What the router of the current layer chose [K]."""
        self._kept[0] += experts.astype(_dtype(self.num_experts)).tobytes()

    def trace(self, model: str, ids: Sequence[int]) -> RoutingTrace:
        """All of it; ``ids``: the tokens that went through."""
        tokens, layers = len(ids), self._num_layers
        depths = [layers, *(max(layers - ahead, 0) for ahead in AHEAD)]
        parts = []
        for kept, depth in zip(self._kept, depths, strict=True):
            flat = np.frombuffer(kept, _dtype(self.num_experts))
            width = flat.size // (tokens * depth) if tokens * depth else self.width
            parts.append(flat.reshape(tokens, depth, width))
        return RoutingTrace(model, self.num_experts, ids_digest(ids), parts[0], tuple(parts[1:]))
