"""verify finds every damaged byte and says whose it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stores import flip_bit
from strategies import write_checkpoint

from aegis.checkpoint.store import Store
from aegis.convert.convert import convert
from aegis.convert.verify import verify


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    source = write_checkpoint(folder / "m", 1, num_experts=5)
    return convert(source, folder / "s", experts3bit=True).path


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Store:
    return Store.open(shutil.copytree(pristine, tmp_path / "s"))


def test_an_undamaged_store_is_fine_and_everything_was_read(store: Store) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(store, lambda *at: seen.append(at))
    layout = store.layout
    assert report.ok
    assert report.checked == len(layout.resident) + 2 * 2 * 5 + len(store.manifest.files)
    experts = layout.experts_nbytes() + layout.experts_nbytes("3bit")
    assert report.checked_nbytes > experts
    assert seen[-1] == (report.checked_nbytes, report.checked_nbytes)


def test_every_damaged_expert_tensor_and_file_is_named(store: Store) -> None:
    layout = store.layout
    stride, stride_3bit = layout.experts.stride, layout.geometry("3bit").stride
    flip_bit(store.expert_paths()[0], 2 * stride)
    flip_bit(store.expert_paths()[1], 5 * stride - 1)
    flip_bit(store.expert_paths("3bit")[1], 4 * stride_3bit + 100)
    flip_bit(store.resident_path, layout.resident["lm_head"].offset + 70)
    flip_bit(store.path / "tokenizer.json", 9)
    damaged = verify(store).damaged
    assert {(d.file.parent.name, d.layer, d.expert) for d in damaged if d.layer is not None} == {
        ("experts", 0, 2),
        ("experts", 1, 4),
        ("experts-3bit", 1, 4),
    }
    assert {d.tensor for d in damaged if d.tensor} == {"lm_head"}
    assert {d.what for d in damaged} >= {"expert 2 of layer 0", "tensor lm_head"}
    assert any(d.file.name == "tokenizer.json" for d in damaged)
    assert len(damaged) == 5


def test_a_file_cut_short_after_opening_is_damage_not_a_crash(store: Store) -> None:
    path = store.expert_paths()[0]
    with path.open("r+b") as file:
        file.truncate(3 * store.layout.experts.stride)
    damaged = verify(store).damaged
    assert {d.expert for d in damaged} == {None, 3, 4}
    assert damaged[0].what.startswith("the length (")
