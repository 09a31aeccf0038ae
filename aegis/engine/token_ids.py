"""Whole numbers as callers give them: token ids above all."""

from __future__ import annotations

import operator
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
