"""Typed failures of the tiers package."""

from __future__ import annotations

import os


class TiersError(Exception):
    """Base of everything that tiers raises on purpose."""


class ArenaError(TiersError):
    """The arena's memory could not be had, or a region does not fit into it."""


class ExpertFileError(TiersError):
    """An expert file is missing or its size is not what the store says."""


class ReadPoolError(TiersError):
    """The system gives no thread that could read."""


class TraceError(TiersError):
    """A file is no trace, or a damaged one."""


class SlotError(TiersError):
    """A slot was asked for something that its state does not allow."""


class ReadError(TiersError):
    """A read of one expert record failed or ended early."""

    def __init__(self, file: str, offset: int, expected: int, got: int) -> None:
        """``got`` is the number of bytes read, or -errno."""
        self.file = file
        self.offset = offset
        self.expected = expected
        self.got = got
        if got < 0:
            found = f"the read failed: {os.strerror(-got)}"
        else:
            found = f"only {got} arrived (has the file been truncated?)"
        super().__init__(
            f"{file}: expected {expected} bytes at offset {offset}, but {found}; "
            "check the disk and run `aegis verify` on the store"
        )


class DamagedExpertError(ReadError):
    """A record arrived whole, but its bytes are not those that conversion wrote."""

    def __init__(self, file: str, offset: int, nbytes: int, layer: int, expert: int) -> None:
        """layer: as the model counts its layers."""
        self.file = file
        self.offset = offset
        self.expected = self.got = nbytes
        self.layer = layer
        self.expert = expert
        TiersError.__init__(
            self,
            f"{file}: the record of layer {layer}, expert {expert} at offset {offset} is damaged "
            "(checksum mismatch); convert the model again",
        )
