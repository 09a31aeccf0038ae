"""verify finds every damaged byte and says whose it is."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import flip_bit
from strategies import write_checkpoint

from aegis.checkpoint.fileio import UncachedReader
from aegis.checkpoint.layout import ExpertBits
from aegis.checkpoint.store import Store
from aegis.convert.convert import convert
from aegis.convert.verify import verify
from aegis.errors import StoreError


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


def owner(store: Store, file: Path, offset: int) -> str:
    """Whose byte that is, computed from the layout."""
    layout = store.layout
    if file == store.resident_path:
        tensor = max(
            (t.offset, t.name, t.nbytes) for t in layout.resident.values() if t.offset <= offset
        )
        return "the padding behind " * (offset >= tensor[0] + tensor[2]) + f"tensor {tensor[1]}"
    if file.suffix == ".bin":
        stride = layout.geometry("3bit" if file.parent.name == "experts-3bit" else "4bit").stride
        return f"expert {offset // stride} of layer {int(file.stem[-3:])}"
    return "the contents"


def borders(store: Store, file: Path) -> Iterator[int]:
    """First and last bytes of everything in a file, padding included."""
    size = file.stat().st_size
    yield from (0, size - 1)
    if file == store.resident_path:
        for tensor in store.layout.resident.values():
            end = tensor.offset + tensor.nbytes
            yield from {tensor.offset, end - 1, min(end, size - 1), -(-end // 4096) * 4096 - 1}
    elif file.suffix == ".bin":
        geometry = store.layout.geometry("3bit" if "3bit" in file.parent.name else "4bit")
        for start in range(0, size, geometry.stride):
            yield from (start, start + geometry.record_nbytes - 1, start + geometry.stride - 1)


def check_flip(store: Store, file: Path, offset: int) -> None:
    flip_bit(file, offset)
    try:
        [damage] = verify(store).damaged
    finally:
        flip_bit(file, offset)
    assert (damage.file, damage.what) == (file, owner(store, file, offset))


def files(store: Store) -> list[Path]:
    return sorted(path for path in store.path.rglob("*") if path.is_file())


def test_a_flipped_bit_on_either_side_of_every_border_is_found_and_named(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 1, num_hidden_layers=1, num_experts=2, bits=(4, 8))
    store = convert(source, tmp_path / "s", experts3bit=True)
    flips = [
        (file, at)
        for file in files(store)
        if file.name != "store.json"
        for at in sorted(set(borders(store, file)))
    ]
    assert len(flips) > 80
    for file, offset in flips:
        check_flip(store, file, offset)


@given(data=st.data())
def test_any_flipped_bit_is_found_and_named(pristine: Path, data: st.DataObject) -> None:
    store = Store.open(pristine)
    file = data.draw(st.sampled_from(files(store)))
    offset = data.draw(st.integers(0, file.stat().st_size - 1))
    if file.name != "store.json":
        check_flip(store, file, offset)
        return
    flip_bit(file, offset)
    try:
        with pytest.raises(StoreError, match=r"store\.json"):
            Store.open(pristine, check_sizes=False)
    finally:
        flip_bit(file, offset)


def test_checksums_are_those_of_the_records(store: Store) -> None:
    kinds: list[ExpertBits] = ["4bit", "3bit"]
    for kind in kinds:
        stride = store.layout.geometry(kind).stride
        for path, expected in zip(
            store.expert_paths(kind), store.expert_checksums(kind), strict=True
        ):
            data = path.read_bytes()
            found = [zlib.crc32(data[at : at + stride]) for at in range(0, len(data), stride)]
            assert tuple(found) == expected


def test_all_that_is_wrong_is_named_at_once(store: Store) -> None:
    layers = store.expert_paths()
    layers[0].unlink()
    flip_bit(layers[1], 5)
    store.expert_paths("3bit")[0].unlink()
    store.expert_paths("3bit")[0].mkdir()
    with (store.path / "tokenizer.json").open("ab") as file:
        file.write(b" ")
    with store.resident_path.open("r+b") as resident:
        resident.truncate(store.layout.resident_file_nbytes - 4096)
    with pytest.raises(StoreError):
        Store.open(store.path)
    found = [(d.file, d.what) for d in verify(Store.open(store.path, check_sizes=False)).damaged]
    last = list(store.layout.resident)[-1]
    size = store.layout.resident_file_nbytes
    assert found == [
        (
            store.path / "tokenizer.json",
            f"the length ({(store.path / 'tokenizer.json').stat().st_size} bytes instead of"
            f" {(store.path / 'tokenizer.json').stat().st_size - 1})",
        ),
        (store.resident_path, f"the length ({size - 4096} bytes instead of {size})"),
        (store.resident_path, f"tensor {last}"),
        (layers[0], "the whole file (missing)"),
        (layers[1], "expert 0 of layer 1"),
        (store.expert_paths("3bit")[0], "the whole file (is a directory; expected a file)"),
    ]


def test_a_file_that_disappears_while_it_is_verified_is_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = store.expert_paths()[1]

    def reader(path: Path) -> UncachedReader:
        if path == gone:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return UncachedReader(path)

    monkeypatch.setattr("aegis.convert.verify.UncachedReader", reader)
    [damage] = verify(store).damaged
    assert (damage.file, damage.unreadable) == (gone, True)
    assert "No such file" in damage.what
