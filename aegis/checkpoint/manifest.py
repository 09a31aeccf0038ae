"""store.json: what a store holds, with a checksum of its own.

Checksums are CRC-32 as in zlib: the standard library computes it at the speed of a disk. Every
format version keeps the first key and what it covers, so that a newer store is told from a damaged
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from aegis.checkpoint.config import COPIED_FILES, ModelConfig
from aegis.checkpoint.layout import (
    BIASES,
    PARTS,
    ExpertGeometry,
    ResidentTensor,
    StoreLayout,
    place_experts,
    place_experts_3bit,
    place_resident,
)
from aegis.checkpoint.plainfile import FileDamageError, is_sealed, parse_object, sealed, shown
from aegis.errors import AegisError, StoreError
from aegis.kernels.base import Format, Layout, Segment
from aegis.kernels.sizes import FormatError

FORMAT_VERSION = 2
ROUNDING_3BIT = 3
"""Of the rule by which 3-bit experts are made: another number where it gives other bytes."""

Checksums = tuple[tuple[int, ...], ...]
"""One per expert record: [moe layer index][expert]."""


@dataclass(frozen=True)
class Manifest:
    """The content of store.json."""

    layout: StoreLayout
    resident_crc32: Mapping[str, int]
    experts_crc32: Checksums
    experts_3bit_crc32: Checksums | None = None
    """None: the store has no 3-bit expert files."""
    other_3bit: bool = False
    """Whether it has some that another rule made: those are never used."""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Copied files (tokenizer, configs): size and checksum of each."""
    vision_crc32: int = 0
    """That of vision.safetensors, where there is one."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Where the store came from: name and identity of the checkpoint."""

    def with_3bit(self, checksums: Checksums) -> Manifest:
        """The same with 3-bit expert files."""
        return replace(self, experts_3bit_crc32=checksums, other_3bit=False)


def encode(manifest: Manifest) -> bytes:
    """The bytes of store.json: an object whose first key is the checksum of all that follows."""
    return sealed(_body(manifest))


def _body(manifest: Manifest) -> dict[str, Any]:
    """Everything but the checksum, in lists and dicts as JSON reads them back."""
    layout = manifest.layout
    three = None
    if manifest.experts_3bit_crc32 is not None and layout.experts_3bit is not None:
        three = _experts(layout.experts_3bit, manifest.experts_3bit_crc32)
        three["rounding"] = ROUNDING_3BIT
    vision = {"nbytes": layout.vision_nbytes, "crc32": manifest.vision_crc32}
    return {
        "format": "aegis store",
        "format_version": FORMAT_VERSION,
        "layout": layout.layout,
        "model_type": layout.model_type,
        "source": dict(manifest.source),
        "files": {name: list(entry) for name, entry in manifest.files.items()},
        "moe_layers": list(layout.moe_layers),
        "num_experts": layout.num_experts,
        "resident_nbytes": layout.resident_file_nbytes,
        "resident": [
            {**_tensor(tensor), "name": name, "crc32": manifest.resident_crc32[name]}
            for name, tensor in layout.resident.items()
        ],
        "experts": _experts(layout.experts, manifest.experts_crc32),
        "experts_3bit": three,
        **({"vision": vision} if layout.vision_nbytes else {}),
        "config": layout.config.raw,
    }


def _tensor(tensor: ResidentTensor | Segment) -> dict[str, Any]:
    fmt = tensor.format
    return {
        "offset": tensor.offset,
        "nbytes": tensor.nbytes,
        "shape": list(tensor.shape),
        "format": {
            "kind": fmt.kind,
            "dtype": fmt.dtype,
            "bits": fmt.bits,
            "group_size": fmt.group_size,
        },
    }


def _experts(geometry: ExpertGeometry, checksums: Checksums) -> dict[str, Any]:
    return {
        "stride": geometry.stride,
        "record_nbytes": geometry.record_nbytes,
        "segments": {name: _tensor(segment) for name, segment in geometry.segments.items()},
        "crc32": [list(layer) for layer in checksums],
    }


def decode(data: bytes, where: str) -> Manifest:
    """Read store.json and check that it is whole and consistent.

    Raises:
        StoreError: it is damaged, or of another version.
    """
    whole = is_sealed(data)
    try:
        body = parse_object(data)
    except FileDamageError as error:
        raise StoreError(f"{where} is damaged: it {error}; convert the model again") from error
    if body.get("format") != "aegis store":
        raise StoreError(f"{where} does not describe an aegis store; convert the model again")
    if not whole and "crc32" in body:
        raise StoreError(f"{where} is damaged (checksum mismatch); convert the model again")
    _refuse_other_version(body.get("format_version"), where)
    if not whole:
        raise StoreError(f"{where} is damaged (no checksum); convert the model again")
    del body["crc32"]
    try:
        return _decode_body(body, where)
    except KeyError as error:
        raise StoreError(f"{where} is damaged (no {error}); convert the model again") from error
    except (FormatError, AegisError) as error:
        raise StoreError(f"{where} is damaged ({error}); convert the model again") from error


