"""What the name of a model stands for. The one place that says so, for every verb and call.

A folder, of a checkpoint or of a store; the name of a store in the cache; ``ORG/NAME`` or
``ORG/NAME@REVISION`` on the hub; ``synthetic:SHAPE`` or ``synthetic:SHAPE@SEED``; ``embedded``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from aegis.checkpoint.hub_cache import HubName
from aegis.checkpoint.remote import RemoteCheckpoint
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import Store, is_store
from aegis.checkpoint.vocabulary import tokenizer_nbytes
from aegis.convert.cache import (
    STORE_NAME,
    cache_folder,
    cached_store_path,
    ensure_store,
    hub_store,
    is_quantised_so,
    open_store,
    refuse_without_3bit,
    settled,
)
from aegis.convert.identity import embedded_path, model_name
from aegis.convert.layout import layout_of_checkpoint
from aegis.errors import StoreError, UsageError
from aegis.kernels.base import Layout
from aegis.settings import ExpertBits
from aegis.synthetic.names import is_synthetic
from aegis.synthetic.recipe import Recipe, cached_path, recipe

if TYPE_CHECKING:
    from aegis.checkpoint.config import QuantSpec
    from aegis.checkpoint.layout import StoreLayout
    from aegis.convert.targets import Choice
    from aegis.hub.remote import OnDownload

EMBEDDED = "embedded"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StoreSource:
    """A store that is there."""

    path: Path
    making: ClassVar[str] = "opening"
    """What a progress bar says while its store is made."""
    missing_nbytes: ClassVar[None] = None
    """What is to be downloaded of a model on the hub; None: none of that kind, or it is here."""

    @property
    def name(self) -> str:
        """What people call the model: by the hub's name, or that of random weights, which the store
        knows; else by the folder's."""
        source = Store.open(self.path).manifest.source
        repo, name = source.get("repo"), source.get("name")
        if isinstance(repo, str):
            return repo
        return name if isinstance(name, str) and is_synthetic(name) else model_name(self.path)

    @property
    def argument(self) -> str:
        """A MODEL that stands for it in other processes too."""
        return os.path.abspath(self.path)

    @property
    def folder(self) -> Path:
        """Where its tokenizer is; None: nowhere before its store is made."""
        return self.path

    @property
    def tokenizer_nbytes(self) -> int:
        """The size of its tokenizer.json.

        Raises:
            TokenizerError: it is missing, or implausibly large.
        """
        return tokenizer_nbytes(self.path)

    def layout(self, layout: Layout) -> StoreLayout:
        """Sizes and places of everything in its store, from headers alone.

        Raises:
            CheckpointError, StoreError: it is damaged or not supported, or has another layout.
        """
        return open_store(self.path, layout).layout

    def place(self, layout: Layout) -> Path:
        """The folder of its store, there or not."""
        return self.path

    def announcement(self, place: Path) -> str | None:
        """What is to be said before its store is made there; None: nothing."""
        return None

    def refuse_without_3bit(self, layout: Layout) -> None:
        """Before anything is made, which may take minutes and would not make them.

        Raises:
            StoreError: its store, made already or not, has no 3-bit experts.
        """
        refuse_without_3bit(self.path, layout)

    def brought(
        self, store_nbytes: int, on_download: OnDownload | None, folder: Path | None = None
    ) -> StoreSource:
        """The same with all its files here, downloaded if they are not.

        store_nbytes: what its store will take in ``folder`` (None: the cache); there has to be
        room.

        Raises:
            HubError, StoreError: the hub cannot be reached or refuses; a disk has no room.
        """
        return self

    def make(self, layout: Layout, experts: ExpertBits, progress: Progress | None) -> Store:
        """The opened store, made in the cache where it is not there.

        Raises:
            CheckpointError: what it is made of is damaged, incomplete or not supported.
            StoreError: it is damaged or has another layout, or the cache cannot be written.
        """
        return ensure_store(self.path, layout)


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint, here or on the hub; its headers are read. The rest is as of a store."""

    checkpoint: Checkpoint
    quantize: QuantSpec | None = None
    """How a plain one is quantised while it is converted."""
    asked: bool = True
    """Whether somebody asked for that."""
    making: ClassVar[str] = "converting"

    @property
    def name(self) -> str:
        """The hub's, or the folder's."""
        return model_name(self.checkpoint.path)

    @property
    def argument(self) -> str:
        """Its folder, where it is or will be."""
        return os.path.abspath(self.checkpoint.path)

    @property
    def folder(self) -> Path:
        """Its own."""
        return self.checkpoint.path

    @property
    def tokenizer_nbytes(self) -> int:
        """As a store's."""
        if isinstance(self.checkpoint, RemoteCheckpoint):
            return self.checkpoint.tokenizer_nbytes
        return tokenizer_nbytes(self.checkpoint.path)

    @property
    def missing_nbytes(self) -> int | None:
        """Without what other attempts have brought."""
        checkpoint = self.checkpoint
        return checkpoint.missing_nbytes if isinstance(checkpoint, RemoteCheckpoint) else None

    def layout(self, layout: Layout) -> StoreLayout:
        """What converting it will give."""
        return layout_of_checkpoint(self.checkpoint, layout, self.quantize)

    def place(self, layout: Layout) -> Path:
        """In the cache."""
        return cached_store_path(self.checkpoint, layout, self.quantize)

    def announcement(self, place: Path) -> str | None:
        """What is going to be made of a plain one, in a sentence, where nobody asked for it."""
        spec = self.quantize
        if self.asked or spec is None or is_store(place):
            return None
        return (
            f"the numbers of {self.name} become {spec.bits}-bit codes in groups of"
            f" {spec.group_size}; --bits 8 makes others, --bits none keeps them"
        )

    def refuse_without_3bit(self, layout: Layout) -> None:
        """They are made by ``aegis convert`` alone."""
        refuse_without_3bit(self.checkpoint, layout, self.quantize)

    def brought(
        self, store_nbytes: int, on_download: OnDownload | None, folder: Path | None = None
    ) -> CheckpointSource:
        """From the hub, if it is there only."""
        if not isinstance(self.checkpoint, RemoteCheckpoint):
            return self
        from aegis.hub.remote import download

        place = download(self.checkpoint, store_nbytes, folder or cache_folder(), on_download)
        return replace(self, checkpoint=Checkpoint.open(place))

    def make(self, layout: Layout, experts: ExpertBits, progress: Progress | None) -> Store:
        """Converted, unless it was before."""
        return ensure_store(self.checkpoint, layout, progress, self.quantize)


