"""How a model of random weights is named: known without reading anything."""

from __future__ import annotations

import os

PREFIX = "synthetic:"


def is_synthetic(path: str | os.PathLike[str]) -> bool:
    """Whether a model is named as one of random weights."""
    return os.fspath(path).startswith(PREFIX)
