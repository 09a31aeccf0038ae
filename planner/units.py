"""Sizes as people write them and as bytes. The only place that formats a size."""

from __future__ import annotations

import re
from fractions import Fraction

_BINARY = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {name.lower(): nbytes for name, nbytes in (_BINARY | _DECIMAL).items()}
_SIZE = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([A-Za-z]*)\s*", re.ASCII)
_LARGEST = 1 << 63

DEFAULT_SWEEP_STEP = "1GiB"
MAX_SWEEP_CAPS = 1000


def parse_size(text: str) -> int:
    """Bytes of ``4GiB``, ``1.5 GiB`` or ``134217728B``; ValueError says what is wrong."""
    match = _SIZE.fullmatch(text)
    if match is None:
        shown = text[:60]
        raise ValueError(
            f"{shown!r} is not a size: write a number and a unit, as in 4GiB or 512MiB"
        )
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{text!r} has no unit: write {number}GiB, {number}MiB or {number}B")
    if unit.lower() not in _UNITS:
        known = ", ".join(_BINARY | _DECIMAL)
        raise ValueError(f"{text!r} has the unknown unit {unit!r}: use one of {known}")
    nbytes = Fraction(number) * _UNITS[unit.lower()]
    if nbytes < 1:
        raise ValueError(f"{text!r} is less than one byte: a size must be positive")
    if nbytes > _LARGEST:
        raise ValueError(f"{text!r} is more than any memory: write at most {_LARGEST}B")
    return int(nbytes)


def parse_caps(text: str) -> tuple[int, ...]:
    """One cap, or those of ``LOW..HIGH[:STEP]``: step 1GiB unless given, HIGH always included."""
    low_text, dots, rest = text.partition("..")
    if not dots:
        return (parse_size(text),)
    high_text, _, step_text = rest.partition(":")
    low, high = parse_size(low_text), parse_size(high_text)
    step = parse_size(step_text or DEFAULT_SWEEP_STEP)
    if low > high:
        raise ValueError(f"{text!r} runs backwards: write the smaller cap first")
    if (high - low) // step >= MAX_SWEEP_CAPS:
        raise ValueError(f"{text!r} asks for over {MAX_SWEEP_CAPS} caps: give a larger step")
    return (*range(low, high, step), high)


def format_size(nbytes: int) -> str:
    """``4 GiB``, ``129.6 MiB``, ``512 B``: binary units, at most one decimal."""
    if nbytes < 0:
        return f"-{format_size(-nbytes)}"
    value, names = float(nbytes), list(_BINARY)
    while round(value, 1) >= 1024 and len(names) > 1:
        value /= 1024
        names.pop(0)
    return f"{value:.1f}".removesuffix(".0") + f" {names[0]}"


def format_least(nbytes: int) -> str:
    """A size that something needs, rounded up: what is written is enough where it is given."""
    units = list(_BINARY.items())
    while (tenths := -(-10 * nbytes // units[0][1])) >= 10240 and len(units) > 1:
        units.pop(0)
    return f"{tenths // 10}.{tenths % 10}".removesuffix(".0") + f" {units[0][0]}"
