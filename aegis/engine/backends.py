"""What a backend says when it cannot go on, as an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aegis.errors import BackendError
from aegis.kernels.base import BackendUnavailableError


@contextmanager
def backend_errors() -> Iterator[None]:
    """Around whatever asks a backend: at planning, at open and in every call.

    Raises:
        BackendError: the backend cannot run here; the message says why.
    """
    try:
        yield
    except BackendUnavailableError as error:
        raise BackendError(str(error)) from error
