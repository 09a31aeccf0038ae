"""Processes that do a piece of work for this one, and end when it does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

_DEFAULTS = {"OPENBLAS_NUM_THREADS": "1"}
"""As the command line has it for itself: idle BLAS threads keep buffers and spin."""


@contextlib.contextmanager
def worker(
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    stderr: int = subprocess.PIPE,
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that runs ``module``, its output on pipes; it is killed at the end.

    Its stdin ends when this process does, whatever way that is: see ``die_with_parent``.
    """
    with contextlib.ExitStack() as stack:
        lifeline, held = os.pipe()
        stack.callback(os.close, held)
        # A signal between the birth of the process and knowing it would leave it alone.
        with deferred_signals():
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    stdin=lifeline,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env={**_DEFAULTS, **os.environ, "PYTHONSAFEPATH": "1", **(env or {})},
                )
            finally:
                os.close(lifeline)
            stack.callback(_end, process)
        yield process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for it too: it may still be writing somewhere."""
    with deferred_signals():
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def die_with_parent() -> None:
    """In a worker: nothing is ever written to stdin; when it ends, so does this process."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Signals that would raise do so at the end: in between a step would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    before = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(handler := signal.getsignal(number))
    }
    for number in before:
        signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
