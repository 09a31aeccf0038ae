"""How a model family describes the tensors it needs from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HeadPart:
    """Some rows of every head in a matrix that holds all heads one behind the other."""

    source: str
    """Its name in the checkpoint without prefix."""
    head_rows: int
    first: int
    count: int
    transposed: bool
    """Whether these rows are the columns of what is wanted."""


@dataclass(frozen=True)
class ResidentName:
    """A tensor that stays in memory.

    ``source`` is its name in the checkpoint without prefix, where that differs from the store's.
    A name that ends in ``.bias`` is a tensor itself, any other a module with a ``.weight`` or, if
    there is none, a tensor.
    """

    name: str
    shape: tuple[int, ...]
    source: str = ""
    optional: bool = False
    stack: int = 0
    """Above 0: the checkpoint has so many matrices in one tensor, whose rows are these."""
    part: HeadPart | None = None
    """What a stack of matrices is made of where the checkpoint has no such tensor."""
    rows: tuple[tuple[int, int], ...] = ()
    """Which rows of the source it is, from and to, in its order; empty: all of them."""
    source_rows: int = 0
    """How many the source has, where ``rows`` are given."""
    taps: int = 0
    """Above 0: a convolution's, a vector of each channel's first tap, then each second one. The
    source is [channels, 1, taps] as published, [channels, taps, 1] as MLX has it."""
    zero_centred: bool = False
    """A norm that is less by 1 in a checkpoint whose convolutions are as published."""


@dataclass(frozen=True)
class ExpertNames:
    """The routed experts: one tensor per matrix, one module per expert, fused, or blocks.

    The templates have the fields ``{layer}``, ``{part}`` and (separate) ``{expert}``.
    """

    layers: tuple[int, ...]
    num_experts: int
    shapes: Mapping[str, tuple[int, ...]]
    """(out, in) of gate_proj, up_proj and down_proj; (out,) of their biases, where they have some:
    ``gate_proj.bias`` and so on."""
    stacked: str
    separate: str
    separate_parts: Mapping[str, str] = field(default_factory=dict)
    """What ``separate`` calls a matrix, where that is not gate_proj, up_proj or down_proj."""
    fused: tuple[str, str] | None = None
    """Two tensors for all experts: gate_proj's rows with up_proj's behind them, and down_proj."""
    blocks: tuple[str, str] | None = None
    """The same in mxfp4 as its publisher writes it, gate_proj's and up_proj's rows in turn: each
    name with ``_blocks``, ``_scales`` and, where there are biases, ``_bias`` behind it. As plain
    numbers such a tensor has the bare name, and each expert's matrix lies transposed."""


@dataclass(frozen=True)
class QuantizeRules:
    """What ``mlx_lm.convert`` makes of single tensors of a family, whatever width is asked for.

    Each entry is how the names of such tensors end, as a store calls them (those of experts:
    ``experts.gate_proj`` and so on).
    """

    eight_bit: tuple[str, ...] = ()
    """Codes of 8 bits in groups of 64."""
    plain: tuple[str, ...] = ()
    """Matrices that are not quantised."""
    own_type: tuple[str, ...] = ()
    """Numbers that keep their type, where the config names another."""


@dataclass(frozen=True)
class TensorMap:
    """All tensors of a model family."""

    resident: tuple[ResidentName, ...]
    experts: ExpertNames
    prefixes: tuple[str, ...] = ("language_model.", "model.")
    """Stripped from checkpoint names, each once, in this order."""
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of names, without prefix, that a checkpoint may hold and nobody needs."""
    vision: tuple[str, ...] = ()
    """Patterns of names, without prefix, of what looks at pictures: a store keeps it as it is."""
    quantize: QuantizeRules = QuantizeRules()
