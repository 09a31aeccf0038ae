"""The delta rule over tokens in order: as plain operations, and as one kernel where there is a GPU.

Plain operations are queued one by one, several for every token of a chunk. In the kernel a warp
holds one value channel's row of a head's state in registers, each lane every 32nd number of it, and
goes through all tokens. Either way sums have one form, whatever rows a call has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from aegis.kernels.base import DeltaSpec
from aegis.kernels.mlx.device import Traits

Recurrence = Callable[
    [mx.array, mx.array, mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]
]
"""Queries and keys [T, key_heads, key_head_dim], values [T, value_heads, value_head_dim], decay and
beta [T, value_heads], the state; to what is read, as values, and the new state. All float32."""

_LANES = 32
_WARPS = 4
"""Value channels of one group of threads."""

_HEADERS = {
    "metal": """
inline float multiply_add(float a, float b, float c) { return fma(a, b, c); }
inline float sum_of_lanes(float x) { return simd_sum(x); }
""",
    "cuda": """
__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline float sum_of_lanes(float x) {
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
""",
}
_PLACES = {
    "metal": """
  const int lane = thread_position_in_threadgroup.x;
  const int channel = thread_position_in_grid.y;
  const int head = thread_position_in_grid.z;
""",
    "cuda": """
  const int lane = threadIdx.x;
  const int channel = blockIdx.y * blockDim.y + threadIdx.y;
  const int head = blockIdx.z;
""",
}
_SOURCE = """
  const int row = (head * CHANNELS + channel) * KEYS + lane;
  const int shared = head / SHARED;
  float held[OWN];
  for (int i = 0; i < OWN; ++i) held[i] = state[row + i * 32];
  const int tokens = v_shape[0];
  for (int token = 0; token < tokens; ++token) {
    const int keys = (token * KEY_HEADS + shared) * KEYS + lane;
    const int value = (token * HEADS + head) * CHANNELS + channel;
    const float fade = decay[token * HEADS + head];
    float known = 0.0f;
    for (int i = 0; i < OWN; ++i) {
      held[i] = held[i] * fade;
      known = multiply_add(held[i], k[keys + i * 32], known);
    }
    const float change = (v[value] - sum_of_lanes(known)) * beta[token * HEADS + head];
    float out = 0.0f;
    for (int i = 0; i < OWN; ++i) {
      held[i] = multiply_add(k[keys + i * 32], change, held[i]);
      out = multiply_add(held[i], q[keys + i * 32], out);
    }
    out = sum_of_lanes(out);
    if (lane == 0) read[value] = out;
  }
  for (int i = 0; i < OWN; ++i) after[row + i * 32] = held[i];
"""


def recurrence(traits: Traits, spec: DeltaSpec) -> Recurrence:
    """The best way to compute it on this device."""
    return fused(traits, spec) or plain(spec)


def plain(spec: DeltaSpec) -> Recurrence:
    """Operations that any device has; those of one token are one compiled piece."""
    shared = spec.num_value_heads // spec.num_key_heads

    def one(
        q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, heads: mx.array
    ) -> tuple[mx.array, mx.array]:
        q, k = (mx.repeat(part, shared, axis=0)[:, None] for part in (q, k))
        heads = heads * decay[:, None, None]
        change = (v - (heads * k).sum(axis=-1)) * beta[:, None]
        heads = heads + change[..., None] * k
        return (heads * q).sum(axis=-1), heads

    token = cast("Recurrence", mx.compile(one))

    def run(
        q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, heads: mx.array
    ) -> tuple[mx.array, mx.array]:
        read = []
        for t in range(v.shape[0]):
            out, heads = token(q[t], k[t], v[t], decay[t], beta[t], heads)
            read.append(out)
        return mx.stack(read), heads

    return run


def fused(traits: Traits, spec: DeltaSpec) -> Recurrence | None:
    """The kernel for this device and these sizes; None where plain operations have to do."""
    device = traits.device
    if device == "cpu" or spec.key_head_dim % _LANES or spec.value_head_dim % _WARPS:
        return None
    make = mx.fast.metal_kernel if device == "metal" else mx.fast.cuda_kernel
    kernel = cast(
        "Callable[..., list[mx.array]]",
        make(
            name="gated_delta_rule",
            input_names=["q", "k", "v", "decay", "beta", "state"],
            output_names=["read", "after"],
            source=_PLACES[device] + _SOURCE,
            header=_HEADERS[device],
        ),
    )
    template: list[tuple[str, Any]] = [
        ("KEYS", spec.key_head_dim),
        ("CHANNELS", spec.value_head_dim),
        ("KEY_HEADS", spec.num_key_heads),
        ("HEADS", spec.num_value_heads),
        ("SHARED", spec.num_value_heads // spec.num_key_heads),
        ("OWN", spec.key_head_dim // _LANES),
    ]

    def run(
        q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        read, after = kernel(
            inputs=[q, k, v, decay, beta, state],
            template=template,
            grid=(_LANES, spec.value_head_dim, spec.num_value_heads),
            threadgroup=(_LANES, _WARPS, 1),
            output_shapes=[v.shape, state.shape],
            output_dtypes=[mx.float32, mx.float32],
        )
        return read, after

    return run
