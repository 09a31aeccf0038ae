"""One place says what a model's name stands for, and what a plain one becomes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from strategies import write_checkpoint
from synthetic_tools import write_shape

from aegis import Engine, plan
from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.hub_cache import HubName
from aegis.checkpoint.store import Store
from aegis.convert.cache import cached_store_path, ensure_store, model_stores, older_stores
from aegis.convert.convert import convert
from aegis.convert.identity import embedded_path
from aegis.engine.places import find_places
from aegis.engine.sources import (
    CheckpointSource,
    StoreSource,
    SyntheticSource,
    find_source,
    meaning,
)
from aegis.errors import CheckpointError, StoreError, UsageError
from aegis.synthetic.recipe import Recipe, cached_path, recipe
from aegis.synthetic.write import make

USUAL = QuantSpec(4, 64)
SMALL = {"context": 64, "backend": "reference"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty; the folder is also where names are looked for."""
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "plain", 5, dense=True, num_experts=3, num_hidden_layers=1)


def bits_of(store: Store) -> int:
    """0: its experts have numbers, not codes."""
    return store.layout.experts.segments["gate_proj"].format.bits


def test_a_name_means_one_thing(tmp_path: Path) -> None:
    assert meaning(None) == meaning("embedded") == embedded_path()
    assert meaning("org/name") == HubName("org/name")
    assert meaning("org/name@v1") == HubName("org/name", "v1")
    assert meaning("nothing") == Path("nothing")
    assert meaning(Path("org/name")) == Path("org/name")
    for found in (HubName("a/b"), recipe("synthetic:olmoe-1b-7b")):
        assert meaning(found) is found
    shape = meaning("synthetic:olmoe-1b-7b@3")
    assert isinstance(shape, Recipe)
    assert (shape.name, shape.seed) == ("synthetic:olmoe-1b-7b@3", 3)
    for name in ("embedded", "org/name", "synthetic:olmoe-1b-7b"):
        Path(name).mkdir(parents=True)
        assert meaning(name) == Path(name)


def test_a_store_in_the_cache_is_found_by_its_name(plain: Path) -> None:
    store = ensure_store(plain)
    assert meaning(store.path.name) == store.path
    assert find_source(store.path.name, "il16") == StoreSource(store.path)
    other = store.path.name.replace("plain", "gone")
    assert meaning(other) == Path(other)


def test_a_shape_is_one_model_however_its_seed_is_written(tmp_path: Path) -> None:
    name = write_shape(tmp_path / "shape")
    made = recipe(name)
    assert recipe(f"{name}@0") == recipe(f"{name}@00") == made
    assert recipe(f"{name}@007").name == f"{name}@7"


def test_random_weights_are_a_store_once_they_are_written(tmp_path: Path) -> None:
    name = write_shape(tmp_path / "shape")
    source = find_source(name, "il16")
    assert source == SyntheticSource(recipe(name))
    sized = plan(name, cap=1, **SMALL)
    target = cached_path(recipe(name), "il16")
    make(recipe(name), target, "il16")
    found = find_source(name, "il16")
    assert found == StoreSource(target)
    assert (found.name, found.place("il16")) == (name, source.place("il16"))
    assert plan(name, cap=1, **SMALL) == sized
    assert find_source(name, "il16", "3bit") == source
    assert find_source(name, "il16", stored=False) == source
    [place] = find_places(name)
    assert (place.path, place.model) == (target, name)
    assert find_places(f"{name}@0") == [place]
    (tmp_path / "shape" / "config.json").unlink()
    assert find_places(name) == [place]
    with pytest.raises(UsageError, match="has no store of synthetic:"):
        find_places("synthetic:olmoe-1b-7b")


