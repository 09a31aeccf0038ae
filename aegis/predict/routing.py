"""The routing that a prediction replays: a trace that comes with aegis, or one made after it.

A trace of a model's own shape is replayed as it was recorded. Of one that has the same experts but
other layers, layers are left out or come again. For every other shape a trace is made whose choices
are as uneven, repeat themselves as often and are guessed as well as those of the nearest one: the
logits of a layer are a constant part per expert, one that fades from token to token, and noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from aegis.synthetic.names import is_synthetic
from aegis.synthetic.shipped import SHIPPED, shipped_trace
from aegis.tiers.guess_width import MAX_WIDTH
from aegis.tiers.trace import RoutingTrace

TOKENS = 256
"""Of a trace that is made."""
_MEMORY_TOKENS = 20.0
"""How many tokens the fading part of a logit lasts."""


@dataclass(frozen=True)
class Character:
    """Standard deviations that make routing what it is, over those of all of a logit's parts."""

    popular: float
    """The constant part of an expert."""
    lasting: float
    """The part that fades."""
    misjudged: float
    """What the router of the layer before has wrong."""


CHARACTERS = {
    "synthetic:qwen3.6-35b-a3b": Character(0.493, 0.41, 0.214),
    "embedded": Character(0.64, 0.27, 0.456),
}
"""Of the traces that come with aegis, fitted to how uneven they are (the share of a layer's most
chosen tenth), how much is chosen again by the next token, and how much is guessed right."""


@dataclass(frozen=True)
class Routing:
    """A trace, and where it comes from."""

    trace: RoutingTrace
    origin: str
    """For people."""


def routing_for(model: str, layers: int, num_experts: int, per_token: int) -> Routing:
    """Routing for a model of so many layers with experts.

    Raises:
        TraceError: a trace that comes with aegis is damaged.
    """
    name = _nearest(model, num_experts)
    trace = shipped_trace(name)
    assert trace is not None
    _, its_layers, its_per_token = trace.shape
    if (trace.num_experts, its_per_token) != (num_experts, per_token):
        made = make_trace(CHARACTERS[name], layers, num_experts, per_token)
        return Routing(made, f"made for this shape after the trace of {name}")
    if its_layers == layers:
        return Routing(trace, f"the trace of {name}")
    of_layers = f"the trace of {name}, its {its_layers} layers as {layers}"
    return Routing(with_layers(trace, layers), of_layers)


def _nearest(model: str, num_experts: int) -> str:
    """Random weights route like those of the large shape, whatever their own."""
    if is_synthetic(model):
        return next(name for name in SHIPPED if is_synthetic(name))

    def distance(name: str) -> float:
        trace = shipped_trace(name)
        assert trace is not None
        return abs(log(trace.num_experts / num_experts))

    return min(SHIPPED, key=distance)


def with_layers(trace: RoutingTrace, layers: int) -> RoutingTrace:
    """The trace of a model with other layers: the first ones, and where there are more, all but the
    first again, since nobody guesses the first."""
    _, count, _ = trace.shape
    behind = list(range(min(1, count - 1), count))
    source = [
        layer if layer < count else behind[(layer - count) % len(behind)] for layer in range(layers)
    ]
    if count > 1:
        first = trace.guesses[0][:, [layer - 1 for layer in source[1:]]]
    else:
        # Nothing was ever guessed: what the layer chose is as good a ranking as any.
        first = trace.chosen[:, [0] * (layers - 1)]
    return replace(trace, chosen=trace.chosen[:, source], guesses=(first, first[:, 1:]))


def make_trace(
    character: Character, layers: int, num_experts: int, per_token: int, tokens: int = TOKENS
) -> RoutingTrace:
    """A trace of a character; the same one every time."""
    width = min(MAX_WIDTH, num_experts)
    ranked = [
        _layer(layer, character, tokens, num_experts, per_token, width) for layer in range(layers)
    ]
    chosen = np.stack([choice for choice, _ in ranked], axis=1)
    guesses = np.stack([guess for _, guess in ranked], axis=1)[:, 1:]
    return RoutingTrace("made", num_experts, "", chosen, (guesses, guesses[:, 1:]))


def _layer(
    layer: int, of: Character, tokens: int, num_experts: int, per_token: int, width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a layer chooses, ascending, and what the one before would have guessed, best first."""
    rng = np.random.default_rng([layer, num_experts, per_token])
    fading = np.exp(-1 / _MEMORY_TOKENS)
    lasting = np.empty((tokens, num_experts))
    state = rng.standard_normal(num_experts)
    for token in range(tokens):
        state = fading * state + sqrt(1 - fading**2) * rng.standard_normal(num_experts)
        lasting[token] = state
    rest = sqrt(max(0.0, 1 - of.popular**2 - of.lasting**2))
    logits = (
        of.popular * rng.standard_normal(num_experts)
        + of.lasting * lasting
        + rest * rng.standard_normal((tokens, num_experts))
    )
    seen = logits + of.misjudged * rng.standard_normal(logits.shape)
    chosen = np.sort(np.argsort(-logits, axis=1)[:, :per_token], axis=1)
    return chosen, np.argsort(-seen, axis=1)[:, :width]
