"""Rotary frequencies, plain or stretched by YaRN.

Decimal arithmetic, because pow and log of the C library differ between systems in the last bit.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import TYPE_CHECKING

from aegis.checkpoint.plainfile import shown
from aegis.errors import CheckpointError

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig

_PRECISION = 30
_TWO_PI = Decimal("6.28318530717958647692528676655901")
_YARN_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
}


@dataclass(frozen=True)
class Rotary:
    """How positions enter queries and keys."""

    inv_freq: tuple[float, ...]
    """Float32-representable."""
    scale: float = 1.0
    """What rotated channels are multiplied by."""
    stretch: float = 1.0
    """What YaRN's ``mscale_all_dim`` makes of its factor; the square goes to attention scores."""


def rotary_frequencies(theta: float, dim: int) -> tuple[float, ...]:
    """``theta ** (-2i / dim)`` for i < dim / 2, each rounded once to float32."""
    with localcontext() as context:
        context.prec = _PRECISION
        return tuple(map(_float32, _exact(theta, dim)))


def read_rotary(config: ModelConfig, dim: int, default_theta: float = 10000.0) -> Rotary:
    """The rotary embedding of ``dim`` channels that a config describes.

    Raises:
        CheckpointError: a key of it is missing or mistyped, or a kind other than YaRN is asked for.
    """
    found = config.section("rope_parameters") or config.section("rope_scaling")
    inside = found is not None and found.get("rope_theta") is not None
    where = found if found is not None and inside else config
    theta = where.float("rope_theta", default_theta)
    kind = "default" if found is None else found.get("rope_type", found.get("type", "default"))
    if found is None or kind == "default":
        return Rotary(rotary_frequencies(theta, dim))
    unknown = sorted(found.raw.keys() - _YARN_KEYS - {"model_type"})
    if kind != "yarn" or unknown:
        what = f"rope_type to {shown(kind)}" if kind != "yarn" else f"{unknown[0]} beside yarn"
        raise CheckpointError(
            f"{found.where} sets {what}, which is not implemented for {config.model_type}; use a"
            " checkpoint with plain rotary positions"
        )
    return _yarn(config, found, theta, dim)


def _yarn(config: ModelConfig, found: ModelConfig, theta: float, dim: int) -> Rotary:
    if theta == 1:
        raise found.mistyped("rope_theta", theta, "a base above 1 for YaRN")
    original = found.int("original_max_position_embeddings")
    longest = config.int("max_position_embeddings")
    factor = found.float("factor", longest / original)
    both = found.float("mscale", 0.0), found.float("mscale_all_dim", 0.0)
    with localcontext() as context:
        context.prec = _PRECISION
        ramp = _ramp(found, original, theta, dim)
        exact = _exact(theta, dim)
        mixed = [f / Decimal(factor) * r + f * (1 - r) for f, r in zip(exact, ramp, strict=True)]
        scale = _stretch(factor, both[0]) / _stretch(factor, both[1])
        if not all(both):
            scale = _stretch(factor, 1.0)
        return Rotary(
            inv_freq=tuple(map(_float32, mixed)),
            scale=found.float("attention_factor", float(scale)),
            stretch=float(_stretch(factor, both[1])) if both[1] else 1.0,
        )


def _stretch(factor: float, mscale: float) -> Decimal:
    """0.1 * mscale * ln(factor) + 1, for factors above 1."""
    if factor <= 1:
        return Decimal(1)
    return Decimal("0.1") * Decimal(mscale) * Decimal(factor).ln() + 1


def _ramp(found: ModelConfig, original: int, theta: float, dim: int) -> list[Decimal]:
    """From 0, for frequencies that stay, to 1, for those that are divided by the factor."""

    def channel(rotations: float) -> Decimal:
        """The frequency, as a fractional index, that turns so often in the original context."""
        turns = Decimal(original) / (Decimal(rotations) * _TWO_PI)
        return dim * turns.ln() / (2 * Decimal(theta).ln())

    low = channel(found.float("beta_fast", 32.0))
    high = channel(found.float("beta_slow", 1.0))
    if found.bool("truncate", True):
        low = low.to_integral_value(ROUND_FLOOR)
        high = high.to_integral_value(ROUND_CEILING)
    low, high = max(low, Decimal(0)), min(high, Decimal(dim - 1))
    width = high - low or Decimal("0.001")
    steps = [(Decimal(i) - low) / width for i in range(dim // 2)]
    return [min(max(step, Decimal(0)), Decimal(1)) for step in steps]


def _exact(theta: float, dim: int) -> list[Decimal]:
    base = Decimal(theta)
    return [base ** (Decimal(-2 * i) / Decimal(dim)) for i in range(dim // 2)]


def _float32(value: Decimal) -> float:
    nearest: float = struct.unpack("f", struct.pack("f", float(value)))[0]
    return nearest


def score_scale(rotary: Rotary, query_dim: int) -> float:
    """What scores of queries with so many channels are multiplied by."""
    return rotary.stretch**2 / math.sqrt(query_dim)
