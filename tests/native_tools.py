"""Random il16 weights, expert slots and numpy oracles for tests of the native kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from aegis.kernels import formats
from aegis.kernels.base import (
    ExpertsSpec,
    Format,
    Routing,
    Segment,
    SwigluClamp,
    Weight,
    WorkspaceSpec,
)
from aegis.kernels.native import _native
from aegis.kernels.sizes import MXFP4, align_up

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def aligned(nbytes: int, padding: int = 64) -> Any:
    """Zeroed bytes on a cache line with readable padding behind."""
    raw = np.zeros(nbytes + padding + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


MX = 64
"""Stands for mxfp4 among widths."""


def fmt_of(bits: int, dtype: Any = "bf16", group_size: int = 64) -> Format:
    """Affine of ``bits``, dense for 0, or mxfp4 for MX."""
    if bits == MX:
        return MXFP4
    return Format("affine", dtype, bits, group_size) if bits else Format("dense", dtype)


def random_arrays(
    rng: np.random.Generator, shape: tuple[int, ...], fmt: Format, top: int | None = None
) -> formats.MlxArrays:
    """Checkpoint arrays of a plausible weight or bias; codes below ``top``."""
    if len(shape) == 1:
        return formats.MlxArrays(formats.from_f32(normal(rng, *shape), fmt))
    rows, cols = shape
    if fmt.kind == "dense":
        return formats.MlxArrays(formats.from_f32(normal(rng, rows, cols) * np.float32(0.05), fmt))
    if fmt.kind == "mxfp4":
        codes = rng.integers(0, 16, shape, dtype=np.uint8)
        exponents = rng.integers(119, 123, (rows, cols // 32), dtype=np.uint8)
        return formats.MlxArrays(formats.pack_codes(codes, 4), exponents)
    codes = rng.integers(0, top or 1 << fmt.bits, shape, dtype=np.uint8)
    scales = normal(rng, rows, cols // fmt.group_size) * np.float32(0.1 / (1 << fmt.bits))
    biases = normal(rng, rows, cols // fmt.group_size) * np.float32(0.05)
    return formats.MlxArrays(
        formats.pack_codes(codes, fmt.bits),
        formats.from_f32(scales, fmt),
        formats.from_f32(biases, fmt),
    )


def stored(arrays: formats.MlxArrays, shape: tuple[int, int], fmt: Format) -> Weight:
    """The il16 weight of checkpoint arrays."""
    data = aligned(formats.nbytes(shape, fmt, "il16"))
    formats.pack(arrays, fmt, "il16", out=data)
    return Weight(shape, fmt, "il16", data)


def random_weight(rng: np.random.Generator, shape: tuple[int, int], fmt: Format) -> Weight:
    """A plausible il16 weight."""
    return stored(random_arrays(rng, shape, fmt), shape, fmt)


def normal(rng: np.random.Generator, *shape: int) -> Any:
    """Standard normal float32."""
    return rng.standard_normal(shape).astype(np.float32)


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Use the kernels of one instruction set for a while."""
    before = _native.isa()
    _native.select_isa(name)
    try:
        yield
    finally:
        _native.select_isa(before)


@dataclass
class Slots:
    """Slot memory with random experts; expert e lies in slot ``slot_of[e]``."""

    num_slots: int
    stride: int
    base: int
    data: Any
    slot_of: Any
    experts: list[dict[str, Weight]]


def random_slots(
    rng: np.random.Generator, spec: ExpertsSpec, arrays: list[dict[str, formats.MlxArrays]]
) -> Slots:
    """Experts packed into slots in random order, with two slots to spare."""
    end = max(part.offset + part.nbytes for part in spec.segments.values())
    stride = align_up(end + 64, 4096)
    count = spec.num_experts + 2
    data = aligned(count * stride)
    slot_of = rng.permutation(count)[: spec.num_experts].astype(np.int32)
    experts = []
    for expert, parts in enumerate(arrays):
        weights = {}
        for name, part in spec.segments.items():
            start = int(slot_of[expert]) * stride + part.offset
            view = data[start : start + part.nbytes]
            formats.pack(parts[name], part.format, "il16", out=view)
            weights[name] = Weight(part.shape, part.format, "il16", view)
        experts.append(weights)
    return Slots(count, stride, int(data.ctypes.data), data, slot_of, experts)


