"""What may be chosen next. A guess only decides what is read early, never what is computed."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.tiers.guess_width import open_width

GUESS_KINDS = ("cross-layer", "previous", "none")
"""cross-layer: the next layer's router on this layer's hidden state. previous: what the token
before chose in that layer. none: no guess."""


class Guesser:
    """Turns a ranking into the experts to read early."""

    def __init__(
        self,
        kind: str,
        width: int | None,
        num_layers: int,
        num_experts: int,
        num_experts_per_tok: int,
    ) -> None:
        """width: reads per layer, after experts that already lie in a slot dropped out; None: what
        turns out to be worth it."""
        if kind not in GUESS_KINDS:
            raise ValueError(f"guess is {kind!r}; choose one of {', '.join(GUESS_KINDS)}")
        self.kind = kind
        self.width = open_width(width)
        if kind == "none":
            self.width = open_width(0)
        self.candidates = 0
        """How many experts to ask of the router; 0 if its opinion is not needed."""
        if kind == "cross-layer" and self.width.most:
            self.candidates = min(num_experts, max(num_experts_per_tok, self.width.most))
        self._previous: list[list[int]] = [[] for _ in range(num_layers)]

    def remember(self, layer_index: int, experts: list[int]) -> None:
        """What a layer chose just now."""
        self._previous[layer_index] = experts

    def rank(self, layer_index: int, ranked: Sequence[int]) -> Sequence[int]:
        """The experts of a layer, best guess first."""
        if self.kind == "cross-layer":
            return ranked
        return self._previous[layer_index] if self.kind == "previous" else ()
