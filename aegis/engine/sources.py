"""What the name of a model stands for: a store, a checkpoint, or random weights of a shape."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from aegis.checkpoint.config import tokenizer_nbytes
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import Store, is_store
from aegis.convert.cache import ensure_store
from aegis.convert.identity import model_name
from aegis.errors import StoreError
from aegis.kernels.base import Layout
from aegis.settings import ExpertBits
from aegis.synthetic.names import is_synthetic
from aegis.synthetic.recipe import Recipe, cached_path, recipe

Source: TypeAlias = Path | Checkpoint | Recipe
"""A store's folder, or what a store is made from. Each can be given where a path can."""

Progress = Callable[[int, int], None]


def open_source(
    path: str | os.PathLike[str], layout: Layout, experts: ExpertBits = "4bit"
) -> Source:
    """What ``path`` stands for; one of random weights that was written before is a store.

    Raises:
        CheckpointError: the checkpoint or its config is damaged, incomplete or not supported.
        UsageError: there is no such shape.
    """
    if isinstance(path, Recipe | Checkpoint):
        return path
    if not is_synthetic(path):
        return Path(path) if is_store(path) else Checkpoint.open(path)
    made = recipe(path)
    target = cached_path(made, layout)
    try:
        store = Store.open(target)
    except StoreError:
        return made
    return target if experts == "4bit" or store.has_3bit else made


def source_name(path: str | os.PathLike[str]) -> str:
    """What people call the model."""
    return os.fspath(path) if is_synthetic(path) else model_name(Path(path))


def source_tokenizer_nbytes(source: Source) -> int:
    """The size of its tokenizer.json.

    Raises:
        TokenizerError: it is missing, or implausibly large.
    """
    return source.tokenizer_nbytes if isinstance(source, Recipe) else tokenizer_nbytes(Path(source))


def store_of(
    source: Source, layout: Layout, experts: ExpertBits, progress: Progress | None
) -> Store:
    """The opened store, made in the cache where it is not there.

    Raises:
        CheckpointError, StoreError: as ``ensure_store`` and ``make`` say.
    """
    if not isinstance(source, Recipe):
        return ensure_store(source, layout, progress)
    from aegis.synthetic.write import make

    target = cached_path(source, layout)
    three = experts == "3bit"
    return make(source, target, layout, experts3bit=three, progress=progress, replace_damaged=True)
