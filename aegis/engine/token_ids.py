"""Whole numbers as callers give them: token ids above all."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any

from aegis.errors import UsageError


def whole(value: Any, what: str = "token id") -> int:
    """A value as an int, whatever kind of integer it is.

    Raises:
        UsageError: it is none; a fraction is never cut off.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise UsageError(f"{what} {value!r} is a {type(value).__name__}; expected a whole number")


def refuse_bytes(ids: object) -> None:
    """Bytes would pass for token ids below 256, or for the memory of an array."""
    if isinstance(ids, bytes | bytearray):
        raise UsageError("token ids are bytes; encode text with the tokenizer")


def token_array(ids: Sequence[int]) -> array[int]:
    """A copy of token ids of which thousands are compared in a microsecond.

    Raises:
        UsageError: one is no whole number, or too large for any vocabulary.
    """
    refuse_bytes(ids)
    if not isinstance(ids, array) and bool in map(type, ids):
        whole(True)
    try:
        return array("i", ids)
    except (OverflowError, TypeError):
        for token in map(whole, ids):
            if not -(2**31) <= token < 2**31:
                raise UsageError(f"token id {token} is outside any vocabulary") from None
        raise
