"""Pieces that several families share."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING

from aegis.models.base import submodule

if TYPE_CHECKING:
    from aegis.kernels.base import Weight


def rotary_frequencies(theta: float, dim: int) -> tuple[float, ...]:
    """``theta ** (-2i / dim)`` for i < dim / 2, each rounded once to float32.

    Decimal arithmetic, because pow of the C library differs between systems in the last bit.
    """
    with localcontext() as context:
        context.prec = 30
        base = Decimal(theta)
        exact = [base ** (Decimal(-2 * i) / Decimal(dim)) for i in range(dim // 2)]
    return tuple(struct.unpack("f", struct.pack("f", float(value)))[0] for value in exact)


def attention_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """Norm, projections and biases of a layer's self attention."""
    names = {"norm": "input_layernorm"}
    for p in ("q", "k", "v", "o"):
        names[f"{p}_proj"] = f"self_attn.{p}_proj"
        names[f"{p}_bias"] = f"self_attn.{p}_proj.bias"
    return submodule(weights, f"layers.{layer}.", names)


def router_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """Post-attention norm and gate of a layer."""
    names = {"norm": "post_attention_layernorm", "gate": "mlp.gate"}
    return submodule(weights, f"layers.{layer}.", names)


def shared_expert_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """The shared expert's matrices and its gate, as far as the layer has them."""
    names = {f"{p}_proj": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")}
    names["shared_expert_gate"] = "mlp.shared_expert_gate"
    return submodule(weights, f"layers.{layer}.", names)
