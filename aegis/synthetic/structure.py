"""What the weights of a synthetic model are, beyond random.

Uniform noise would route every token to other experts, so that no cache and no guess could be worth
anything. The structure that real routing has comes from the weights alone; the engine knows nothing
of it:

popularity  every embedding has one direction in common, and each row of a router leans towards it
            or away from it: some experts of a layer are chosen far more often than others.
depth       a block adds little to what the residual stream holds, in proportion to its growing
            size: what the next layer's router will see resembles what this one sees.
context     Gated DeltaNet with nearly constant keys and small steps is a moving average of values;
            attention whose scores fall with the distance is another one. Both add to the stream
            what changes slowly from token to token.

A matrix is noise, and for each row what it makes of the common direction. Both are cheap to write:
the noise is random codes, and the common direction is constant over a quantisation group, so that
the rest is a matter of the groups' biases.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aegis.models.rotary import rotary_frequencies

if TYPE_CHECKING:
    from aegis.models.decoder import Description

F32 = NDArray[np.float32]

COMMON = 0.35
"""The common direction's part of an embedding's size."""
POPULARITY = 0.38
"""Standard deviation over a layer's experts of what popularity adds to a router's logit."""
NOVELTY = 0.95
"""Standard deviation of what the rest of a hidden state adds to it."""
ATTENTION_STEP = 0.026
"""Mean square of what attention, or what takes its place, adds to the stream, relative to it."""
EXPERTS_STEP = 0.0265
"""The same for experts and MLPs."""
_EMBEDDING_STD = 0.02
_SLOWEST, _FASTEST = -3.5, -1.0
"""Logits of the step sizes of DeltaNet's heads: averages over some 55 to 5 tokens."""
_NEARER = 6.0
"""How much higher an attention score is for the token itself than for a far one."""
_FREQUENCIES = (1 / 64, 1.0)
"""Of rotary positions, radians per token: those that make the difference."""
_SCORE_NOISE = 0.7
"""Standard deviation of an attention score."""
_ATTENDED = 0.4
"""Root mean square of what attention makes of values of size 1 at these scores."""
_ACTIVATED = 0.6
"""Root mean square of silu(g) * u for standard normal g and u."""
_OPEN = 2.0
"""Gates of DeltaNet's outputs, ahead of silu."""


@dataclass(frozen=True)
class Noise:
    """A matrix: noise of mean 0, and what couples its rows to the common direction."""

    std: float
    coupling: F32 | None = None
    """[rows]: what one unit of the common direction adds to each output; None: nothing."""
    blind: bool = False
    """The noise does not see the common direction at all."""


def random_bits(seed: int, name: str) -> np.random.PCG64:
    """The stream of random bits that belongs to a name."""
    return np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))


def random_words(bits: np.random.PCG64, count: int) -> NDArray[np.uint64]:
    """``count`` words of a stream."""
    return np.asarray(bits.random_raw(count), np.uint64)


def normal(bits: np.random.PCG64, count: int) -> F32:
    """Nearly normal numbers [count]: sums of four uniform ones, the same on every machine."""
    parts = random_words(bits, count).view(np.uint16).reshape(count, 4).astype(np.float64)
    sums: NDArray[np.float64] = (parts.sum(axis=1) - 2 * 65535) / (65536 * math.sqrt(4 / 12))
    return sums.astype(np.float32)


