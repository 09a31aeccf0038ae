"""Expert files: one per MoE layer, one record per expert, read past the page cache."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from aegis.tiers.errors import ExpertFileError
from aegis.tiers.read_pool import UNCHECKED

READ_ALIGN = 4096
"""Offsets, sizes and addresses of direct reads are multiples of this."""


class ExpertFiles:
    """Open expert files of all MoE layers; ``locate`` says where an expert lies."""

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        record_nbytes: int,
        stride: int,
        num_experts: int,
        direct: bool = True,
        *,
        reason: str = "asked for",
        checksums: Sequence[Sequence[int]] | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Open every file and check its size. Raises ExpertFileError before anything is read.

        direct: past the page cache, unless the file system refuses; ``reason``: why not.
        record_nbytes: bytes of a record that carry weights; stride: distance of records.
        checksums: the CRC-32 (as in zlib) of every record with its padding, by file and expert.
        layers: the model's own number of each file's layer, for messages."""
        if stride % READ_ALIGN or not 0 < record_nbytes <= stride:
            raise ExpertFileError(
                f"expert records of {record_nbytes} bytes, {stride} apart: the distance must be a "
                f"multiple of {READ_ALIGN} and not below the record; convert the model again"
            )
        self.paths = [Path(path) for path in paths]
        self.record_nbytes = record_nbytes
        self.stride = stride
        self.num_experts = num_experts
        self.num_layers = len(self.paths)
        self.layers = list(range(self.num_layers) if layers is None else layers)
        # Not lists: there are tens of thousands of experts, and their bookkeeping is in no plan.
        self._checksums = array("I")
        for of_layer in checksums or ():
            self._checksums.extend(of_layer)
        num_records = self.num_layers * num_experts
        self._checked = bytearray((b"\1" if checksums is None else b"\0") * num_records)
        if checksums is not None and len(self._checksums) != num_records:
            raise ExpertFileError(
                f"{len(self._checksums)} checksums for {num_records} expert records; "
                "convert the model again"
            )
        self.mode = "direct" if direct else "buffered"
        """"direct": past the page cache; "buffered": through it, pages dropped after each read."""
        self.reason = "" if direct else reason
        """Why the mode is buffered; empty when direct."""
        self.fds: list[int] = []
        try:
            self._check_sizes()
            if direct:
                self._open_direct()
            else:
                self._open_buffered()
        except OSError as error:
            opened = len(self.fds)
            self.close()
            raise ExpertFileError(self._refusal(error, opened)) from None
        except ExpertFileError:
            self.close()
            raise

    def _refusal(self, error: OSError, opened: int) -> str:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return (
                f"no more than {opened} of the {self.num_layers} expert files can be open at once "
                f"({error.strerror}); close other files or raise the limit (ulimit -n)"
            )
        return (
            f"{error.filename}: cannot be opened ({error.strerror}); check that the store is "
            "complete and readable"
        )

    def _check_sizes(self) -> None:
        expected = self.stride * self.num_experts
        for path in self.paths:
            found = path.stat().st_size
            if found != expected:
                raise ExpertFileError(
                    f"{path}: expected {expected} bytes ({self.num_experts} records of "
                    f"{self.stride}), found {found}; convert the model again"
                )

    def _open_direct(self) -> None:
        flag = getattr(os, "O_DIRECT", 0)
        try:
            for path in self.paths:
                self.fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag))
            if flag and self.fds:
                _probe(self.fds[0])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.close()
            self.mode, self.reason = "buffered", "the file system refuses direct reads"
            self._open_buffered()
            return
        if sys.platform == "darwin":
            import fcntl

            for fd in self.fds:
                fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        elif not flag:
            self.mode, self.reason = "buffered", "this system has no direct reads"

    def _open_buffered(self) -> None:
        for path in self.paths:
            self.fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            if hasattr(os, "posix_fadvise"):
                # No read-ahead: it would leave pages behind that nobody drops.
                os.posix_fadvise(self.fds[-1], 0, 0, os.POSIX_FADV_RANDOM)

    def locate(self, layer_index: int, expert: int) -> tuple[int, int, int]:
        """(file descriptor, offset, nbytes) of one expert's record."""
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert}: this layer has {self.num_experts}")
        return self.fds[layer_index], expert * self.stride, self.stride

    def checksum(self, layer_index: int, expert: int) -> int:
        """What a read of the record has to be compared with; UNCHECKED after it was once."""
        index = layer_index * self.num_experts + expert
        return UNCHECKED if self._checked[index] else self._checksums[index]

    def note_intact(self, layer_index: int, expert: int) -> None:
        """The record has arrived as it should: it need not be checked again."""
        self._checked[layer_index * self.num_experts + expert] = 1

    def close(self) -> None:
        """Close every file."""
        while self.fds:
            with contextlib.suppress(OSError):
                os.close(self.fds.pop())

    def __enter__(self) -> ExpertFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _probe(fd: int) -> None:
    """One aligned read: some file systems accept the flag at open and refuse the read."""
    with mmap.mmap(-1, READ_ALIGN) as page, memoryview(page) as view:
        os.preadv(fd, [view], 0)
