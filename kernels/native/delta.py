"""The Gated DeltaNet block and its state: checks at open, then one call into C++ per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from aegis.kernels.base import DeltaSpec, KVCache, Weight
from aegis.kernels.native import _native
from aegis.kernels.native.descs import linear_desc, vector_address
from aegis.kernels.native.sizes_attention import recurrent_nbytes
from aegis.kernels.native.workspace import Workspace

F32 = NDArray[np.float32]


class NativeRecurrentState:
    """One layer's float32 state: heads [value_head, value_head_dim / 32, key_head_dim, 32] (where
    value_head_dim has 16 more, these behind the others), the latest inputs [conv_kernel_dim - 1,
    conv_dim]; and a copy of both."""

    def __init__(self, spec: DeltaSpec, buffer: NDArray[np.uint8]) -> None:
        self.nbytes, count = recurrent_nbytes(spec), spec.state_numbers
        if buffer.nbytes < self.nbytes or not buffer.flags.c_contiguous:
            raise ValueError(
                f"a recurrent state and its copy need {self.nbytes} contiguous bytes but were given"
                f" {buffer.nbytes}"
            )
        self._now, self._kept = buffer[: self.nbytes].view(np.float32).reshape(2, count)
        heads = spec.num_value_heads * spec.key_head_dim * spec.value_head_dim
        self.native = _native.DeltaState(self._now.ctypes.data, heads, count)

    def keep(self, position: int) -> None:
        """See RecurrentState."""
        del position  # there is one state only
        self._kept[:] = self._now

    def restore(self) -> None:
        """See RecurrentState."""
        self._now[:] = self._kept


class NativeDelta:
    """DeltaBlock in C++. The residual stream is updated in place."""

    def __init__(
        self,
        pool: _native.Pool,
        workspace: Workspace,
        spec: DeltaSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        self._weights, self._workspace = dict(weights), workspace
        _check_vectors(spec, weights)
        vectors = {name: vector_address(weights[name]) for name in _vector_sizes(spec)}
        qkv, z, a, b = (linear_desc(weights[f"in_proj_{name}"]) for name in ("qkv", "z", "a", "b"))
        self._block = _native.Delta(
            pool,
            hidden=spec.hidden_size,
            key_heads=spec.num_key_heads,
            value_heads=spec.num_value_heads,
            key_dim=spec.key_head_dim,
            value_dim=spec.value_head_dim,
            taps=spec.conv_kernel_dim,
            max_tokens=workspace.spec.max_tokens,
            eps=spec.rms_norm_eps,
            norm=vectors["norm"],
            conv=vectors["conv"],
            a_log=vectors["A_log"],
            dt_bias=vectors["dt_bias"],
            out_norm=vectors["out_norm"],
            qkv=qkv,
            z=z,
            a=a,
            b=b,
            out=linear_desc(weights["out_proj"]),
            scratch=workspace.scratch,
            scratch_nbytes=workspace.scratch_nbytes,
        )

    def __call__(self, x: F32, cache: KVCache, start: int) -> F32:
        """x [T, H] at positions start.. is updated in place and returned."""
        self._block(x, cast(NativeRecurrentState, cache).native, start == 0)
        return x


def _vector_sizes(spec: DeltaSpec) -> dict[str, int]:
    return {
        "norm": spec.hidden_size,
        "conv": spec.conv_kernel_dim * spec.conv_dim,
        "A_log": spec.num_value_heads,
        "dt_bias": spec.num_value_heads,
        "out_norm": spec.value_head_dim,
    }


def _check_vectors(spec: DeltaSpec, weights: Mapping[str, Weight]) -> None:
    """Raise unless every vector has as many numbers as C++ will read."""
    for name, size in _vector_sizes(spec).items():
        if weights[name].shape != (size,):
            raise ValueError(
                f"Gated DeltaNet's {name} has shape {weights[name].shape}, expected ({size},)"
            )
