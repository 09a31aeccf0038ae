"""What a vision-language checkpoint has beside its text part is kept in the store as it is."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_here import command_here
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from stores import (
    cached_nbytes,
    check_same_store,
    memory_of_conversion,
    raw_tensors,
    require_direct_io,
    rewrite,
)
from strategies import write_checkpoint, write_safetensors

from aegis import Engine, plan
from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.safetensors import read_header
from aegis.checkpoint.source import INDEX
from aegis.convert.convert import convert
from aegis.convert.layout import layout_of_checkpoint
from aegis.convert.stores import place_at, remove
from aegis.convert.verify import verify

GOLDEN = Path(__file__).parents[1] / "goldens" / "qwen3_5_moe" / "hf_bf16"
SPEC = QuantSpec(4, 64)
RAW = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}

Tensors = dict[str, tuple[str, np.ndarray[Any, Any]]]


def sees(name: str) -> bool:
    return "visual." in name or "vision_tower." in name


def kept(path: Path) -> Tensors:
    """Name, type and raw numbers of each tensor of a file."""
    found = {}
    for name, info in read_header(path).items():
        data = np.fromfile(path, np.uint8, info.nbytes, offset=info.offset)
        found[name] = (info.dtype, data, info.shape)
    return found


def check_kept(path: Path, tensors: Tensors) -> None:
    found = kept(path)
    assert found.keys() == {name for name in tensors if sees(name)}
    for name, (dtype, data, shape) in found.items():
        expected = tensors[name]
        assert (dtype, shape) == (expected[0], expected[1].shape), name
        assert data.tobytes() == np.ascontiguousarray(expected[1]).tobytes(), name


def test_every_tensor_is_kept_in_the_same_file_whatever_the_layout_and_the_shards(
    tmp_path: Path,
) -> None:
    tensors = raw_tensors(GOLDEN)
    one = rewrite(GOLDEN, tmp_path / "one", dict(reversed(tensors.items())))
    stores = [
        convert(GOLDEN, tmp_path / "i", quantize=SPEC),
        convert(GOLDEN, tmp_path / "r", layout="row", piece_nbytes=1 << 12),
        convert(one, tmp_path / "o", quantize=SPEC),
    ]
    for store in stores:
        check_kept(store.vision_path, tensors)
        assert verify(store).ok
    assert len({store.vision_path.read_bytes() for store in stores}) == 1
    assert stores[0].layout == layout_of_checkpoint(GOLDEN, quantize=SPEC)
    check_same_store(stores[0], stores[2])


def test_other_readers_find_the_tensors_that_the_checkpoint_has(tmp_path: Path) -> None:
    store = convert(GOLDEN, tmp_path / "s")
    with safe_open(store.vision_path, "numpy") as file:
        names = set(file.keys())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    there: dict[str, tuple[int, ...]] = {}
    for shard in GOLDEN.glob("*.safetensors"):
        with safe_open(shard, "numpy") as file:
            there |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {name: shape for name, shape in there.items() if sees(name)}
    starts = [info.offset for info in read_header(store.vision_path).values()]
    assert min(starts) % 4096 == 0


types = st.sampled_from(["BF16", "F16", "F32", "U8", "I8", "BOOL", "U32", "I64", "F64"])
WIDTHS = {"BF16": 16, "F16": 16, "F32": 32, "U32": 32, "I64": 64, "F64": 64}
shapes = st.lists(st.integers(0, 9), max_size=4)
names = st.text(st.characters(codec="utf-8", categories=("L", "N", "S")), min_size=1, max_size=20)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "m"
    return write_checkpoint(folder, 3, model_type="qwen3_5_moe", num_experts=2, vocab_size=512)


@settings(max_examples=40)
@given(
    st.dictionaries(names, st.tuples(types, shapes, st.binary(max_size=40)), max_size=8),
    st.sampled_from(["model.visual.", "vision_tower.", "visual."]),
    st.sampled_from([1 << 12, 1 << 14]),
)
def test_any_type_shape_and_name_is_kept(
    text: Path,
    given: dict[str, tuple[str, list[int], bytes]],
    prefix: str,
    piece_nbytes: int,
) -> None:
    """Quantised ones too: three tensors like all others."""
    tensors = raw_tensors(text)
    for name, (dtype, shape, seed) in given.items():
        width = WIDTHS.get(dtype, 8)
        random = np.random.default_rng(list(seed))
        numbers = random.integers(0, 1 << (width - 1), shape, dtype=np.uint64)
        tensors[prefix + name] = (dtype, numbers.astype(RAW[width]))
    with tempfile.TemporaryDirectory() as folder:
        source = rewrite(text, Path(folder, "m"), tensors)
        store = convert(source, Path(folder, "s"), piece_nbytes=piece_nbytes)
        assert store.vision_path.exists() == bool(given) == bool(store.layout.vision_nbytes)
        if given:
            check_kept(store.vision_path, tensors)
            assert verify(store).ok


def test_progress_and_the_room_that_is_asked_for_count_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, asked = list[tuple[int, int]](), list[int]()
    monkeypatch.setattr(
        "aegis.convert.convert.check_space", lambda folder, nbytes, hint: asked.append(nbytes)
    )
    store = convert(GOLDEN, tmp_path / "s", progress=lambda *at: seen.append(at))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {seen[-1][0]} == {total for _, total in seen} == {store.layout.nbytes()}
    files = sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file())
    assert asked == [files - (store.path / "store.json").stat().st_size]


def test_the_plan_is_that_of_the_text_alone_and_running_opens_it_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(GOLDEN, tmp_path / "w", quantize=SPEC)
    text = {name: tensor for name, tensor in raw_tensors(GOLDEN).items() if not sees(name)}
    alone = convert(rewrite(GOLDEN, tmp_path / "t", text), tmp_path / "ts", quantize=SPEC)
    check_same_store(whole, alone, vision=False)
    options: dict[str, Any] = {"cap": "600MiB", "context": 64}
    assert plan(whole.path, **options) == plan(alone.path, **options)
    real, opened = os.open, set[str]()

    def note(path: Any, *rest: Any, **more: Any) -> int:
        opened.add(Path(os.fsdecode(path)).name)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", note)
    with Engine.open(whole.path, **options) as engine:
        assert len(list(engine.generate([5, 90, 411], max_tokens=3))) == 3
    assert {"resident.bin", "layer_000.bin"} <= opened
    assert whole.vision_path.name not in opened


def test_show_says_so_in_one_line_of_checkpoint_and_store(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    aegis: Callable[..., Any] = command_here(capfd, monkeypatch)
    store = convert(GOLDEN, tmp_path / "s", quantize=SPEC)
    for model in (GOLDEN, store.path):
        lines = [s for s in aegis("show", str(model)).stdout.splitlines() if "vision" in s]
        assert lines == ["vision        260.4 KiB, kept for later, never read"]
        shown = aegis("show", str(model), "--json").json
        assert shown["vision_nbytes"] == store.vision_path.stat().st_size
        assert shown["store_nbytes"] == store.layout.nbytes()
    assert "vision" not in aegis("show", "embedded").stdout


def test_deleting_a_store_deletes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path))
    store = convert(GOLDEN, tmp_path / "qwen-il16-v2-0123456789ab")
    remove(place_at(store.path))
    assert list(tmp_path.iterdir()) == []


def large(folder: Path, nbytes: int) -> Path:
    """A small text part and one large tensor beside it, in two files."""
    source = write_checkpoint(folder, 3, model_type="qwen3_5_moe", dense=True, shards=2)
    (source / INDEX).unlink()
    for file in source.glob("model-*"):
        file.rename(file.with_name(file.name.replace("-of-00002", "-of-00003")))
    picture = {"model.visual.x.weight": ("BF16", np.zeros((nbytes // 256, 128), np.uint16))}
    write_safetensors(source / "model-00003-of-00003.safetensors", picture)
    return source


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_passes_through_a_small_memory(tmp_path: Path) -> None:
    small, big = large(tmp_path / "m", 1 << 20), large(tmp_path / "b", 96 << 20)
    grown, _ = memory_of_conversion(small, big, tmp_path, "il16")
    assert grown < 8 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="asks mincore")
def test_it_passes_by_the_page_cache(tmp_path: Path) -> None:
    require_direct_io(tmp_path)
    source = large(tmp_path / "m", (9 << 20) + 256)
    weights = source / "model-00003-of-00003.safetensors"
    fd = os.open(weights, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    store = convert(source, tmp_path / "s")
    assert verify(store).ok
    assert cached_nbytes(weights) == cached_nbytes(store.vision_path) == 0