def experts_spec(
    hidden: int,
    inner: int,
    experts: int,
    choices: int,
    shared: int,
    bits: tuple[int, int, int],
    group_size: int = 64,
    biases: bool = False,
) -> ExpertsSpec:
    """A spec whose three matrices have ``bits`` each."""
    wanted: dict[str, tuple[tuple[int, ...], Format]] = {}
    for name, width in zip(PROJECTIONS, bits, strict=True):
        shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
        wanted[name] = shape, fmt_of(width, group_size=group_size)
    if biases:
        wanted |= {f"{n}.bias": (wanted[n][0][:1], Format("dense", "f32")) for n in PROJECTIONS}
    segments, offset = {}, 0
    for name, (each, fmt) in wanted.items():
        size = formats.nbytes(each, fmt, "il16")
        segments[name] = Segment(offset, size, each, fmt)
        offset = align_up(offset + size, 64)
    return ExpertsSpec(hidden, inner, experts, choices, shared, "il16", segments)


def workspace_spec(spec: ExpertsSpec, max_tokens: int) -> WorkspaceSpec:
    """A workspace for an experts block alone."""
    return WorkspaceSpec(
        max_tokens=max_tokens,
        context=64,
        hidden_size=spec.hidden_size,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        moe_intermediate_size=spec.moe_intermediate_size,
        shared_expert_intermediate_size=spec.shared_expert_intermediate_size,
        num_experts=spec.num_experts,
        num_experts_per_tok=spec.num_experts_per_tok,
        vocab_size=64,
        max_logit_rows=1,
        threads=2,
    )


def random_routing(rng: np.random.Generator, spec: ExpertsSpec, rows: int) -> Routing:
    """Rows that chose experts at random."""
    choices, hidden = spec.num_experts_per_tok, spec.hidden_size
    picks = [rng.permutation(spec.num_experts)[:choices] for _ in range(rows)]
    experts = np.sort(np.array(picks, np.int32).reshape(rows, choices), axis=1)
    weights = rng.random((rows, choices), np.float32)
    return Routing(experts, weights, normal(rng, rows, hidden), np.empty(0, np.int32))


def rows_of(routing: Routing, start: int, stop: int) -> Routing:
    """Some rows of a routing."""
    return Routing(
        routing.experts[start:stop],
        routing.weights[start:stop],
        routing.normed[start:stop],
        routing.guess,
    )


def ffn(x: Any, expert: dict[str, Weight], clamp: SwigluClamp | None = None) -> Any:
    """SwiGLU in float64."""
    values = {name: formats.dequantize(part).astype(np.float64) for name, part in expert.items()}
    zero = np.zeros(1)
    gate, up = (
        x @ values[name].T + values.get(f"{name}.bias", zero) for name in ("gate_proj", "up_proj")
    )
    alpha = 1.0
    if clamp is not None:
        gate, up = np.minimum(gate, clamp.limit), 1 + np.clip(up, -clamp.limit, clamp.limit)
        alpha = clamp.alpha
    inner = gate / (1 + np.exp(-alpha * gate)) * up
    return inner @ values["down_proj"].T + values.get("down_proj.bias", zero)


def oracle(
    x: Any,
    routing: Routing,
    slots: Slots,
    shared: dict[str, Weight],
    multiplier: float = 1.0,
    clamp: SwigluClamp | None = None,
) -> Any:
    """The experts block in float64."""
    out = np.zeros(x.shape)
    for row, normed in enumerate(routing.normed.astype(np.float64)):
        pairs = zip(routing.experts[row], routing.weights[row].astype(np.float64), strict=True)
        for expert, weight in pairs:
            out[row] += weight * ffn(normed, slots.experts[expert], clamp)
        if shared:
            gate = shared.get("shared_expert_gate")
            z = 0.0 if gate is None else (formats.dequantize(gate).astype(np.float64) @ normed)[0]
            out[row] += (1 if gate is None else 1 / (1 + np.exp(-z))) * ffn(normed, shared, clamp)
    return x.astype(np.float64) + multiplier * out
