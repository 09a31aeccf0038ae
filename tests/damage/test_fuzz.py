"""Whatever bytes a file holds, its reader ends at once with what it says or with a typed error."""

from __future__ import annotations

import json
import shutil
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from damages import INDEX, MODEL, SHARDS, sealed
from families import FAMILIES, YARN
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import TOKENIZER, Choices, config_of, write_checkpoint

from aegis import heap
from aegis.checkpoint.config import ModelConfig
from aegis.checkpoint.manifest import decode, encode
from aegis.checkpoint.plainfile import FileDamageError, parse_object
from aegis.checkpoint.safetensors import read_header
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import Store
from aegis.convert.convert import convert
from aegis.convert.layout import layout_of_checkpoint
from aegis.errors import CheckpointError, StoreError, TokenizerError
from aegis.models import check_layout, family
from aegis.text.tokenizer import Tokenizer

SMALL_NBYTES = 4 << 20
"""What reading the small files of these tests may take."""

awkward = st.sampled_from(
    [0, -1, 1, 2, 3, 2**31, 2**32, 2**40, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**300]
)
scalars = (
    st.none()
    | st.booleans()
    | awkward
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["U8", "F16", "BF16", "U32", "\ud800", "\0", "a\nb", "..", "/", "x" * 5000])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=8), values, max_size=5)


def check_sentence(error: Exception) -> None:
    assert str(error).isprintable()
    assert 0 < len(str(error)) < 1000


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < SMALL_NBYTES
    finally:
        tracemalloc.stop()


def paths(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, by keys and indices; of long lists the first few."""
    if at:
        yield at
    inside = tree.items() if isinstance(tree, dict) else []
    if isinstance(tree, list):
        inside = list(enumerate(tree))[:6]
    for key, value in inside:
        yield from paths(value, (*at, key))


@st.composite
def edited(draw: st.DrawFn, tree: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with a few values replaced, removed or added."""
    changed: dict[str, Any] = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 3))):
        *lead, last = draw(st.sampled_from(list(paths(changed)) or [("x",)]))
        parent: Any = changed
        for key in lead:
            parent = parent[key]
        what = draw(st.sampled_from(["replace", "remove", "add"]))
        if what == "replace":
            parent[last] = draw(values)
        elif what == "remove" and (isinstance(parent, list) or last in parent):
            del parent[last]
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=6))] = draw(values)
    return changed