@dataclass(frozen=True)
class SyntheticSource:
    """Random weights of a shape that are not written yet. The rest is as of a store."""

    recipe: Recipe
    making: ClassVar[str] = "writing"
    folder: ClassVar[None] = None
    missing_nbytes: ClassVar[None] = None

    @property
    def name(self) -> str:
        """As it was asked for."""
        return self.recipe.name

    @property
    def argument(self) -> str:
        """Its name."""
        return self.recipe.name

    @property
    def tokenizer_nbytes(self) -> int:
        """The size that its tokenizer.json will have."""
        return self.recipe.tokenizer_nbytes

    def layout(self, layout: Layout) -> StoreLayout:
        """What writing it will give."""
        return self.recipe.layout(layout)

    def place(self, layout: Layout) -> Path:
        """In the cache."""
        return cached_path(self.recipe, layout)

    def announcement(self, place: Path) -> str | None:
        """Nothing; its name says what it is."""
        return None

    def refuse_without_3bit(self, layout: Layout) -> None:
        """They are written where they are asked for."""

    def brought(
        self, store_nbytes: int, on_download: OnDownload | None, folder: Path | None = None
    ) -> SyntheticSource:
        """It comes from nowhere."""
        return self

    def make(self, layout: Layout, experts: ExpertBits, progress: Progress | None) -> Store:
        """Written in place."""
        from aegis.synthetic.write import make

        return make(
            self.recipe,
            self.place(layout),
            layout,
            experts3bit=experts == "3bit",
            progress=progress,
            replace_damaged=True,
        )


