"""What each weight of a plain checkpoint becomes when it is quantised while it is converted.

The choice is that of ``mlx_lm.convert``: every matrix whose inputs come in whole groups, embedding
and head included, at the width that was asked for; but what a family's rules except, and what is
mxfp4 already. Numbers are first rounded to the type that the config names, those that stay plain
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from aegis.checkpoint.config import ModelConfig, QuantSpec
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.tensor_map import QuantizeRules
from aegis.convert.names import ExpertSource, Resolved, SourceWeight
from aegis.errors import CheckpointError, UsageError
from aegis.kernels.base import Format, Numbers
from aegis.kernels.sizes import CODE_BITS, GROUPS
from aegis.settings import Bits

_TYPES: dict[str, Numbers] = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_EIGHT_BIT = QuantSpec(8, 64)
USUAL = QuantSpec(4, 64)
"""What a plain checkpoint becomes where nobody says what."""
Choice = QuantSpec | Literal["auto"] | None
"""How a plain checkpoint is to be quantised; None: not at all; auto: as it was made last, or else
as is usual."""
SPECS = tuple(QuantSpec(bits, group) for bits in CODE_BITS for group in GROUPS)
"""All that it could become."""


def check_quantize(spec: QuantSpec) -> None:
    """Refuse a width or group that no checkpoint can have.

    Raises:
        UsageError: naming it.
    """
    if spec.bits not in CODE_BITS:
        raise UsageError(f"there are no {spec.bits}-bit codes; choose 2, 3, 4, 5, 6 or 8 bits")
    if spec.group_size not in GROUPS:
        raise UsageError(f"there are no groups of {spec.group_size}; choose 32, 64 or 128")


def quantization(bits: Bits, group_size: int) -> Choice:
    """What ``bits`` and ``group_size`` of a request ask for.

    Raises:
        UsageError: there is no such width or group.
    """
    if bits == "auto":
        return "auto"
    if bits == "none":
        return None
    check_quantize(QuantSpec(bits, group_size))
    return QuantSpec(int(bits), int(group_size))


def is_plain(checkpoint: Checkpoint) -> bool:
    """Whether its matrices are numbers rather than codes."""
    return checkpoint.config.quantization is None


def quantised(
    checkpoint: Checkpoint, resolved: Resolved, rules: QuantizeRules, spec: QuantSpec
) -> Resolved:
    """The same places with a target format for every weight that does not stay as it is.

    Raises:
        CheckpointError: the checkpoint is quantised already.
        UsageError: there is no such width or group.
    """
    check_quantize(spec)
    numbers = _numbers(checkpoint.config)

    def aimed(name: str, weight: SourceWeight) -> SourceWeight:
        if weight.format.kind == "mxfp4":
            return weight
        if weight.format.kind == "affine":
            raise CheckpointError(
                f"{checkpoint.path} is quantised already ({weight.name} has"
                f" {weight.format.bits}-bit codes); convert it without --bits, or quantise the"
                " plain checkpoint that it was made from"
            )
        return replace(weight, target=_target(name, weight, rules, spec, numbers))

    experts = {
        layer: {
            part: replace(
                source, weights=tuple(aimed(f"experts.{part}", w) for w in source.weights)
            )
            for part, source in parts.items()
        }
        for layer, parts in resolved.experts.items()
    }
    resident = {name: aimed(name, weight) for name, weight in resolved.resident.items()}
    return replace(resolved, resident=resident, experts=experts)


def in_3bit(experts: Mapping[str, ExpertSource]) -> dict[str, ExpertSource]:
    """A layer's experts with 3 bits in place of every 4-bit target."""

    def narrowed(weight: SourceWeight) -> SourceWeight:
        target = weight.target
        if target is None or target.bits != 4:
            return weight
        return replace(weight, target=replace(target, bits=3))

    return {
        part: replace(source, weights=tuple(map(narrowed, source.weights)))
        for part, source in experts.items()
    }


def _numbers(config: ModelConfig) -> Numbers | None:
    """The type that numbers are rounded to; None: each keeps its own.

    Only these two keys count: ``mlx_lm.convert`` reads no other.
    """
    text = config.raw.get("text_config")
    named = config.raw.get("torch_dtype")
    if named is None and isinstance(text, dict):
        named = text.get("dtype")
    return _TYPES.get(named) if isinstance(named, str) else None


def _target(
    name: str,
    weight: SourceWeight,
    rules: QuantizeRules,
    spec: QuantSpec,
    numbers: Numbers | None,
) -> Format | None:
    own = numbers is None or name.endswith(rules.own_type)
    dtype = weight.format.dtype if own or numbers is None else numbers
    plain = name.endswith((*rules.plain, ".bias")) or len(weight.shape) != 2
    # The group that was asked for decides, also for what then gets one of its own.
    if plain or weight.shape[1] % spec.group_size:
        same = dtype == weight.format.dtype and not weight.add_one
        return None if same else Format("dense", dtype)
    chosen = _EIGHT_BIT if name.endswith(rules.eight_bit) else spec
    return Format("affine", dtype, chosen.bits, chosen.group_size)