class Structure:
    """What every tensor of one model is made of, by its name in the store."""

    def __init__(self, model: Description, seed: int) -> None:
        self._model, self._shape, self._seed = model, model.shape, seed
        self._first_size = _EMBEDDING_STD * model.embedding_multiplier
        self._mixed = _mixed_size(model)
        self._inner: dict[str, Callable[[int, int], Noise]] = {
            "mlp.gate": self._router,
            "self_attn.q_proj": self._scored,
            "self_attn.k_proj": self._scored,
            "self_attn.v_proj": lambda rows, layer: Noise(self._usual(), blind=True),
            "linear_attn.in_proj_qkv": self._delta_inputs,
            "linear_attn.in_proj_z": lambda rows, layer: self._constant(rows, layer, _OPEN, 0.3),
            "linear_attn.in_proj_a": lambda rows, layer: Noise(0.1 * self._usual()),
            "linear_attn.in_proj_b": self._delta_steps,
        }

    def size(self, layer: int) -> float:
        """Root mean square of the residual stream ahead of a layer."""
        return self._first_size * math.sqrt((1 + ATTENTION_STEP + EXPERTS_STEP) ** layer)

    def share(self, layer: int) -> float:
        """How much of the common direction a normed hidden state has there."""
        return COMMON * self._first_size / self.size(layer)

    def matrix(self, name: str, shape: tuple[int, int]) -> Noise:
        """A resident matrix [rows, inputs]."""
        rows, cols = shape
        if name == "embed_tokens":
            rest = math.sqrt(1 - COMMON**2)
            same = np.full(rows, COMMON * self._shape.hidden_size * _EMBEDDING_STD, np.float32)
            return Noise(rest * _EMBEDDING_STD, same)
        if name == "lm_head":
            return Noise(self._usual())
        _, number, inner = name.split(".", 2)
        layer = int(number)
        if inner in self._inner and not (self._shape.latent and "self_attn" in inner):
            return self._inner[inner](rows, layer)
        if inner in ("self_attn.o_proj", "linear_attn.out_proj"):
            return Noise(self._out(layer, ATTENTION_STEP, self._attended(inner)) / math.sqrt(cols))
        if inner.endswith("down_proj"):
            # A shared expert and the routed ones add half of the step each.
            step = EXPERTS_STEP / 2 if "shared" in inner else EXPERTS_STEP
            gate = 0.54 if "shared" in inner else 1.0
            return Noise(self._out(layer, step, _ACTIVATED * gate) / math.sqrt(cols))
        return Noise(1 / math.sqrt(cols))

    def expert(self, part: str, layer: int) -> Noise:
        """A matrix of every routed expert of a layer."""
        if part != "down_proj":
            return Noise(self._usual())
        shared = self._shape.shared_expert_intermediate_size > 0
        step = EXPERTS_STEP / 2 if shared else EXPERTS_STEP
        size = self._out(layer, step, _ACTIVATED * self._mixed)
        return Noise(size / math.sqrt(self._shape.moe_intermediate_size))

    def vector(self, name: str, count: int) -> F32:
        """A norm, bias or the like [count]."""
        if name.endswith((".bias", "e_score_correction_bias", "A_log")):
            return np.zeros(count, np.float32)
        if name.endswith("dt_bias"):
            return np.full(count, -8, np.float32)
        if name.endswith("conv1d"):
            return self._taps(count)
        if name.endswith(("self_attn.q_norm", "self_attn.k_norm")):
            return self._head_norm(count)
        return np.ones(count, np.float32)

    def _usual(self) -> float:
        """Gives outputs of size 1 for a normed hidden state."""
        return 1 / math.sqrt(self._shape.hidden_size)

    def _out(self, layer: int, step: float, size: float) -> float:
        """What turns inputs of a size into a step of the residual stream ahead of a layer."""
        return math.sqrt(step) * self.size(layer) / (size * self._model.residual_multiplier)

    def _constant(self, rows: int, layer: int, value: float, noise: float) -> Noise:
        """Outputs that are nearly the same for all tokens."""
        same = np.full(rows, value / self.share(layer), np.float32)
        return Noise(noise * self._usual(), same)

    def _router(self, rows: int, layer: int) -> Noise:
        bits = random_bits(self._seed, f"popularity of layer {layer}")
        leaning = normal(bits, rows) * np.float32(POPULARITY / self.share(layer))
        return Noise(NOVELTY * self._usual(), leaning)

    def _delta_inputs(self, rows: int, layer: int) -> Noise:
        """Constant queries and keys, values without the common direction."""
        delta = self._shape.delta
        assert delta is not None
        same = np.zeros(rows, np.float32)
        same[: 2 * delta.key_dim] = 3 / self.share(layer)
        return Noise(self._usual(), same, blind=True)

    def _delta_steps(self, rows: int, layer: int) -> Noise:
        steps = np.linspace(_SLOWEST, _FASTEST, rows, dtype=np.float32)
        return Noise(0.1 * self._usual(), steps / np.float32(self.share(layer)))

    def _taps(self, count: int) -> F32:
        """A convolution that passes its latest input on: values small, where silu is linear."""
        delta = self._shape.delta
        assert delta is not None
        taps = np.zeros((delta.conv_kernel_dim, delta.conv_dim), np.float32)
        taps[-1, : 2 * delta.key_dim] = 1
        taps[-1, 2 * delta.key_dim :] = 0.1
        return taps.reshape(count)

    def _attended(self, inner: str) -> float:
        if inner == "linear_attn.out_proj":
            return _OPEN * 0.88
        return _ATTENDED * (0.54 if self._shape.output_gate else 1)

    def _scored(self, rows: int, layer: int) -> Noise:
        """Queries or keys whose product falls with the distance: channels that turn with it have a
        constant part. Gates behind a query are noise."""
        parts = self._score_parts()
        head = np.zeros(self._shape.head_dim, np.float32)
        head[self._turning()] = parts.constant / self.share(layer)
        gated = self._shape.output_gate and rows > self._shape.num_key_value_heads * len(head)
        head = np.concatenate([head, np.zeros_like(head)]) if gated else head
        noise = Noise(parts.noise * self._usual(), np.tile(head, rows // len(head)))
        return noise

    def _turning(self) -> list[int]:
        """Channels of a head that rotate neither fast nor slowly."""
        dim = self._model.rotary_dim or self._shape.head_dim
        low, high = _FREQUENCIES
        inv_freq = rotary_frequencies(self._model.rope_theta, dim)
        pairs = [i for i, frequency in enumerate(inv_freq) if low <= frequency <= high]
        return pairs + [len(inv_freq) + i for i in pairs]

    def _score_parts(self) -> _ScoreParts:
        dim, turning = self._shape.head_dim, len(self._turning())
        scale = self._model.attention_scale or dim**-0.5
        constant = math.sqrt(_NEARER / (turning * scale)) if turning else 0.0
        noise = math.sqrt(_SCORE_NOISE / (math.sqrt(dim) * scale))
        if self._model.qk_norm == "none":
            return _ScoreParts(constant, noise, 1.0, 1.0)
        # Vectors have a constant part of 3 per turning channel, until a norm makes all size 1.
        size = math.sqrt(1 + 9 * turning / dim)
        return _ScoreParts(3.0, 1.0, constant * size / 3, noise * size)

    def _head_norm(self, count: int) -> F32:
        parts = self._score_parts()
        head = np.full(self._shape.head_dim, parts.norm, np.float32)
        head[self._turning()] = parts.turning_norm
        return np.tile(head, count // len(head))


@dataclass(frozen=True)
class _ScoreParts:
    constant: float
    noise: float
    turning_norm: float
    norm: float


def _mixed_size(model: Description) -> float:
    """Root of the sum of squares of the weights that a token's experts are mixed with."""
    count, chosen = model.shape.num_experts, model.shape.num_experts_per_tok
    size = math.hypot(POPULARITY, NOVELTY)
    places = [(i + 0.625) / (count + 0.25) for i in range(chosen)]
    logits = [-size * NormalDist().inv_cdf(place) for place in places]
    if model.scoring == "sigmoid":
        weights = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        weights = [math.exp(logit - size * size / 2) / count for logit in logits]
    total = sum(weights) if model.norm_topk_prob else 1.0
    return model.routed_scaling_factor * math.hypot(*weights) / total
