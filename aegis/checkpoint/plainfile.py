"""Small files of a model folder: regular, bounded, and JSON that means one thing only.

Nothing here trusts a file: a pipe would never end, a device neither, and a few MiB of ``[],[],``
make Python objects of some hundred. What is wrong is a ``FileDamageError``, whose text completes a
sentence that begins with the file's name.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from aegis.checkpoint.pagecache import drop_pages
from aegis.errors import shown as shown

MAX_JSON_NBYTES = 32 << 20
"""The index of the largest models has 15 MB."""

MAX_JSON_PARTS = 1 << 20
"""Values and keys, which is what parsing takes memory for; 90,000 tensors have as many."""

_SEAL = b'{"crc32":"%08x",'
_SEAL_NBYTES = len(_SEAL % 0)


class FileDamageError(ValueError):
    """What is wrong with a file: the end of a sentence that begins with its name."""

    def about(self, path: Path, remedy: str = "download it again") -> str:
        """The whole sentence with what to do; a file that may not be read need not be damaged."""
        if isinstance(self.__cause__, PermissionError):
            remedy = "give yourself the right to read it (chmod)"
        return f"{path} {self}; {remedy}"


def shown_name(name: str) -> str:
    """A name from a file as a message may show it."""
    return name if name.isprintable() and len(name) <= 200 else shown(name)


def regular_nbytes(path: Path) -> int:
    """The size of a regular file.

    Raises:
        FileNotFoundError: there is none.
        FileDamageError: it is something else, or cannot be looked at.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(error) from error
    if stat.S_ISDIR(status.st_mode):
        raise FileDamageError("is a directory; expected a file")
    if not stat.S_ISREG(status.st_mode):
        raise FileDamageError("is not a regular file; expected one")
    return status.st_size


def read_regular(path: Path, limit_nbytes: int, offset: int = 0, nbytes: int = -1) -> bytes:
    """All of a regular file, or ``nbytes`` at ``offset``; at most ``limit_nbytes`` are read.

    Fewer bytes than asked for come where the file ends.

    Raises:
        FileNotFoundError: there is no such file.
        FileDamageError: it is no regular file, larger than the limit, or cannot be read.
    """
    size = regular_nbytes(path)
    wanted = size - offset if nbytes < 0 else nbytes
    if wanted > limit_nbytes:
        raise FileDamageError(
            f"is implausibly large ({wanted} bytes; expected at most {limit_nbytes})"
        )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return _read(fd, offset, wanted)
        finally:
            drop_pages(fd)
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(error) from error


def _read(fd: int, offset: int, wanted: int) -> bytes:
    pieces = []
    while wanted and (piece := os.pread(fd, wanted, offset)):
        pieces.append(piece)
        wanted, offset = wanted - len(piece), offset + len(piece)
    return b"".join(pieces)


def _unreadable(error: Exception) -> FileDamageError:
    return FileDamageError(f"cannot be read ({getattr(error, 'strerror', None) or error})")


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object whose keys are unique and whose numbers are numbers.

    Raises:
        FileDamageError: it is anything else, or implausibly large.
    """
    if not data.strip():
        raise FileDamageError("is empty; expected a JSON object")
    if len(data) > MAX_JSON_NBYTES or sum(map(data.count, (b",", b":", b"[", b"{"))) > (
        MAX_JSON_PARTS
    ):
        raise FileDamageError("is implausibly large for a JSON file")
    try:
        parsed = json.loads(
            data.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_constant
        )
    except UnicodeDecodeError as error:
        raise FileDamageError(f"is not valid JSON: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise FileDamageError(f"is not valid JSON: {error}") from error
    except RecursionError as error:
        raise FileDamageError("is not valid JSON: it is nested too deep") from error
    except FileDamageError:
        raise
    except ValueError as error:
        raise FileDamageError("is not valid JSON: a number has thousands of digits") from error
    if not isinstance(parsed, dict):
        raise FileDamageError(f"holds {_KINDS[type(parsed)]}; expected a JSON object")
    return parsed


_KINDS = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        FileDamageError: it holds something else.
    """
    return parse_object(read_regular(path, MAX_JSON_NBYTES))


def sealed(body: Mapping[str, Any]) -> bytes:
    """A JSON object whose first key is the checksum of all that follows."""
    rest = json.dumps(body, separators=(",", ":")).encode()[1:]
    return _SEAL % zlib.crc32(rest) + rest


def is_sealed(data: bytes) -> bool:
    """Whether these are the bytes that ``sealed`` made."""
    return data.startswith(_SEAL % zlib.crc32(data[_SEAL_NBYTES:]))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise FileDamageError(f"lists {shown_name(name)} twice")
            seen.add(name)
    return found


def _constant(text: str) -> NoReturn:
    raise FileDamageError(f"holds {text}, which JSON does not have")
