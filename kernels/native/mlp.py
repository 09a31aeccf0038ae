"""The MLP block: checks at open, then one call into C++ per layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import MlpSpec, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.descs import linear_desc, vector_address
from aegis.kernels.native.workspace import Workspace

F32 = NDArray[np.float32]


class NativeMlp:
    """MlpBlock in C++. The residual stream is updated in place."""

    def __init__(
        self,
        pool: _native.Pool,
        workspace: Workspace,
        spec: MlpSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        self._weights, self._workspace = dict(weights), workspace
        hidden, inner = spec.hidden_size, spec.intermediate_size
        if weights["norm"].shape != (hidden,) or weights["gate_proj"].shape != (inner, hidden):
            raise ValueError(f"the weights are not those of an MLP of {hidden} by {inner}")
        gate, up, down = (linear_desc(weights[f"{n}_proj"]) for n in ("gate", "up", "down"))
        self._block = _native.Mlp(
            pool,
            max_tokens=workspace.spec.max_tokens,
            eps=spec.rms_norm_eps,
            norm=vector_address(weights["norm"]),
            gate=gate,
            up=up,
            down=down,
            scratch=workspace.scratch,
            scratch_nbytes=workspace.scratch_nbytes,
            residual=spec.residual_multiplier,
        )

    def __call__(self, x: F32) -> F32:
        """x [T, H] after attention is updated in place and returned."""
        self._block(x)
        return x
