"""From a checkpoint's tensor names to store names, with nothing missing and nothing left over.

A family describes what it needs as a ``TensorMap``; ``resolve`` finds every tensor in the
checkpoint, checks shapes and types, and refuses anything that is neither used nor ignorable.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from aegis.checkpoint.config import FP8_BLOCK, QuantSpec
from aegis.checkpoint.safetensors import TensorInfo
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.tensor_map import ExpertNames, HeadPart, ResidentName, TensorMap
from aegis.errors import CheckpointError
from aegis.kernels.base import Format, Numbers
from aegis.kernels.sizes import MXFP4, FormatError, check_format

_DTYPES: dict[str, Numbers] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_NUMBERS: dict[str, Literal["bf16", "e8m0"]] = {"affine": "bf16", "mxfp4": "e8m0"}
_FP8 = "F8_E4M3"


@dataclass(frozen=True)
class BlockScales:
    """The scales of a weight in FP8: [matrices, ceil(rows / 128), ceil(columns / 128)]."""

    tensor: TensorInfo
    rows: int
    """Of one matrix."""

    @property
    def row_nbytes(self) -> int:
        """Bytes of the scales of one row of blocks."""
        return self.tensor.nbytes // math.prod(self.tensor.shape[:-1])

    @property
    def format(self) -> Format:
        """That of the scales."""
        return Format("dense", _DTYPES[self.tensor.dtype])

    def row(self, row: int) -> int:
        """The row of blocks that a row of the weight lies in."""
        matrix, inner = divmod(row, self.rows)
        return matrix * -(-self.rows // FP8_BLOCK) + inner // FP8_BLOCK


@dataclass(frozen=True)
class SourceWeight:
    """A weight in the checkpoint: one tensor if dense; code words, scales and, if affine, biases.

    Stacked experts are one weight whose rows are those of all experts.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    tensors: tuple[TensorInfo, ...]
    target: Format | None = None
    """What a plain weight becomes while it is converted; None: it stays what it is."""
    heads: tuple[SourceWeight, HeadPart] | None = None
    """The weight it is a part of. One that is quantised becomes plain, and then its target."""
    rows: tuple[tuple[int, int], ...] = ()
    """Which rows of the tensors these are, from and to, in this order; empty: all of them."""
    source_rows: int = 0
    """How many the tensors have, where these are not all."""
    turn: tuple[int, int] = (0, 1)
    """Rows of several weights follow each other in turn: which turn is this one's, of how many."""
    transposed: bool = False
    """The tensor is [matrices, inputs, rows], those in turn with these among them."""
    taps: int = 0
    """Above 0: every channel's taps, to be stored tap by tap."""
    add_one: bool = False
    """The numbers are less by 1 than what is stored."""
    scales: BlockScales | None = None
    """Of one in FP8: its tensor holds codes, which become numbers of its format when read."""

    @property
    def stored(self) -> Format:
        """The format in which conversion takes it up."""
        return self.target or self.format

    def row_nbytes(self, part: int) -> int:
        """Bytes of one of the tensors that a row takes to read: its own, and those in turn with
        it."""
        return self.tensors[part].nbytes // (self.source_rows or self.shape[0]) * self.turn[1]

    def places(self, rows: range) -> list[range]:
        """Where these rows lie in the tensors."""
        if not self.rows:
            return [rows]
        found, at = [], 0
        for start, stop in self.rows:
            first, last = max(rows.start, at), min(rows.stop, at + stop - start)
            if first < last:
                found.append(range(start + first - at, start + last - at))
            at += stop - start
        return found


@dataclass(frozen=True)
class ExpertSource:
    """One matrix of one layer's experts: one stacked weight, or one weight per expert."""

    weights: tuple[SourceWeight, ...]
    rows: int
    """Rows of one expert."""
    first: int = 0
    """Row of an expert's part of a stacked weight at which this matrix begins."""
    stride: int = 0
    """Rows of an expert's part, where it holds more than this matrix."""

    def of(self, expert: int) -> tuple[SourceWeight, int]:
        """The weight that holds an expert, and the expert's first row in it."""
        if len(self.weights) == 1:
            return self.weights[0], expert * (self.stride or self.rows) + self.first
        return self.weights[expert], 0


@dataclass(frozen=True)
class Resolved:
    """Where everything that a store needs lies in the checkpoint."""

    resident: dict[str, SourceWeight]
    experts: dict[int, dict[str, ExpertSource]]
    """By model layer, then by matrix."""
    vision: tuple[TensorInfo, ...] = ()
    """What is kept as it is."""


