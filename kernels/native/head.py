"""The head block: final norm and logits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import HeadSpec, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.descs import linear_desc, vector_address
from aegis.kernels.native.workspace import Workspace

F32 = NDArray[np.float32]


class NativeHead:
    """HeadBlock in C++; logits lie in the workspace until the next call."""

    def __init__(
        self,
        pool: _native.Pool,
        workspace: Workspace,
        spec: HeadSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        self._weights = dict(weights)
        lm_head = weights["lm_head"]
        if lm_head.shape != (spec.vocab_size, spec.hidden_size):
            expected = (spec.vocab_size, spec.hidden_size)
            raise ValueError(f"lm_head has shape {lm_head.shape}, expected {expected}")
        if weights["norm"].shape != (spec.hidden_size,):
            raise ValueError(
                f"final norm has shape {weights['norm'].shape}, expected ({spec.hidden_size},)"
            )
        self._logits: F32 = workspace.logits
        self._block = _native.Head(
            pool,
            norm=vector_address(weights["norm"]),
            eps=spec.rms_norm_eps,
            lm_head=linear_desc(lm_head),
            max_rows=workspace.spec.max_logit_rows,
            scratch=workspace.scratch,
            scratch_nbytes=workspace.scratch_nbytes,
            scaling=spec.logits_scaling,
        )

    def __call__(self, x: F32) -> F32:
        """x [T, H], T <= max_logit_rows, to logits [T, vocab_size]."""
        self._block(x, self._logits)
        return self._logits[: len(x)]
