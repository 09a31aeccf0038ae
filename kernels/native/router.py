"""The router block: norm, gate, top-k, weights, and the guess for the next MoE layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import RouterSpec, Routing, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.descs import linear_desc, vector_address
from aegis.kernels.native.workspace import Workspace

F32 = NDArray[np.float32]


class NativeRouter:
    """RouterBlock in C++. What a call returns lies in the workspace until the next call."""

    def __init__(
        self,
        pool: _native.Pool,
        workspace: Workspace,
        spec: RouterSpec,
        weights: Mapping[str, Weight],
        next_spec: RouterSpec | None,
        next_weights: Mapping[str, Weight] | None,
    ) -> None:
        _check_workspace(spec, workspace)
        self._kept = (dict(weights), dict(next_weights or {}))
        following = None
        if next_spec is not None and next_weights is not None:
            _check_workspace(next_spec, workspace)
            following = _layer(next_spec, next_weights)
        self._workspace = workspace
        self._single: dict[int, Routing] = {}
        self._block = _native.Router(
            pool,
            hidden=spec.hidden_size,
            max_tokens=workspace.spec.max_tokens,
            layer=_layer(spec, weights),
            next=following,
            normed=workspace.normed.ctypes.data,
            experts=workspace.experts.ctypes.data,
            weights=workspace.weights.ctypes.data,
            guess=workspace.guess.ctypes.data,
            scratch=workspace.scratch,
            scratch_nbytes=workspace.scratch_nbytes,
        )

    def __call__(self, x: F32, candidates: int) -> Routing:
        """x [T, H] to its Routing; with ``candidates`` > 0 the next layer is guessed too."""
        guessed = self._block(x, candidates)
        if len(x) != 1:
            return self._routing(len(x), guessed)
        if guessed not in self._single:
            self._single[guessed] = self._routing(1, guessed)
        return self._single[guessed]

    def _routing(self, rows: int, guessed: int) -> Routing:
        space = self._workspace
        return Routing(
            experts=space.experts[:rows],
            weights=space.weights[:rows],
            normed=space.normed[:rows],
            guess=space.guess[:guessed],
        )


def _layer(spec: RouterSpec, weights: Mapping[str, Weight]) -> _native.RouterLayer:
    gate = weights["gate"]
    if gate.shape != (spec.num_experts, spec.hidden_size):
        expected = (spec.num_experts, spec.hidden_size)
        raise ValueError(f"router gate has shape {gate.shape}, expected {expected}")
    if weights["norm"].shape != (spec.hidden_size,):
        raise ValueError(
            f"post-attention norm has shape {weights['norm'].shape}, expected ({spec.hidden_size},)"
        )
    correction = weights.get("correction")
    if correction is not None and correction.shape != (spec.num_experts,):
        raise ValueError(
            f"router corrections have shape {correction.shape}, expected ({spec.num_experts},)"
        )
    return _native.RouterLayer(
        vector_address(weights["norm"]),
        linear_desc(gate, weights.get("bias")),
        spec.rms_norm_eps,
        spec.num_experts_per_tok,
        spec.norm_topk_prob,
        sigmoid=spec.scoring == "sigmoid",
        correction=0 if correction is None else vector_address(correction),
        groups=spec.n_group,
        kept=spec.topk_group,
        scaling=spec.routed_scaling_factor,
    )


def _check_workspace(spec: RouterSpec, workspace: Workspace) -> None:
    """Raise unless the routing of this layer fits the workspace's arrays."""
    given = workspace.spec
    if (
        spec.num_experts > given.num_experts
        or spec.num_experts_per_tok != given.num_experts_per_tok
        or spec.hidden_size != given.hidden_size
    ):
        raise ValueError(
            f"a router of {spec.num_experts} experts, {spec.num_experts_per_tok} per token, does "
            f"not fit a workspace opened for {given.num_experts} and {given.num_experts_per_tok}"
        )
