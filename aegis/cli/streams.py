"""The standard streams: made ones that nothing said or read can break, and lost without harm."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

import click


def prepare_streams() -> None:
    """Make the standard streams ones that nothing said or read can break."""
    for fd in (0, 1, 2):
        try:
            os.set_blocking(fd, True)  # A parent's pipe may not be: writing to it would lose text.
        except OSError:
            # Closed: the next file would get this number, and what is meant for people go into it.
            os.open(os.devnull, os.O_RDWR)
    ways = ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace"))
    for stream, errors in ways:
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors=errors)  # type: ignore[union-attr]


def forget(stream: TextIO | None) -> None:
    """Nobody can be told any more: let this, and the interpreter's last flush, go nowhere."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, stream.fileno())  # type: ignore[union-attr]
        os.close(null)


def tell(text: str, end: str = "\n") -> None:
    """Say something to people, on stderr. A full disk or a closed pipe there costs no answer."""
    try:
        click.echo(text + end, nl=False, err=True)
    except OSError:
        forget(sys.stderr)
