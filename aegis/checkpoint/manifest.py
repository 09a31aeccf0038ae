"""store.json: what a store holds, with a checksum of its own.

Checksums are CRC-32 as in zlib: the standard library computes it at the speed of a disk.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aegis.checkpoint.config import ModelConfig
from aegis.checkpoint.layout import (
    PARTS,
    ExpertGeometry,
    ResidentTensor,
    StoreLayout,
    place_experts,
    place_experts_3bit,
    place_resident,
)
from aegis.errors import StoreError
from aegis.kernels.base import Format, Segment
from aegis.kernels.sizes import FormatError

FORMAT_VERSION = 2

_PREFIX = b'{"crc32":"%08x",'
_PREFIX_NBYTES = len(_PREFIX % 0)

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
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Copied files (tokenizer, configs): size and checksum of each."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Where the store came from: name and identity of the checkpoint."""

    def with_3bit(self, checksums: Checksums) -> Manifest:
        """The same with 3-bit expert files."""
        return replace(self, experts_3bit_crc32=checksums)


def encode(manifest: Manifest) -> bytes:
    """The bytes of store.json: an object whose first key is the checksum of all that follows."""
    rest = json.dumps(_body(manifest), separators=(",", ":")).encode()[1:]
    return _PREFIX % zlib.crc32(rest) + rest


def _body(manifest: Manifest) -> dict[str, Any]:
    """Everything but the checksum, in lists and dicts as JSON reads them back."""
    layout = manifest.layout
    three = None
    if manifest.experts_3bit_crc32 is not None and layout.experts_3bit is not None:
        three = _experts(layout.experts_3bit, manifest.experts_3bit_crc32)
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
    try:
        body = json.loads(data)
        if body.get("format") != "aegis store":
            raise StoreError(f"{where} does not describe an aegis store")
        if body.get("format_version") != FORMAT_VERSION:
            raise StoreError(
                f"{where} has format version {body.get('format_version')}; this aegis reads"
                f" version {FORMAT_VERSION}: convert the model again"
            )
        if not data.startswith(_PREFIX % zlib.crc32(data[_PREFIX_NBYTES:])):
            raise StoreError(f"{where} is damaged (checksum mismatch); convert the model again")
        del body["crc32"]
        return _decode_body(body, where)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{where} is damaged ({error}); convert the model again") from error


def _decode_body(body: Mapping[str, Any], where: str) -> Manifest:
    """Places are computed afresh from shapes and formats and must agree with the recorded ones."""
    tensors = {t["name"]: (tuple(t["shape"]), Format(**t["format"])) for t in body["resident"]}
    resident, resident_nbytes = place_resident(tensors, body["layout"])
    segments = body["experts"]["segments"]
    parts = {p: (tuple(segments[p]["shape"]), Format(**segments[p]["format"])) for p in PARTS}
    experts = place_experts(parts, body["layout"])
    layout = StoreLayout(
        config=ModelConfig(body["config"], where),
        layout=body["layout"],
        resident=resident,
        resident_file_nbytes=resident_nbytes,
        moe_layers=tuple(body["moe_layers"]),
        num_experts=body["num_experts"],
        experts=experts,
        experts_3bit=place_experts_3bit(experts, body["layout"]),
    )
    three = body["experts_3bit"]
    manifest = Manifest(
        layout=layout,
        resident_crc32={tensor["name"]: tensor["crc32"] for tensor in body["resident"]},
        experts_crc32=_checksums(body["experts"], layout),
        experts_3bit_crc32=None if three is None else _checksums(three, layout),
        files={name: (size, crc) for name, (size, crc) in body["files"].items()},
        source=body["source"],
    )
    if _body(manifest) != body:
        raise FormatError("its places do not follow from its shapes")
    return manifest


def _checksums(experts: Mapping[str, Any], layout: StoreLayout) -> Checksums:
    checksums = tuple(tuple(layer) for layer in experts["crc32"])
    if [len(layer) for layer in checksums] != [layout.num_experts] * len(layout.moe_layers):
        raise FormatError("it lacks checksums of experts")
    return checksums