@st.composite
def scratched(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with a few changed, and perhaps with the end cut off."""
    content = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.just(len(content)) | st.integers(0, len(content)))])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving memory back takes most of the time of opening a small tokenizer."""
    monkeypatch.setattr(heap, "give_back", lambda: None)


# JSON itself


@given(st.binary(max_size=200) | objects.map(lambda tree: json.dumps(tree).encode()))
@example(b'{"a":1e999}')
@example(b"\xef\xbb\xbf{}")
def test_json_is_what_the_standard_library_reads_or_refused(data: bytes) -> None:
    try:
        found = parse_object(data)
    except FileDamageError as error:
        check_sentence(error)
        return
    assert repr(found) == repr(json.loads(data.decode("utf-8-sig")))


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"a":['])
@pytest.mark.parametrize("depth", [500, 5_000, 500_000])
def test_nesting_of_any_depth_is_refused_or_read(opening: bytes, depth: int) -> None:
    with pytest.raises(FileDamageError):
        parse_object(opening * depth)


# Safetensors headers

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "b": {"dtype": "F16", "shape": [2, 2], "data_offsets": [4, 12]},
    "c": {"dtype": "F32", "shape": [0, 5], "data_offsets": [12, 12]},
    "d": {"dtype": "F4", "shape": [4, 2], "data_offsets": [12, 16]},
}


def check_header(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(content)
        try:
            with little_memory():
                tensors = read_header(path)
        except CheckpointError as error:
            check_sentence(error)
            return
    begin = end = 8 + int.from_bytes(content[:8], "little")
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        assert tensor.name.isprintable()
        assert begin <= tensor.offset
        assert tensor.nbytes == 0 or tensor.offset == end
        end = max(end, tensor.offset + tensor.nbytes)
    assert end == len(content)


def with_length(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@given(edited(HEADER).map(lambda tree: json.dumps(tree).encode()), st.integers(0, 20))
def test_any_header_is_refused_or_covers_its_file_exactly(header: bytes, size: int) -> None:
    check_header(with_length(header, bytes(size)))


@given(scratched(with_length(json.dumps(HEADER).encode(), bytes(16))))
def test_any_damaged_file_is_refused_or_covers_its_file_exactly(content: bytes) -> None:
    check_header(content)


@given(st.binary(max_size=64) | st.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little")))
def test_any_bytes_are_refused_or_a_header(content: bytes) -> None:
    check_header(content)


# config.json


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("fuzz") / "m", 1, num_hidden_layers=1, bits=(4, 8), num_experts=2
    )


def test_any_config_is_refused_or_describes_the_tensors(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    original = path.read_bytes()

    @given(
        edited(json.loads(original)).map(lambda tree: json.dumps(tree).encode())
        | scratched(original)
    )
    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            with little_memory():
                layout = layout_of_checkpoint(checkpoint)
        except CheckpointError as error:
            check_sentence(error)
            return
        check_layout(layout)

    try:
        check()
    finally:
        path.write_bytes(original)


SIZES = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "layer_types",
    "text_config",
    "tie_word_embeddings",
    "norm_topk_prob",
    "qkv_bias",
    "quantization",
]


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@given(data=st.data())
def test_any_sizes_are_refused_or_small_enough_to_list(
    model_type: str, data: st.DataObject
) -> None:
    original = config_of(Choices(model_type=model_type), {})
    keys = st.sampled_from(sorted({*SIZES, *original} - {"model_type"}))
    yarn = st.dictionaries(st.sampled_from(sorted(YARN)), scalars, min_size=1).map(YARN.__or__)
    anything = scalars | st.integers(1, 2000) | st.lists(scalars, max_size=3) | yarn
    changed = data.draw(st.dictionaries(keys, anything, min_size=1, max_size=8))
    config = ModelConfig({**original, **changed})
    try:
        shape = family(config.model_type).shape(config)
        assert config.quantization is None or config.quantization.default
    except CheckpointError as error:
        check_sentence(error)
        return
    assert 1 <= shape.num_experts_per_tok <= shape.num_experts <= 1 << 14
    assert 1 <= len(shape.moe_layers) <= shape.num_hidden_layers <= 1 << 10
    assert shape.num_attention_heads % shape.num_key_value_heads == 0
    assert shape.latent or shape.head_dim % 2 == 0
    tensors = family(config.model_type).tensor_map(config).resident
    assert all(size > 0 for tensor in tensors for size in tensor.shape)


# The index of shards


def test_any_index_is_refused_or_places_every_tensor(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", 1, num_hidden_layers=1, num_experts=2, shards=3)
    original = (folder / INDEX).read_bytes()

    @given(edited(json.loads(original)).map(lambda tree: json.dumps(tree).encode()))
    def check(content: bytes) -> None:
        (folder / INDEX).write_bytes(content)
        try:
            with little_memory():
                found = Checkpoint.open(folder)
        except CheckpointError as error:
            check_sentence(error)
            return
        assert {file.name for file in found.files} == set(SHARDS)

    check()


# store.json


@pytest.fixture(scope="module")
def store(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(checkpoint, tmp_path_factory.mktemp("fuzz") / "s", experts3bit=True).path


def check_manifest(folder: Path, content: bytes) -> None:
    try:
        with little_memory():
            manifest = decode(content, "store.json")
            check_layout(manifest.layout)
    except (StoreError, CheckpointError) as error:
        check_sentence(error)
        return
    assert json.loads(encode(manifest)) == json.loads(content)
    (folder / "store.json").write_bytes(content)
    try:
        Store.open(folder)
    except StoreError as error:
        check_sentence(error)


def test_any_manifest_with_a_fitting_checksum_is_refused_or_consistent(
    store: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(store, tmp_path / "s"))
    body = json.loads((store / "store.json").read_bytes())
    del body["crc32"]

    @given(edited(body))
    def check(tree: dict[str, Any]) -> None:
        text = json.dumps(tree, separators=(",", ":")).encode()
        check_manifest(folder, sealed(text))

    check()


def test_any_damaged_manifest_is_refused(store: Path) -> None:
    original = (store / "store.json").read_bytes()

    @given(scratched(original))
    def check(content: bytes) -> None:
        if content != original:
            with pytest.raises(StoreError), little_memory():
                decode(content, "store.json")

    check()


@given(content=st.binary(max_size=100) | objects.map(lambda tree: json.dumps(tree).encode()))
@example(content=b'{"crc32":"00000000"}')
@example(content=b'{"format":"aegis store","format_version":1e400}')
def test_anything_else_is_no_manifest(content: bytes) -> None:
    with pytest.raises(StoreError):
        decode(content, "store.json")


# tokenizer.json and what stands beside it


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_any_tokenizer_is_refused_or_encodes_and_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], quick: None, name: str
) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / file, tmp_path / file)
    original = (TOKENIZER / name).read_bytes()
    settings = json.loads(original)

    @given(edited(settings).map(lambda tree: json.dumps(tree).encode()) | scratched(original))
    def check(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        try:
            tokenizer = Tokenizer.open(tmp_path)
        except TokenizerError as error:
            check_sentence(error)
        else:
            tokenizer.decode(tokenizer.encode("Hello"))
        assert capfd.readouterr().err == ""

    check()


# Everything at once


def test_a_checkpoint_damaged_anywhere_converts_or_is_refused_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "m"))
    original = (folder / MODEL).read_bytes()
    out = tmp_path / "out"

    @given(scratched(original))
    def check(content: bytes) -> None:
        (folder / MODEL).write_bytes(content)
        shutil.rmtree(out, ignore_errors=True)
        try:
            convert(folder, out / "s")
        except CheckpointError as error:
            check_sentence(error)
            assert not out.exists() or not list(out.iterdir())

    check()
