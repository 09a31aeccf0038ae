"""What the tokenizers library does besides returning: bare exceptions, panics, lines on stderr.

Its panics reach Python as ``PanicException``, which is no ``Exception`` and so passes every handler
there is; the library prints them too. Damaged files bring them about.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from aegis.errors import TokenizerError


def is_failure(error: BaseException) -> bool:
    """Whether the library failed, rather than somebody interrupting it or the system refusing."""
    if isinstance(error, (MemoryError, ImportError)):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def failures_say(what: str, remedy: str) -> Iterator[None]:
    """Make a TokenizerError of whatever the library raises."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise TokenizerError(
                "too many files are open to load the model's tokenizer; close some or raise the"
                " limit (ulimit -n)"
            ) from error
        raise TokenizerError(f"{what} ({' '.join(str(error).split())}); {remedy}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what the library prints off the process's stderr."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # closed already
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
