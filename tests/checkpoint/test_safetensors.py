"""Safetensors headers: read like the reference library does, refused when damaged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from aegis.checkpoint.safetensors import read_header
from aegis.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "goldens" / "qwen2_moe" / "model.safetensors"


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "U8", shape: Any = (4,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_headers_are_read_as_the_reference_library_reads_them() -> None:
    tensors = read_header(GOLDEN)
    with safe_open(GOLDEN, "np") as reference:
        assert set(tensors) == set(reference.keys())
        for name, tensor in tensors.items():
            part = reference.get_slice(name)
            assert (list(tensor.shape), tensor.dtype) == (part.get_shape(), part.get_dtype())
        embedded = reference.get_tensor("lm_head.weight").tobytes()
    head = tensors["lm_head.weight"]
    assert GOLDEN.read_bytes()[head.offset : head.offset + head.nbytes] == embedded


def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4\n")
    with pytest.raises(CheckpointError, match=r"a pointer of Git LFS; .* git lfs pull"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"not json", "damaged header"),
        (b"[]", "it holds a list; expected a JSON object"),
        (b'{"a": ' * 50_000, "damaged header"),
        (b'{"a": 1, "a": 2}', "lists a twice"),
        ({"a": 1}, "damaged header entry for a"),
        ({"a": {"dtype": "U8", "shape": [4]}}, "damaged header entry for a"),
        ({"a": entry(shape=[-4])}, "damaged header entry for a"),
        ({"a": entry(shape=[True])}, "damaged header entry for a"),
        ({"a": entry(begin=-1)}, "damaged header entry for a"),
        ({"a": entry(end=3.5)}, "damaged header entry for a"),
        ({"a": entry(dtype="Q4")}, "stores a as 'Q4'"),
        ({"a": entry(dtype="F32")}, r"gives a 4 bytes, but F32 \[4\] takes 16"),
        ({"a": entry(begin=4, end=0)}, "gives a -4 bytes"),
        ({"a": entry(begin=2, end=6), "b": entry()}, "over another tensor"),
        ({"a": entry(begin=6, end=10)}, "truncated: a ends"),
        ({"a": entry(begin=4, end=8)}, "has 4 bytes before a that belong to no tensor"),
        ({"a": entry()}, "ends with 4 bytes that belong to no tensor"),
        ({"a": entry(), "b": entry("U8", [0], 20, 20)}, "truncated: b ends"),
        ({"a": entry(shape=[1] * 9)}, "damaged header entry for a"),
        ({"a": entry(shape=[2**60, 0], begin=0, end=0)}, "damaged header entry for a"),
        ({"a" * 2000: entry()}, "is no name of a tensor"),
    ],
)
def test_a_damaged_header_is_refused_naming_the_tensor(
    tmp_path: Path, header: Any, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_header(write(tmp_path / "m.safetensors", header, bytes(8)))


@pytest.mark.parametrize("length", [3, 1 << 20, 1 << 63])
def test_a_header_longer_than_the_file_is_refused_before_it_is_read(
    tmp_path: Path, length: int
) -> None:
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_header(write(tmp_path / "m.safetensors", b"{}", length=length))


def test_an_implausibly_long_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", b"{}", length=200 << 20)
    with path.open("r+b") as file:
        file.truncate(300 << 20)
    with pytest.raises(CheckpointError, match=r"is implausibly large \(209715200 bytes"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7, 8])
def test_a_file_shorter_than_any_header_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\x00" * size)
    with pytest.raises(CheckpointError):
        read_header(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOLDEN.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        read_header(tmp_path / "m.safetensors")


@given(st.data())
def test_any_damage_to_a_header_is_refused_or_harmless(data: st.DataObject) -> None:
    header = {"a": entry(), "b": entry("F16", [2, 2], 4, 12)}
    text = bytearray(json.dumps(header).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "m.safetensors", bytes(text), bytes(12))
        size = path.stat().st_size
        try:
            tensors = read_header(path)
        except CheckpointError:
            return
    for tensor in tensors.values():
        assert 8 + len(text) <= tensor.offset <= tensor.offset + tensor.nbytes <= size
