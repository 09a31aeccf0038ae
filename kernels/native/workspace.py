"""The workspace as numpy views and addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import WorkspaceSpec
from aegis.kernels.native import sizes


class Workspace:
    """Scratch memory bound once; every block works in it, one at a time.

    hidden and normed are float32 [max_tokens, H], weights float32 and experts int32
    [max_tokens, K], guess int32 [E], logits float32 [max_logit_rows, vocab].
    """

    def __init__(self, spec: WorkspaceSpec, buffer: NDArray[np.uint8]) -> None:
        needed = sizes.workspace_nbytes(spec)
        if buffer.nbytes < needed:
            raise ValueError(
                f"the workspace needs {needed} bytes but was given {buffer.nbytes}: "
                "size it with workspace_nbytes"
            )
        self.spec = spec
        self._buffer = buffer[-buffer.ctypes.data % 64 :]
        self._regions = sizes.regions(spec)
        rows, choices = spec.max_tokens, spec.num_experts_per_tok
        self.hidden = self._view("hidden", np.float32, rows, spec.hidden_size)
        self.normed = self._view("normed", np.float32, rows, spec.hidden_size)
        self.weights = self._view("weights", np.float32, rows, choices)
        self.experts = self._view("experts", np.int32, rows, choices)
        self.guess = self._view("guess", np.int32, spec.num_experts)
        self.logits = self._view("logits", np.float32, spec.max_logit_rows, spec.vocab_size)
        scratch = self._regions["scratch"]
        self.scratch: int = self._buffer.ctypes.data + scratch.offset
        self.scratch_nbytes = scratch.nbytes

    def _view(self, name: str, dtype: type[Any], *shape: int) -> NDArray[Any]:
        start = self._regions[name].offset
        count = int(np.prod(shape))
        piece: NDArray[np.uint8] = self._buffer[start : start + count * 4]
        view: NDArray[Any] = piece.view(dtype).reshape(shape)
        return view