def test_a_plain_checkpoint_becomes_4_bits_unless_something_else_is_asked_for(
    plain: Path, tmp_path: Path
) -> None:
    def opened(**options: int | str) -> tuple[Path, int]:
        with Engine.open(plain, cap="1GiB", **SMALL, **options) as engine:
            assert engine.plan.items == plan(plain, "1GiB", **SMALL, **options).items
            return engine.store.path, bits_of(engine.store)

    usual, bits = opened()
    assert bits == 4
    made = convert(plain, tmp_path / "made", quantize=USUAL)
    assert made.layout == Store.open(usual).layout
    assert made.expert_checksums("4bit") == Store.open(usual).expert_checksums("4bit")
    eight, bits = opened(bits=8, group_size=32)
    assert bits == 8
    assert opened(bits=4) == (usual, 4)
    kept, bits = opened(bits="none")
    assert bits == 0
    # Without --bits: as it was made last.
    for age, (store, bits) in enumerate([(eight, 8), (usual, 4), (kept, 0)]):
        os.utime(store / "store.json", (2e9 + age, 2e9 + age))
        assert opened() == (store, bits)
    assert older_stores(usual) == []
    assert {place.path for place in find_places("plain")} == {usual, eight, kept}
    assert {place.path for place in find_places(str(plain))} == {usual, eight, kept}
    assert {usual, eight, kept} < set(model_stores(plain))


def test_how_it_was_made_last_is_how_it_is_made_for_other_kernels(plain: Path) -> None:
    ensure_store(plain, "il16", quantize=QuantSpec(8, 32))
    for layout in ("row", "il16"):
        source = find_source(plain, layout)
        assert isinstance(source, CheckpointSource)
        assert source.quantize == QuantSpec(8, 32)
    made = ensure_store(plain, "row", quantize=USUAL)
    os.utime(made.path / "store.json", (2e9, 2e9))
    for layout in ("row", "il16"):
        source = find_source(plain, layout)
        assert isinstance(source, CheckpointSource)
        assert source.quantize == USUAL


def test_what_was_converted_before_it_was_changed_is_older(plain: Path) -> None:
    first = ensure_store(plain, quantize=USUAL)
    config = plain / "config.json"
    config.write_text(config.read_text() + " ")
    changed = ensure_store(plain, quantize=USUAL)
    assert older_stores(changed.path) == [first.path]


def test_what_becomes_of_a_plain_checkpoint_is_said_where_nobody_asked(plain: Path) -> None:
    source = find_source(plain, "il16")
    assert isinstance(source, CheckpointSource)
    assert source.place("il16") == cached_store_path(plain, "il16", USUAL)
    said = source.announcement(source.place("il16"))
    assert said is not None
    assert "the numbers of plain become 4-bit codes in groups of 64; --bits 8 makes" in said
    asked = find_source(plain, "il16", choice=USUAL)
    assert asked.place("il16") == source.place("il16")
    kept = find_source(plain, "il16", choice=None)
    coded = find_source(None, "il16")
    for other in (asked, kept, coded):
        assert other.announcement(other.place("il16")) is None
    source.make("il16", "4bit", None)
    assert source.announcement(source.place("il16")) is None


def test_the_command_that_makes_3bit_experts_is_named_as_it_must_be_given(plain: Path) -> None:
    command = f"aegis convert --experts 3bit --bits 4 --group-size 32 {plain}"
    with pytest.raises(StoreError, match=command):
        Engine.open(plain, cap="1GiB", experts="3bit", bits=4, group_size=32, **SMALL)


def test_the_stores_of_the_embedded_model_are_found_by_that_word() -> None:
    place = cached_store_path(embedded_path(), "row")
    place.mkdir(parents=True)
    assert [found.path for found in find_places("embedded")] == [place]


def test_what_is_no_plain_checkpoint_is_not_quantised(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is quantised already"):
        plan(None, bits=8)
    store = convert(plain, tmp_path / "store", quantize=USUAL)
    for bits in (4, "none", "auto"):
        assert plan(store.path, "1GiB", bits=bits, **SMALL).feasible
    with pytest.raises(UsageError, match=r"store is a store already, which --bits cannot change"):
        plan(store.path, bits=8)
    with pytest.raises(UsageError, match="has no numbers to quantise"):
        plan("synthetic:olmoe-1b-7b", bits=4)
    with pytest.raises(UsageError, match="no 7-bit codes"):
        plan(plain, bits=7)
    with pytest.raises(UsageError, match="no groups of 48"):
        plan(plain, bits=4, group_size=48)
