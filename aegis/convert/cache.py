"""Where converted stores live, and getting one for whatever path the user names."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from aegis.checkpoint.config import load_config
from aegis.checkpoint.hub_cache import HubName, Origin
from aegis.checkpoint.manifest import FORMAT_VERSION
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import MANIFEST, Store, is_store, without_3bit
from aegis.convert.identity import embedded_path, identity_of, model_name, quantised_identity
from aegis.errors import StoreError
from aegis.kernels.base import Layout

if TYPE_CHECKING:
    from aegis.checkpoint.config import QuantSpec
    from aegis.convert.convert import Progress
    from aegis.convert.targets import Choice

_VERSION = r"-v\d+-[0-9a-f]{12}"
STORE_NAME = re.compile(rf"(.+)-(?:il16|row){_VERSION}", re.DOTALL)
"""What stores in the cache are called; the model's name comes first."""
_REMAINS = re.compile(rf"\.(.+{_VERSION})\.(?:lock|partial-.+)", re.DOTALL)
_LONGEST_NAME = 150
"""Bytes of a model's name in a store's: with all that is put around it, file systems take it."""

__all__ = [
    "STORE_NAME",
    "cache_folder",
    "cached_store_path",
    "embedded_path",
    "ensure_store",
    "hub_store",
    "is_named_for",
    "is_quantised_so",
    "model_stores",
    "older_stores",
    "open_store",
    "refuse_without_3bit",
    "settled",
    "store_name",
]


