"""An optional record of every token's routing, for simulating policies and training guesses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RoutingTrace:
    """Chosen experts per MoE layer, appended row by row, saved as one .npz file."""

    def __init__(self, num_layers: int, num_experts: int, num_experts_per_tok: int) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self._dtype: np.dtype[Any] = np.dtype(np.uint8 if num_experts <= 256 else np.int16)
        self._rows: list[list[bytes]] = [[] for _ in range(num_layers)]

    def record(self, layer_index: int, experts: NDArray[np.int32] | Sequence[int]) -> None:
        """Append the choices of one or more tokens: [K] or [T, K]."""
        rows = np.asarray(experts, dtype=self._dtype).reshape(-1, self.num_experts_per_tok)
        self._rows[layer_index].append(rows.tobytes())

    def experts(self, layer_index: int) -> NDArray[np.integer[Any]]:
        """What was recorded for one layer: [tokens, K]."""
        data = np.frombuffer(b"".join(self._rows[layer_index]), dtype=self._dtype)
        rows: NDArray[np.integer[Any]] = data.reshape(-1, self.num_experts_per_tok)
        return rows

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write every layer as ``layer_NNN`` (written beside, then renamed); returns the path."""
        target = Path(path)
        if target.suffix != ".npz":
            target = target.with_name(target.name + ".npz")
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        layers: dict[str, Any] = {f"layer_{i:03}": self.experts(i) for i in range(self.num_layers)}
        try:
            with open(beside, "wb") as file:
                np.savez_compressed(file, **layers)
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
        return target
