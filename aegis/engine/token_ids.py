"""Whole numbers as callers give them: token ids above all."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any

from aegis.errors import UsageError, shown

_BITS = 256
"""A seed may be as long as a hash."""


def whole(value: Any, what: str = "token id") -> int:
    """A value as an int, whatever kind of integer it is.

    Raises:
        UsageError: it is none, or too long for a message; a fraction is never cut off.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        kind = type(value).__name__
        raise UsageError(f"{what} {shown(value)} is a {kind}; expected a whole number")
    if found.bit_length() > _BITS:
        raise UsageError(f"{what} has {found.bit_length()} bits; expected at most {_BITS}")
    return found


def refuse_no_ids(ids: object) -> None:
    """Bytes would pass for token ids below 256, or for the memory of an array; a set has no order,
    and what has no length or can be read only once could not be looked at first."""
    if isinstance(ids, bytes | bytearray | memoryview):
        raise UsageError("token ids are bytes; encode text with the tokenizer")
    if not (hasattr(ids, "__len__") and hasattr(ids, "__getitem__")) or isinstance(ids, dict):
        name = type(ids).__name__
        raise UsageError(f"token ids are a {name}; give a list, or another sequence of numbers")
    if getattr(ids, "ndim", 1) != 1:
        raise UsageError("token ids are an array of more or less than one dimension; give one row")


def token_array(ids: Sequence[int]) -> array[int]:
    """A copy of token ids of which thousands are compared in a microsecond.

    Raises:
        UsageError: one is no whole number, or too large for any vocabulary.
    """
    refuse_no_ids(ids)
    if not isinstance(ids, array) and bool in map(type, ids):
        whole(True)
    try:
        return array("i", ids)
    except (OverflowError, TypeError):
        for token in map(whole, ids):
            if not -(2**31) <= token < 2**31:
                raise UsageError(f"token id {token} is outside any vocabulary") from None
        raise