def cache_folder() -> Path:
    """$AEGIS_CACHE, or the user's cache folder for aegis.

    Raises:
        StoreError: nothing says where the user's files are.
    """
    named = os.environ.get("AEGIS_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "aegis"
    home = _home()
    return home / "Library/Caches/aegis" if sys.platform == "darwin" else home / ".cache/aegis"


def _home() -> Path:
    """$HOME where it is a path at all, else what the system's user list says."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        import pwd

        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = ""
    if not os.path.isabs(home):
        raise StoreError(
            "there is no home folder to keep converted models in; set AEGIS_CACHE to a folder"
        )
    return Path(home)


def cached_store_path(
    path: str | os.PathLike[str], layout: Layout = "il16", quantize: QuantSpec | None = None
) -> Path:
    """Where the store of a checkpoint lies in the cache, converted or not.

    ``quantize``: of the one that is quantised meanwhile.

    Raises:
        CheckpointError: ``path`` is no readable checkpoint.
    """
    checkpoint = Checkpoint.open(path)
    name = store_name(model_name(checkpoint.path), layout, identity_of(checkpoint, quantize))
    return cache_folder() / name


def store_name(model: str, layout: Layout, identity: str) -> str:
    """What the folder of a model's store is called in the cache."""
    return f"{_stem(model, layout)}-{identity[:12]}"


def _stem(name: str, layout: Layout) -> str:
    """What a store's name begins with."""
    name = name.replace("/", "--")
    while len(os.fsencode(name)) > _LONGEST_NAME:
        name = name[:-1]
    return f"{name}-{layout}-v{FORMAT_VERSION}"


def is_named_for(path: Path, model: str) -> bool:
    """Whether a store there would be one of a model, as far as its name says."""
    return any(path.name.startswith(f"{_stem(model, layout)}-") for layout in get_args(Layout))


def model_stores(path: str | os.PathLike[str]) -> list[Path]:
    """Where the stores of a checkpoint lie in the cache, of each layout and quantisation, there or
    not."""
    checkpoint = Checkpoint.open(path)
    return [place for place, _ in _places(checkpoint)]


def _places(checkpoint: Checkpoint) -> list[tuple[Path, QuantSpec | None]]:
    """Where its stores lie, of each layout, and what it was quantised to meanwhile."""
    from aegis.convert.targets import SPECS, is_plain

    name, identity = model_name(checkpoint.path), identity_of(checkpoint)
    ids: dict[QuantSpec | None, str] = {None: identity}
    if is_plain(checkpoint):
        ids.update((spec, quantised_identity(identity, spec)) for spec in SPECS)
    return [
        (cache_folder() / store_name(name, layout, ids[spec]), spec)
        for layout in get_args(Layout)
        for spec in ids
    ]


def settled(checkpoint: Checkpoint, choice: Choice) -> QuantSpec | None:
    """How a checkpoint is quantised: as asked for, or else as it was last, or as is usual.

    Stores of every layout count: what computes does not change what a model is.
    """
    from aegis.convert.targets import USUAL, is_plain

    if choice != "auto":
        return choice
    if not is_plain(checkpoint):
        return None
    made: list[tuple[float, QuantSpec | None]] = []
    for place, spec in _places(checkpoint):
        with contextlib.suppress(OSError):
            made.append(((place / MANIFEST).stat().st_mtime, spec))
    return max(made, key=lambda found: found[0])[1] if made else USUAL


def is_quantised_so(store: Store, choice: Choice) -> bool:
    """Whether a store was made as asked for."""
    spec = None if choice is None or choice == "auto" else asdict(choice)
    return choice == "auto" or store.manifest.source.get("quantized") == spec


def hub_store(name: HubName, layout: Layout, choice: Choice = "auto") -> Path | None:
    """The store of a model of the hub that was quantised so, the newest where there are several.

    Of the commit that the revision meant when it was last downloaded; where that download was
    deleted, of one that had that name when it was converted.
    """
    commit, snapshot = name.commit, name.snapshot()
    pattern = re.compile(re.escape(_stem(name.repo, layout)) + "-[0-9a-f]{12}")
    found: list[tuple[float, Path]] = []
    for entry in filter(pattern.fullmatch, _names(cache_folder())):
        path = cache_folder() / entry
        with contextlib.suppress(StoreError, OSError):
            store = Store.open(path)
            source = store.manifest.source
            known = (
                source.get("commit") == commit
                if commit
                else name.revision in source.get("revisions", ())
            )
            same = snapshot is None or load_config(snapshot).raw == store.layout.config.raw
            same = same and is_quantised_so(store, choice)
            if source.get("repo") == name.repo and known and same:
                found.append(((path / MANIFEST).stat().st_mtime, path))
    return max(found)[1] if found else None


def open_store(path: str | os.PathLike[str], layout: Layout) -> Store:
    """The store in a folder.

    Raises:
        StoreError: it is damaged or has another layout.
    """
    store = Store.open(path)
    if store.layout.layout != layout:
        other = "mlx" if layout == "il16" else "native"
        raise StoreError(
            f"{path} has layout {store.layout.layout}, but {layout} is needed; convert the"
            f" checkpoint with --layout {layout}, or use --backend {other}"
        )
    return store


def refuse_without_3bit(
    path: str | os.PathLike[str], layout: Layout, quantize: QuantSpec | None = None
) -> None:
    """Before anything is converted, which may take minutes and would not make them.

    Raises:
        StoreError: the store of ``path``, made already or not, has no 3-bit experts.
    """
    if is_store(path):
        Store.open(path).expert_paths("3bit")
        return
    other = False
    with contextlib.suppress(StoreError):  # Not there, or damaged: it will be made, without them.
        store = Store.open(cached_store_path(path, layout, quantize))
        if store.has_3bit:
            return
        other = store.manifest.other_3bit
    origin = Origin.of(Path(path))
    bits = f" --bits {quantize.bits} --group-size {quantize.group_size}" if quantize else ""
    raise without_3bit(path if origin is None else origin.repo, other, bits)


def ensure_store(
    path: str | os.PathLike[str],
    layout: Layout = "il16",
    progress: Progress | None = None,
    quantize: QuantSpec | None = None,
) -> Store:
    """The opened store for a store or checkpoint folder; converts into the cache when needed.

    A damaged store in the cache is converted anew. ``quantize``: of a plain checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or not supported.
        StoreError: the store is damaged or has another layout, or the cache cannot be written.
    """
    if is_store(path):
        return open_store(path, layout)
    target = cached_store_path(path, layout, quantize)
    try:
        store = Store.open(target)
    except StoreError:
        from aegis.convert.build import prepare_parent
        from aegis.convert.convert import convert

        prepare_parent(target, "set AEGIS_CACHE to a folder that can be")
        return convert(
            path,
            target,
            layout=layout,
            quantize=quantize,
            progress=progress,
            replace_damaged=True,
        )
    _clean_up(target)
    return store


def _clean_up(target: Path) -> None:
    """Whoever uses a store may be the last to come by: delete what killed conversions left, unless
    another one may go on with it."""
    remains = {n: found[1] for n in _names(target.parent) if (found := _REMAINS.fullmatch(n))}
    owners = set(remains.values())
    if any(".partial-" in name for name in _names(target)):
        owners.add(target.name)
    if owners:
        from aegis.convert.build import may_go_on, remove_remains

        wanted = {owner for name, owner in remains.items() if may_go_on(target.parent / name)}
        for owner in owners - (wanted - {target.name}):
            remove_remains(target.parent / owner)


def older_stores(target: Path) -> list[Path]:
    """Stores in the cache of the same name and layout as ``target``, one there.

    They come from a checkpoint that was changed since, from another one of that name, or from
    another version of aegis; not from the same one that was quantised otherwise.
    """
    head = re.escape(target.name.rpartition("-v")[0])
    other = re.compile(head + _VERSION)
    found = [name for name in _names(target.parent) if other.fullmatch(name)]
    origin = _checkpoint_of(target)
    others = [target.parent / name for name in sorted(found) if name != target.name]
    return [store for store in others if origin is None or _checkpoint_of(store) != origin]


def _checkpoint_of(path: Path) -> object:
    """The identity of what a store was made of; None: that cannot be told."""
    try:
        source = Store.open(path).manifest.source
    except StoreError:
        return None
    return source.get("plain_identity", source.get("identity"))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
