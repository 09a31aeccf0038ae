"""Every error a user can meet: one sentence, and the exit code the command line returns."""

from __future__ import annotations

import reprlib
from typing import Any

BARE_SOURCES = (
    "aegis here is the folder of its sources, not what is installed; start Python in another folder"
    " or as python -P"
)
"""In a clone's root, where ``import aegis`` finds no planner, tiers and kernels."""

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 60


def shown(value: Any) -> str:
    """A value as a message may show it, wherever it came from: short, on one line."""
    try:
        return _shown.repr(value)
    except ValueError:
        return "a number of thousands of digits"


class Note(str):
    """What aegis itself adds to an exception for the user: ``error.add_note(Note(...))``."""

    __slots__ = ()


def notes_of(error: BaseException) -> list[Note]:
    """Those of an exception's notes that are for the user. Others add theirs too: since 3.12 Python
    says which attribute of which class it was at when something ended the making of a class."""
    return [note for note in getattr(error, "__notes__", ()) if isinstance(note, Note)]


class AegisError(Exception):
    """Base of all aegis errors; ``str(error)`` is one sentence for the user."""

    exit_code = 1


class UsageError(AegisError):
    """The request itself is wrong: a flag, a size, a prompt that is too long."""

    exit_code = 2


class PlanError(AegisError):
    """The memory plan does not fit the cap; the message names the smallest cap that would."""

    exit_code = 3


class CapExceededError(AegisError):
    """The process was found above its cap."""

    exit_code = 4


class CheckpointError(AegisError):
    """A source checkpoint is damaged, incomplete or not supported."""


class StoreError(AegisError):
    """A converted store is damaged, incomplete or of another version."""


class HubError(AegisError):
    """The Hugging Face hub cannot be reached, or refuses what was asked of it."""


class ReadError(AegisError):
    """Reading expert or embedding data failed while running."""


class LogitsError(AegisError):
    """What the model computed is no number, so that no token can be chosen."""


class TokenizerError(AegisError):
    """Tokenizer or chat template files are missing, damaged or refuse the input."""


class BackendError(AegisError):
    """No compute backend can serve the request; the message says why."""