def _refuse_other_version(version: Any, where: str) -> None:
    if type(version) is int and version == FORMAT_VERSION:
        return
    if type(version) is int and version > FORMAT_VERSION:
        raise StoreError(
            f"{where} has format version {shown(version)}, which a newer aegis wrote; this one"
            f" reads version {FORMAT_VERSION}: update aegis or convert the model again"
        )
    raise StoreError(
        f"{where} has format version {shown(version)}; this aegis reads version"
        f" {FORMAT_VERSION}: convert the model again"
    )


def _decode_body(body: Mapping[str, Any], where: str) -> Manifest:
    """Places are computed afresh from shapes and formats and must agree with the recorded ones."""
    kind: Layout = _one_of(body["layout"], get_args(Layout))
    entries = [_a(dict, entry) for entry in _a(list, body["resident"])]
    tensors = {_a(str, entry["name"]): _shape_format(entry) for entry in entries}
    resident, resident_nbytes = place_resident(tensors, kind)
    segments = _a(dict, _a(dict, body["experts"])["segments"])
    names = [*PARTS, *filter(segments.__contains__, BIASES)]
    parts = {name: _segment(name, _a(dict, segments[name])) for name in names}
    experts = place_experts(parts, kind)
    vision = _a(dict, body.get("vision", {"nbytes": 0, "crc32": 0}))
    layout = StoreLayout(
        config=ModelConfig(_a(dict, body["config"]), where),
        layout=kind,
        resident=resident,
        resident_file_nbytes=resident_nbytes,
        moe_layers=tuple(_whole(layer, 0, 1 << 16) for layer in _a(list, body["moe_layers"])),
        num_experts=_whole(body["num_experts"], 1, 1 << 16),
        experts=experts,
        experts_3bit=place_experts_3bit(experts, kind),
        vision_nbytes=_whole(vision["nbytes"], 0, 1 << 50),
    )
    if not layout.moe_layers or list(layout.moe_layers) != sorted(set(layout.moe_layers)):
        raise FormatError("its layers are not in order")
    three = body["experts_3bit"]
    other_3bit = three is not None and _a(dict, three).get("rounding") != ROUNDING_3BIT
    if other_3bit:
        three, body = None, {**body, "experts_3bit": None}
    manifest = Manifest(
        layout=layout,
        resident_crc32={entry["name"]: _crc32(entry["crc32"]) for entry in entries},
        experts_crc32=_checksums(body["experts"], layout),
        experts_3bit_crc32=None if three is None else _checksums(three, layout),
        other_3bit=other_3bit,
        files={
            _one_of(name, COPIED_FILES): _size_crc32(entry)
            for name, entry in _a(dict, body["files"]).items()
        },
        vision_crc32=_crc32(vision["crc32"]),
        source=_a(dict, body["source"]),
    )
    if _body(manifest) != body:
        raise FormatError("its places do not follow from its shapes")
    return manifest


def _checksums(experts: Mapping[str, Any], layout: StoreLayout) -> Checksums:
    layers = [_a(list, layer) for layer in _a(list, experts["crc32"])]
    if [len(layer) for layer in layers] != [layout.num_experts] * len(layout.moe_layers):
        raise FormatError("it lacks checksums of experts")
    return tuple(tuple(map(_crc32, layer)) for layer in layers)


def _a(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise FormatError(f"it holds {shown(value)} where a {kind.__name__} belongs")
    return value


def _one_of(value: Any, words: tuple[str, ...]) -> Any:
    if value not in words:
        raise FormatError(f"it holds {shown(value)} where one of {', '.join(words)} belongs")
    return value


def _whole(value: Any, least: int, most: int) -> int:
    # Not isinstance: true is an int to Python.
    if type(value) is not int or not least <= value <= most:
        raise FormatError(f"it holds {shown(value)} where {least} to {most} belongs")
    return value


def _crc32(value: Any) -> int:
    return _whole(value, 0, (1 << 32) - 1)


def _size_crc32(entry: Any) -> tuple[int, int]:
    size, crc = _a(list, entry) if len(_a(list, entry)) == 2 else (None, None)
    return _whole(size, 0, 1 << 50), _crc32(crc)


def _shape_format(entry: Mapping[str, Any]) -> tuple[tuple[int, ...], Format]:
    shape = tuple(_whole(size, 1, 1 << 40) for size in _a(list, entry["shape"]))
    fmt = _a(dict, entry["format"])
    kind = _one_of(fmt["kind"], ("dense", "affine", "mxfp4"))
    most = (0, 0) if kind == "dense" else (32, 1 << 20)
    found = Format(
        kind,
        _one_of(fmt["dtype"], ("bf16", "f16", "f32", "e8m0")),
        _whole(fmt["bits"], 0, most[0]),
        _whole(fmt["group_size"], 0, most[1]),
    )
    # Kernels take this for granted: they would read beyond the end of anything narrower.
    if len(shape) == 1 and found != Format("dense", "f32"):
        raise FormatError("it holds a vector that is not plain f32")
    return shape, found


def _segment(name: str, entry: Mapping[str, Any]) -> tuple[tuple[int, ...], Format]:
    shape, fmt = _shape_format(entry)
    if len(shape) != (1 if name in BIASES else 2):
        raise FormatError(f"an expert's {name} has the shape {list(shape)}")
    return shape, fmt
