"""What the hub, or the way there, has against a request, in one sentence with what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from huggingface_hub import constants, errors

from aegis.checkpoint.hub_cache import HubName, hub_cache
from aegis.convert.build import disk_errors
from aegis.errors import AegisError, HubError

_TRANSPORT = ("http", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3")
"""The libraries that huggingface_hub has spoken HTTP with, whose errors have no common base."""

_LOG_IN = "log in with a token that may read it (hf auth login, or HF_TOKEN)"
_AGAIN = "run the command again, and a download goes on where it ended"
ELSEWHERE = "set HF_HOME to a folder on another disk"


def is_transient(error: Exception) -> bool:
    """Whether another attempt may succeed."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return _is_transport(error)


@contextlib.contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """Turn what ``huggingface_hub`` raises, and a disk that is full, into errors of ours."""
    with disk_errors(hub_cache(), ELSEWHERE):
        try:
            yield
        except Exception as error:
            if not _is_hubs(error):
                raise
            raise _sentence(error, name) from error


def _is_hubs(error: Exception) -> bool:
    """Rather than the disk's; several of them are an OSError too."""
    own = type(error).__module__.startswith("huggingface_hub")
    return own or _is_transport(error)


def _is_transport(error: Exception) -> bool:
    if isinstance(error, errors.OfflineModeIsEnabled):
        return False
    library = type(error).__module__.partition(".")[0]
    lost = isinstance(error, ConnectionError | TimeoutError)
    return lost or library in _TRANSPORT


def _status(error: BaseException) -> int | None:
    """The status of the response, where there was one."""
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _sentence(error: BaseException, name: HubName) -> AegisError:
    endpoint, repo, status = constants.ENDPOINT, name.repo, _status(error)
    if isinstance(error, errors.GatedRepoError):
        return HubError(f"{repo} is gated: accept its terms at {endpoint}/{repo}, and {_LOG_IN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f"{repo} has no revision {name.revision}; give a branch, a tag or a commit of it"
        )
    if isinstance(error, errors.EntryNotFoundError) and status is not None:
        return HubError(f"a file of {repo} is gone from {endpoint}; run the command again")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"{repo} is no folder here and no model on {endpoint}, or one that is hidden from you;"
            f" check the name, or {_LOG_IN}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _sentence(error.__cause__, name)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubError(
            f"{name} is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub; unset it"
        )
    if status == 401:
        return HubError(f"{endpoint} does not know your token; {_LOG_IN}")
    if status == 403:
        return HubError(f"{endpoint} does not let you read {repo}; {_LOG_IN}")
    if status == 429:
        return HubError(f"{endpoint} has had too many requests from you; wait, or {_LOG_IN}")
    if status is not None:
        return HubError(f"{endpoint} answers with an error ({status}); {_AGAIN}")
    return HubError(f"{endpoint} cannot be reached ({_reason(error)}); {_AGAIN}")


def _reason(error: BaseException) -> str:
    """What the system said, or else the library, on one line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in errno.errorcode and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:200] or type(error).__name__
