"""The router block, and routing that stays on the device until somebody looks."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import RouterSpec, Routing, Weight
from aegis.kernels.mlx import device
from aegis.kernels.mlx.device import Clock, Traits
from aegis.kernels.mlx.linear import Linear, vector
from aegis.kernels.mlx.memory import MlxMemory

I32 = NDArray[np.int32]
_NOBODY = np.empty(0, np.int32)


class MlxRouting(Routing):
    """Chosen experts on the device, best last; ``experts`` and ``guess`` wait for them."""

    def __init__(
        self, chosen: mx.array, guessed: mx.array | None, spec: RouterSpec, clock: Clock
    ) -> None:
        """chosen: uint32 [T, K + candidates] for T = 1, what follows K is the guess; else [T, K],
        and guessed [T, K] or None."""
        self._chosen, self._guessed, self._spec, self._clock = chosen, guessed, spec, clock
        self._host: tuple[I32, I32] | None = None
        self.weights: mx.array
        self.normed: mx.array

    @property
    def ids(self) -> mx.array:
        """uint32 [T, K] on the device, in the order of ``weights``."""
        count = self._spec.num_experts_per_tok
        return self._chosen if self._chosen.shape[1] == count else self._chosen[:, :count]

    @property
    def ranked(self) -> I32:
        """``ids`` on the host."""
        return self._on_host()[0]

    @property
    def experts(self) -> I32:
        """See Routing."""
        return np.sort(self.ranked, axis=-1)

    @property
    def guess(self) -> I32:
        """See Routing."""
        return self._on_host()[1]

    def pending(self) -> list[mx.array]:
        """What has to be computed before the host can look."""
        return [self._chosen] if self._guessed is None else [self._chosen, self._guessed]

    def _on_host(self) -> tuple[I32, I32]:
        if self._host is None:
            chosen = self._clock.on_host(self._chosen).astype(np.int32)
            top = self._spec.num_experts_per_tok
            if self._guessed is None:
                guess = chosen[0, top:][::-1] if len(chosen) == 1 else _NOBODY
                self._host = chosen[:, :top], guess
            else:
                guessed = self._clock.on_host(self._guessed)
                self._host = chosen, _most_chosen(guessed, self._spec.num_experts)
        return self._host


def _most_chosen(rows: NDArray[np.uint32], num_experts: int) -> I32:
    """Expert ids by how many rows chose them, then by id; those that nobody chose left out."""
    counts = np.bincount(rows.reshape(-1), minlength=num_experts)
    ranked = np.argsort(-counts, kind="stable")
    return ranked[: np.count_nonzero(counts)].astype(np.int32)


class MlxRouter:
    """RouterBlock on MLX."""

    def __init__(
        self,
        memory: MlxMemory,
        traits: Traits,
        spec: RouterSpec,
        weights: Mapping[str, Weight],
        next_spec: RouterSpec | None,
        next_weights: Mapping[str, Weight] | None,
    ) -> None:
        self.spec, self._next_spec, self.clock = spec, next_spec, traits.clock
        self._scorer = _Scorer(memory, traits, spec, weights)
        self._next: _Scorer | None = None
        if next_spec is not None and next_weights is not None:
            self._next = _Scorer(memory, traits, next_spec, next_weights)
        self._one = device.compiled(self._route_guessing)

    def __call__(self, x: mx.array, candidates: int) -> MlxRouting:
        """x [T, H] after attention to its routing; nothing is computed yet."""
        spec, following = self.spec, self._next
        if following is None:
            candidates = 0
        elif candidates:
            assert self._next_spec is not None
            candidates = min(candidates, self._next_spec.num_experts)
        if x.shape[0] == 1:
            normed, weights, chosen = self._one(x, candidates)
            routing = MlxRouting(chosen, None, spec, self.clock)
        else:
            normed, weights, chosen = self.route(x)
            guessed = None
            if candidates and following is not None:
                guessed = following.guess(x, spec.num_experts_per_tok)
            routing = MlxRouting(chosen, guessed, spec, self.clock)
        routing.normed, routing.weights = normed, weights
        return routing

    def route(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Normed rows [T, H], mixing weights [T, K] and the ids they belong to."""
        spec, scorer = self.spec, self._scorer
        normed, logits = scorer.score(x)
        chosen = scorer.best(logits, spec.num_experts_per_tok)
        if spec.scoring == "sigmoid":
            return normed, self._sigmoids(logits, chosen).astype(normed.dtype), chosen
        if not spec.norm_topk_prob:
            logits = mx.softmax(logits, axis=-1, precise=True)
        weights = mx.take_along_axis(logits, chosen, axis=-1)
        if spec.norm_topk_prob:
            # The same as normalising the chosen of all probabilities.
            weights = mx.softmax(weights, axis=-1, precise=True)
        if spec.routed_scaling_factor != 1:
            weights = weights * spec.routed_scaling_factor
        return normed, weights, chosen

    def _sigmoids(self, logits: mx.array, chosen: mx.array) -> mx.array:
        """Mixing weights [T, K], float32."""
        logits = mx.take_along_axis(logits, chosen, axis=-1)
        weights = mx.sigmoid(logits.astype(mx.float32))
        if self.spec.norm_topk_prob:
            # They may all be zero.
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return weights * self.spec.routed_scaling_factor

    def _route_guessing(self, x: mx.array, candidates: int) -> tuple[mx.array, mx.array, mx.array]:
        """The same for one row; the guess follows the ids."""
        normed, weights, chosen = self.route(x)
        if candidates:
            following = self._next
            assert following is not None
            guessed = following.guess(x, candidates)
            chosen = mx.concatenate([chosen, guessed], axis=-1)
        return normed, weights, chosen


class _Scorer:
    """One layer's norm and gate."""

    def __init__(
        self,
        memory: MlxMemory,
        traits: Traits,
        spec: RouterSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        self._spec = spec
        self._correction: mx.array | None = None
        if "correction" in weights:
            self._correction = memory.arrays(weights["correction"])[0]
        self._norm = vector(memory, traits, weights["norm"])
        bias = vector(memory, traits, weights["bias"]) if "bias" in weights else None
        self._gate = Linear(memory, traits, weights["gate"], bias)

    def score(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Normed rows and their logits [T, E]."""
        normed = mx.fast.rms_norm(x, self._norm, self._spec.rms_norm_eps)
        return normed, self._gate(normed)

    def best(self, logits: mx.array, count: int) -> mx.array:
        """Ids of those that rank highest, best last, uint32 [T, count]."""
        return mx.argsort(self._ranks(logits), axis=-1)[:, -count:]

    def guess(self, x: mx.array, count: int) -> mx.array:
        """The same from rows [T, H]."""
        return self.best(self.score(x)[1], count)

    def _ranks(self, logits: mx.array) -> mx.array:
        """What the largest are chosen of; -inf in groups that are left out. [T, E]."""
        spec = self._spec
        if spec.scoring == "softmax":
            return logits
        scores = mx.sigmoid(logits.astype(mx.float32))
        if self._correction is not None:
            scores = scores + self._correction
        left_out = spec.n_group - spec.topk_group
        if not left_out:
            return scores
        groups = mx.unflatten(scores, -1, (spec.n_group, -1))
        best = mx.topk(groups, 2, axis=-1).sum(axis=-1)
        worst = mx.argsort(best, axis=-1)[:, :left_out, None]
        lowest = mx.array(-mx.inf, scores.dtype)
        return mx.flatten(mx.put_along_axis(groups, worst, lowest, axis=1), 1)
