"""A checkpoint of MLX weights in float32, its experts of 4 bits by way of 3 bits; numpy only.

The rule is the README's ("What 3 bits cost"), written a second time: nothing of aegis is imported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDENS = Path("tests/goldens")

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ids = Sequence[int]


class NoFourBitsError(Exception):
    """A checkpoint has no experts from which 3-bit ones are derived."""


def read(folder: Path) -> dict[str, NDArray[Any]]:
    """The tensors of model.safetensors; bfloat16 is widened to float32."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        kind = {"BF16": np.uint16, "F32": np.float32, "U32": np.uint32, "U8": np.uint8}
        first, end = (start + at for at in entry["data_offsets"])
        values = np.frombuffer(data[first:end], kind[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = values
    return tensors


def dense(folder: Path, three: bool) -> dict[str, F32]:
    """Every weight in float32; the experts of 4 bits by way of 3 bits, where ``three``.

    Raises:
        NoFourBitsError: there are none.
    """
    tensors = read(folder)
    config = json.loads((folder / "config.json").read_text())["quantization"]
    weights, derived = {}, False
    for name, values in tensors.items():
        module, _, kind = name.rpartition(".")
        if module + ".scales" not in tensors or kind == "bias":
            weights[name] = values
        elif kind == "weight":
            own = {"mode": "affine", **config[module]} if module in config else config
            if own["mode"] != "affine":
                raise NoFourBitsError(f"{folder} has experts of {own['mode']}")
            codes = codes_of(values, own["bits"], own["group_size"])
            params = [tensors[f"{module}.{p}"][..., None] for p in ("scales", "biases")]
            becomes_three = three and ".switch_mlp." in module and own["bits"] == 4
            derived |= becomes_three
            restored = (by_way_of_3_bits if becomes_three else affine)(codes, *params)
            weights[name] = restored.reshape(*restored.shape[:-2], -1)
    if three and not derived:
        raise NoFourBitsError(f"{folder} has experts of other widths")
    return weights


def codes_of(words: NDArray[np.uint32], bits: int, group_size: int) -> NDArray[np.int64]:
    """4-bit or 8-bit codes in words, as [..., groups, codes of a group]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.astype(np.int64).reshape(*words.shape[:-1], -1, group_size)


def affine(codes: NDArray[np.int64], scale: NDArray[Any], bias: NDArray[Any]) -> F32:
    """scale * code + bias, rounded to float32 once: the float64 sum of such numbers is exact."""
    return (scale.astype(np.float64) * codes + bias.astype(np.float64)).astype(np.float32)


def to_bf16(values: F64) -> F64:
    """Float64 rounded to float32, and that to the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def by_way_of_3_bits(codes: NDArray[np.int64], scale: F32, bias: F32) -> F32:
    """What groups of 4-bit codes are after they became 3-bit ones.

    Two neighbouring codes become one. The scale is that of the least squares line from new codes
    to old values (2 old steps where a group has one new code), the bias that of least squares for
    the scale as it is stored. A group that spans at most eight codes keeps them and its scale, with
    its least code as the new zero, where this has a smaller sum of squared errors.
    """
    s, b, n = scale.astype(np.float64), bias.astype(np.float64), codes.shape[-1]
    old, halves = s * codes + b, codes >> 1

    def total(x: NDArray[Any]) -> NDArray[Any]:
        return x.sum(axis=-1, keepdims=True)

    spread = n * total(halves**2) - total(halves) ** 2
    common = n * total(halves * codes) - total(halves) * total(codes)
    slope = np.where(spread == 0, 2, common / np.maximum(spread, 1))
    new_scale = to_bf16(s * slope)
    new_bias = to_bf16((total(old) - new_scale * total(halves)) / n)
    fitted = new_scale * halves + new_bias

    least = codes.min(axis=-1, keepdims=True)
    kept = s * (codes - least) + to_bf16(b + s * least)
    narrow = codes.max(axis=-1, keepdims=True) - least < 8
    better = narrow & (total((kept - old) ** 2) < total((fitted - old) ** 2))
    return np.where(better, kept, fitted).astype(np.float32)


def nll(logits: F32, ids: Ids) -> F32:
    """-ln p of each id but the first."""
    rows = logits[:-1].astype(np.float64)
    top = rows.max(axis=-1)
    sums = top + np.log(np.exp(rows - top[:, None]).sum(axis=-1))
    return (sums - rows[np.arange(len(rows)), ids[1:]]).astype(np.float32)