Source: TypeAlias = StoreSource | CheckpointSource | SyntheticSource
"""A store, or what a store is made of."""

Named: TypeAlias = Path | HubName | Recipe
"""What was named, before anything of it is read."""

Name: TypeAlias = str | os.PathLike[str] | HubName | None
"""How a model is named: as text, as a folder's path, or by what a text was found to mean; None: the
embedded one."""

Model: TypeAlias = Name | Source
"""A name, or what it was found to stand for."""


def meaning(model: Name) -> Named:
    """What is named. A folder that is there wins over every other meaning of a text; a text that
    means nothing else is a folder that is not there.

    Raises:
        UsageError: there is no such shape of random weights.
    """
    if model is None:
        return embedded_path()
    if isinstance(model, HubName | Recipe):
        return model
    if not isinstance(model, str):
        return Path(model)
    # Not Path's: it expands ./~ too, and raises where there is no such user or a name is too long.
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return path
    if is_synthetic(model):
        return recipe(model)
    if model == EMBEDDED:
        return embedded_path()
    if STORE_NAME.fullmatch(model) and is_store(stored := cache_folder() / model):
        return stored
    return HubName.parse(model) or path


def find_source(
    model: Model,
    layout: Layout,
    experts: ExpertBits = "4bit",
    choice: Choice = "auto",
    *,
    stored: bool = True,
) -> Source:
    """The store that a name stands for, or else what its store will be made of.

    What is here is used without asking the hub; ``aegis pull`` asks for something newer.

    Args:
        experts: a store of random weights that lacks these will not do.
        choice: how a plain checkpoint is quantised; a store that was made otherwise will not do.
        stored: False: what a store is made of is wanted, even where there is one in the cache.

    Raises:
        UsageError: there is no such shape of random weights, or nothing that could be quantised.
        HubError: the hub cannot be reached or refuses.
        CheckpointError, StoreError, TokenizerError: it is no model that aegis can run.
    """
    if isinstance(model, StoreSource | CheckpointSource | SyntheticSource):
        return model
    named = meaning(model)
    if isinstance(named, HubName):
        return _here(named, layout, choice, stored) or _asked(named, layout, choice, stored)
    if isinstance(named, Recipe):
        return _random(named, layout, experts, choice, stored)
    if not is_store(named):
        return of_checkpoint(Checkpoint.open(named), choice)
    if choice not in (None, "auto") and not is_quantised_so(Store.open(named), choice):
        raise UsageError(f"{named} is a store already, which --bits cannot change; leave it out")
    return StoreSource(named)


def of_checkpoint(checkpoint: Checkpoint, choice: Choice) -> CheckpointSource:
    """A checkpoint, and how it is quantised."""
    return CheckpointSource(checkpoint, settled(checkpoint, choice), choice != "auto")


def _random(
    recipe: Recipe, layout: Layout, experts: ExpertBits, choice: Choice, stored: bool
) -> StoreSource | SyntheticSource:
    """Random weights, written already or not."""
    if choice not in (None, "auto"):
        raise UsageError(f"{recipe.name} has no numbers to quantise; leave --bits out")
    target = cached_path(recipe, layout)
    with suppress(StoreError):
        if stored and (Store.open(target).has_3bit or experts == "4bit"):
            return StoreSource(target)
    return SyntheticSource(recipe)


def _here(name: HubName, layout: Layout, choice: Choice, stored: bool) -> Source | None:
    """The store, or else the complete download, of a model on the hub; None: it is not here."""
    if stored and (store := hub_store(name, layout, choice)) is not None:
        return StoreSource(store)
    folder = name.snapshot()
    return None if folder is None else of_checkpoint(Checkpoint.open(folder), choice)


def _asked(name: HubName, layout: Layout, choice: Choice, stored: bool) -> Source:
    """A tag of a commit that is here already needs no download."""
    from aegis.hub.remote import describe

    found = describe(name)
    here = _here(HubName(name.repo, found.commit), layout, choice, stored)
    return here or of_checkpoint(found, choice)
