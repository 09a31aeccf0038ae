"""A store of the family qwen3_5_moe as a model of mlx-lm: the same weights, all in memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from aegis.checkpoint.layout import PARTS, ResidentTensor
from aegis.checkpoint.store import Store
from aegis.errors import AegisError
from aegis.kernels.base import Format, Weight
from aegis.kernels.formats import unpack
from aegis.kernels.mlx.device import DTYPES
from aegis.kernels.mlx.sizes import segment_ranges

FAMILY = "qwen3_5_moe"
_INSIDE = "language_model.model."
_NAMES = ("weight", "scales", "biases")
_IN_F32 = ("A_log",)
"""What mlx-lm keeps so whatever it computes in."""


def load(store: Store, dtype: mx.Dtype = mx.bfloat16) -> Any:
    """The model. Codes, scales and biases are the store's own; vectors become ``dtype``.

    Raises:
        AegisError: the store holds another family, or another layout than MLX's.
    """
    from mlx import nn
    from mlx_lm.models.qwen3_5_moe import Model, ModelArgs

    layout = store.layout
    if layout.model_type != FAMILY or layout.layout != "row":
        raise AegisError(
            f"{store.path} holds a {layout.model_type} in layout {layout.layout}; mlx-lm takes"
            f" only {FAMILY} in layout row from here, as --layout row converts it"
        )
    model = Model(ModelArgs.from_dict(dict(layout.config.raw)))
    formats = {_path(name): entry.format for name, entry in layout.resident.items()}
    for layer in layout.moe_layers:
        for part in PARTS:
            formats[_expert_path(layer, part)] = layout.experts.segments[part].format

    def choose(path: str, module: Any) -> Any:
        fmt = formats.get(path)
        if fmt is None or fmt.kind == "dense":
            return False
        return {"group_size": fmt.group_size, "bits": fmt.bits, "mode": fmt.kind}

    nn.quantize(model, class_predicate=choose)
    weights = [one for each in layout.resident.values() for one in _resident(store, each, dtype)]
    for index, layer in enumerate(layout.moe_layers):
        weights += _experts(store, index, layer, dtype)
    model.load_weights(weights)
    mx.eval(model.parameters())
    model.eval()
    return model


def _path(name: str) -> str:
    return f"language_model.{name}" if name == "lm_head" else _INSIDE + name


def _expert_path(layer: int, part: str) -> str:
    return f"{_INSIDE}layers.{layer}.mlp.switch_mlp.{part}"


def _array(raw: Any, fmt: Format, codes: bool, dtype: mx.Dtype | None) -> mx.array:
    """Numbers that numpy knows as unsigned ones of the same width."""
    array = mx.array(raw)
    if not codes:
        array = array.view(DTYPES[fmt.dtype])
    # What vectors are stored as is wider than they were in the checkpoint.
    return array if codes or dtype is None else array.astype(dtype)


def _resident(store: Store, entry: ResidentTensor, dtype: mx.Dtype) -> list[tuple[str, mx.array]]:
    with store.resident_path.open("rb") as file:
        file.seek(entry.offset)
        data = np.frombuffer(file.read(entry.nbytes), np.uint8)
    parts = unpack(Weight(entry.shape, entry.format, "row", data))
    path, dense = _path(entry.name), entry.format.kind == "dense"
    arrays = [part for part in (parts.weight, parts.scales, parts.biases) if part is not None]
    if not dense:
        made = [_array(raw, entry.format, not n, dtype) for n, raw in enumerate(arrays)]
        return [(f"{path}.{name}", one) for name, one in zip(_NAMES, made, strict=False)]
    own = path.rpartition(".")[2]
    vector = _array(arrays[0], entry.format, False, mx.float32 if own in _IN_F32 else dtype)
    if own == "conv1d":
        taps = store.layout.config.int("linear_conv_kernel_dim")
        vector = vector.reshape(taps, -1).T[..., None]
    return [(path if own in (*_IN_F32, "dt_bias") else f"{path}.weight", vector)]


def _experts(store: Store, index: int, layer: int, dtype: mx.Dtype) -> list[tuple[str, mx.array]]:
    """A layer's experts, stacked."""
    layout = store.layout
    records = np.fromfile(store.expert_paths()[index], np.uint8)
    records = records.reshape(layout.num_experts, layout.experts.stride)
    found = []
    for part in PARTS:
        segment = layout.experts.segments[part]
        rows, fmt = segment.shape[0], segment.format
        for n, (place, name) in enumerate(zip(segment_ranges(segment), _NAMES, strict=False)):
            raw = np.ascontiguousarray(records[:, place.offset : place.offset + place.nbytes])
            codes = not n and fmt.kind != "dense"
            kind = np.uint32 if codes else f"u{DTYPES[fmt.dtype].size}"
            numbers = raw.view(kind).reshape(layout.num_experts, rows, -1)
            path = f"{_expert_path(layer, part)}.{name}"
            found.append((path, _array(numbers, fmt, codes, dtype)))
    return found