def resolve(checkpoint: Checkpoint, tensor_map: TensorMap) -> Resolved:
    """Find and check every tensor.

    Raises:
        CheckpointError: naming the tensor that is missing, left over, or of another shape or type.
    """
    finder = _Finder(checkpoint, tensor_map)
    published = any(map(finder.is_published, tensor_map.resident))
    resident = {}
    for entry in tensor_map.resident:
        if entry.optional and not finder.has(entry.source or entry.name):
            continue
        weight = finder.resident(entry)
        add_one = published and entry.zero_centred
        resident[entry.name] = replace(weight, add_one=True) if add_one else weight
    names = tensor_map.experts
    experts = {
        layer: {part: finder.experts(names, layer, part) for part in names.shapes}
        for layer in names.layers
    }
    vision = finder.vision()
    finder.refuse_leftovers()
    return Resolved(resident, experts, vision)


class _Finder:
    """Looks tensors up by name without prefix and remembers which were used."""

    def __init__(self, checkpoint: Checkpoint, tensor_map: TensorMap) -> None:
        self._path = checkpoint.path
        self._quantization = checkpoint.config.quantization
        self._fp8 = checkpoint.config.fp8
        self._ignored = [re.compile(pattern) for pattern in tensor_map.ignored]
        self._vision = [re.compile(pattern) for pattern in tensor_map.vision]
        self._tensors: dict[str, TensorInfo] = {}
        self._used: set[str] = set()
        for tensor in checkpoint.tensors.values():
            name = tensor.name
            for prefix in tensor_map.prefixes:
                name = name.removeprefix(prefix)
            if name in self._tensors:
                raise CheckpointError(
                    f"{self._path} holds both {self._tensors[name].name} and {tensor.name},"
                    " which are the same tensor"
                )
            self._tensors[name] = tensor

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def has(self, source: str) -> bool:
        return self._tensor_name(source) in self._tensors

    def _tensor_name(self, source: str) -> str:
        """Biases and some stacked experts are tensors themselves, all else are modules."""
        own = source.endswith(".bias") or source in self._tensors
        return source if own else f"{source}.weight"

    def _take(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self._path} lacks the tensor {name}; the checkpoint is incomplete"
            )
        self._used.add(name)
        return self._tensors[name]

    def is_published(self, entry: ResidentName) -> bool:
        """Whether it is a convolution as its publisher writes it, rather than as MLX has it."""
        tensor = self._tensors.get(self._tensor_name(entry.source or entry.name))
        return entry.taps > 1 and tensor is not None and tensor.shape[1:] == (1, entry.taps)

    def resident(self, entry: ResidentName) -> SourceWeight:
        """A tensor that stays in memory."""
        source, part = entry.source or entry.name, entry.part
        if entry.rows:
            whole = self.weight(source, (entry.source_rows, *entry.shape[1:]))
            return replace(whole, shape=entry.shape, rows=entry.rows, source_rows=entry.source_rows)
        if entry.taps:
            channels = entry.shape[0] // entry.taps
            inner = (1, entry.taps) if self.is_published(entry) else (entry.taps, 1)
            convolution = self.weight(source, (channels, *inner))
            return replace(convolution, shape=entry.shape, taps=entry.taps)
        rows = entry.shape[0] // (entry.stack or 1)
        if part is None or self.has(source) or not self.has(part.source):
            return self.weight(source, (rows, *entry.shape[1:]), entry.stack)
        return self._part(entry, part)

    def _part(self, entry: ResidentName, part: HeadPart) -> SourceWeight:
        """A stack of matrices that the checkpoint has as a part of another matrix."""
        cols = entry.shape[0] // entry.stack if part.transposed else entry.shape[1]
        whole = self.weight(part.source, (entry.stack * part.head_rows, cols))
        if whole.format.kind == "mxfp4":
            raise CheckpointError(
                f"{whole.name} is quantised as mxfp4, of which aegis cannot take a part; use a"
                " checkpoint in which it is not"
            )
        plain = Format("dense", whole.format.dtype)
        target = whole.format if whole.format.kind == "affine" else None
        return replace(whole, shape=entry.shape, format=plain, target=target, heads=(whole, part))

    def weight(self, source: str, shape: tuple[int, ...], stack: int = 0) -> SourceWeight:
        """A vector or matrix; ``stack`` > 0: that many matrices in one tensor."""
        tensor = self._take(self._tensor_name(source))
        lead = (stack,) if stack else ()
        rows = (stack or 1) * shape[0]
        if tensor.dtype == _FP8 and len(shape) == 2:
            scales = self._block_scales(tensor, f"{self._tensor_name(source)}_scale_inv")
            _check_tensor(tensor, (*lead, *shape), (_FP8,))
            blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
            _check_tensor(scales, (*lead, *blocks), tuple(_DTYPES))
            found = BlockScales(scales, shape[0])
            numbers = Format("dense", "bf16")
            return SourceWeight(tensor.name, (rows, shape[1]), numbers, (tensor,), scales=found)
        if f"{source}.scales" not in self._tensors or source.endswith(".bias"):
            self._check_unquantised(tensor)
            _check_tensor(tensor, (*lead, *shape), tuple(_DTYPES))
            fmt = Format("dense", _DTYPES[tensor.dtype])
            return SourceWeight(tensor.name, (rows, *shape[1:]), fmt, (tensor,))
        spec = self._spec(tensor)
        params = [self._take(f"{source}.scales")]
        if spec.mode == "affine":
            params.append(self._take(f"{source}.biases"))
        fmt = _quantised_format(tensor, params, (*lead, *shape), spec)
        return SourceWeight(tensor.name, (rows, *shape[1:]), fmt, (tensor, *params))

    def _block_scales(self, tensor: TensorInfo, name: str) -> TensorInfo:
        """The scales of codes in FP8, about which config.json must agree."""
        module = tensor.name.removesuffix(".weight")
        if self._fp8 is None or module in self._fp8:
            says = "does not say so" if self._fp8 is None else "says that it is not"
            raise CheckpointError(
                f"{tensor.name} is in FP8, but config.json {says}; the config or the checkpoint is"
                " of another model"
            )
        return self._take(name)

    def _check_unquantised(self, tensor: TensorInfo) -> None:
        """A tensor without scales: neither its type nor config.json may say it has some."""
        module = tensor.name.removesuffix(".weight")
        named = self._quantization is not None and self._quantization.modules.get(module)
        if tensor.dtype == "U32" or named:
            says = "config.json says so" if named else f"its type {tensor.dtype} says so"
            raise CheckpointError(
                f"{tensor.name} should be quantised, since {says}, but {self._path} lacks its"
                " scales; the checkpoint is incomplete"
            )

    def _spec(self, tensor: TensorInfo) -> QuantSpec:
        module = tensor.name.removesuffix(".weight")
        spec = self._quantization.of(module) if self._quantization else None
        if spec is None:
            says = "has no quantization entry for it"
            if self._quantization:
                says = "says that it is not quantised"
            raise CheckpointError(
                f"{tensor.name} is quantised, but config.json {says}; the config or the checkpoint"
                " is of another model"
            )
        return spec

    def experts(self, names: ExpertNames, layer: int, part: str) -> ExpertSource:
        """One matrix of a layer's experts, or a bias, in whichever spelling the checkpoint has."""
        shape, count = names.shapes[part], names.num_experts
        rows = shape[0]
        if names.blocks is not None:
            both = names.blocks[0].format(layer=layer)
            if both in self or f"{both}_blocks" in self:
                return ExpertSource((self._in_turn(names, layer, part),), rows)
        alone, fused = _spellings(names, layer, part)
        for source in filter(self.has, alone):
            return ExpertSource((self.weight(source, shape, count),), rows)
        for source in filter(self.has, fused):
            weight = self.weight(source, (2 * rows, *shape[1:]), count)
            return ExpertSource((weight,), rows, rows if part == "up_proj" else 0, 2 * rows)
        word = names.separate_parts.get(part, part)
        separate = [
            names.separate.format(layer=layer, part=word, expert=expert) for expert in range(count)
        ]
        if not any(map(self.has, separate)):
            raise CheckpointError(
                f"{self._path} lacks the experts of layer {layer}: neither"
                f" {self._tensor_name(alone[0])} nor {self._tensor_name(separate[0])} is there"
            )
        return ExpertSource(tuple(self.weight(n, shape) for n in separate), rows)

    def _in_turn(self, names: ExpertNames, layer: int, part: str) -> SourceWeight:
        """One matrix of all experts, or a bias, as the publisher of mxfp4 writes it, or as plain
        numbers."""
        assert names.blocks is not None
        both, down = (name.format(layer=layer) for name in names.blocks)
        name = down if part.startswith("down_proj") else both
        turn = (0, 1) if part.startswith("down_proj") else (int(part.startswith("up_proj")), 2)
        (rows, *inputs), count = names.shapes[part], names.num_experts
        whole = (count, turn[1] * rows)
        tensors: tuple[TensorInfo, ...]
        transposed = bool(inputs) and both in self
        if transposed:
            tensors = (self._take(name),)
            self._check_unquantised(tensors[0])
            _check_tensor(tensors[0], (count, *inputs, whole[1]), tuple(_DTYPES))
            fmt = Format("dense", _DTYPES[tensors[0].dtype])
        elif inputs:
            tensors = (self._take(f"{name}_blocks"), self._take(f"{name}_scales"))
            groups, fmt = inputs[0] // MXFP4.group_size, MXFP4
            _check_tensor(tensors[0], (*whole, groups, MXFP4.group_size // 2), ("U8",))
            _check_tensor(tensors[1], (*whole, groups), ("U8",))
        else:
            tensors = (self._take(f"{name}_bias"),)
            _check_tensor(tensors[0], whole, tuple(_DTYPES))
            fmt = Format("dense", _DTYPES[tensors[0].dtype])
        return SourceWeight(
            tensors[0].name,
            (count * rows, *inputs),
            fmt,
            tensors,
            source_rows=count * whole[1],
            turn=turn,
            transposed=transposed,
        )

    def vision(self) -> tuple[TensorInfo, ...]:
        """What a store keeps as it is, whatever its type."""
        names = [name for name in self._tensors if any(p.fullmatch(name) for p in self._vision)]
        return tuple(self._take(name) for name in sorted(names))

    def refuse_leftovers(self) -> None:
        for name in sorted(self._tensors.keys() - self._used):
            if not any(pattern.fullmatch(name) for pattern in self._ignored):
                raise CheckpointError(
                    f"{self._path} holds {self._tensors[name].name}, which a model of this family"
                    " does not use; the config or the checkpoint is of another model"
                )


def _spellings(names: ExpertNames, layer: int, part: str) -> tuple[list[str], list[str]]:
    """Modules that may hold a matrix of all experts: by itself, and gate_proj's rows of each expert
    with up_proj's behind them."""
    # Converters call the module that holds them by one or the other.
    stacked = [names.stacked, names.stacked.replace("switch_mlp", "switch_glu")]
    alone = [spelling.format(layer=layer, part=part) for spelling in stacked]
    both, down = (name.format(layer=layer) for name in names.fused or ("", ""))
    if part == "down_proj":
        return [*alone, down], []
    return alone, [*(s.format(layer=layer, part="gate_up_proj") for s in stacked), both]


def _check_tensor(tensor: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise CheckpointError(
            f"{tensor.name} is stored as {tensor.dtype}; expected {' or '.join(dtypes)}: the"
            " checkpoint is damaged or of another kind"
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.name} has the shape {list(tensor.shape)}; the config says {list(shape)}: one"
            " of them is damaged or of another model"
        )


def _quantised_format(
    tensor: TensorInfo, params: list[TensorInfo], shape: tuple[int, ...], spec: QuantSpec
) -> Format:
    """The format of code words with these scales, and biases; all of them are checked."""
    fmt = Format(spec.mode, _NUMBERS[spec.mode], spec.bits, spec.group_size)
    try:
        check_format(shape[-2:], fmt, "row")
    except FormatError as error:
        raise CheckpointError(
            f"{tensor.name} cannot be read: {error}; use a checkpoint quantised another way"
        ) from None
    *lead, cols = shape
    if tensor.dtype == "U32" and tensor.shape != (*lead, cols * spec.bits // 32):
        raise CheckpointError(
            f"{tensor.name} has the shape {list(tensor.shape)}; {spec.bits}-bit codes of"
            f" {list(shape)} take {[*lead, cols * spec.bits // 32]}: the quantization entry of"
            " config.json or the file is wrong"
        )
    _check_tensor(tensor, (*lead, cols * spec.bits // 32), ("U32",))
    dtypes = tuple(_DTYPES) if spec.mode == "affine" else ("U8",)
    for array in params:
        _check_tensor(array, (*lead, cols // spec.group_size), dtypes)
    scales, last = params[0], params[-1]
    if last.dtype != scales.dtype:
        raise CheckpointError(
            f"{last.name} is {last.dtype}, but its scales are {scales.dtype}; the checkpoint is"
            " damaged"
        )
    return replace(fmt, dtype=_DTYPES[scales.dtype]) if spec.mode == "affine" else fmt
