"""The delta rule on MLX: plain operations are right, and a GPU's kernel computes what they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_tools import ON_GPU, needs_mlx

from aegis.kernels.base import DeltaSpec

pytestmark = needs_mlx

SPEC = DeltaSpec(64, 2, 6, 32, 16, 4, 1e-6)
LARGE = DeltaSpec(2048, 16, 32, 128, 128, 4, 1e-6)
"""As the 35B shape has it."""


def inputs(spec: DeltaSpec, rows: int) -> list[Any]:
    """Queries, keys, values, decay, beta, state: float32."""
    rng = np.random.default_rng(rows)
    keys = (rows, spec.num_key_heads, spec.key_head_dim)
    values = (rows, spec.num_value_heads, spec.value_head_dim)
    state = (spec.num_value_heads, spec.value_head_dim, spec.key_head_dim)
    arrays = [rng.standard_normal(shape) for shape in (keys, keys, values)]
    arrays[0] /= spec.key_head_dim
    arrays[1] /= np.linalg.norm(arrays[1], axis=-1, keepdims=True)
    arrays += [rng.uniform(0.5, 1, values[:2]), rng.uniform(0, 1, values[:2])]
    return [array.astype(np.float32) for array in (*arrays, rng.standard_normal(state))]


def exact(spec: DeltaSpec, given: list[Any]) -> tuple[Any, Any]:
    """In float64: what is read, and the state."""
    q, k, v, decay, beta, state = (array.astype(np.float64) for array in given)
    shared = spec.num_value_heads // spec.num_key_heads
    q, k = np.repeat(q, shared, axis=1), np.repeat(k, shared, axis=1)
    read = np.empty_like(v)
    for t in range(len(v)):
        state = state * decay[t][:, None, None]
        change = (v[t] - np.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + change[..., None] * k[t][:, None]
        read[t] = np.einsum("hvk,hk->hv", state, q[t])
    return read, state


def in_pieces(rule: Any, given: list[Any], pieces: list[int]) -> tuple[Any, Any]:
    """A rule over some rows after the others, the state handed on."""
    import mlx.core as mx

    state, read, start = mx.array(given[5]), [], 0
    for rows in pieces:
        part = [mx.array(array[start : start + rows]) for array in given[:5]]
        out, state = rule(*part, state)
        read.append(np.array(out))
        start += rows
    return np.concatenate(read), np.array(state)


def check_same_bits(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0].tobytes() == other[0].tobytes()
    assert one[1].tobytes() == other[1].tobytes()


def test_plain_operations_match_float64_and_depend_on_no_rows() -> None:
    from aegis.kernels.mlx.delta_rule import plain

    given = inputs(SPEC, 40)
    whole = in_pieces(plain(SPEC), given, [40])
    for found, expected in zip(whole, exact(SPEC, given), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    check_same_bits(whole, in_pieces(plain(SPEC), given, [1] * 20 + [13, 7]))


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no kernel for it")
@pytest.mark.parametrize("spec", [SPEC, LARGE])
def test_a_kernel_computes_what_plain_operations_do_and_depends_on_no_rows(spec: DeltaSpec) -> None:
    from aegis.kernels.mlx.delta_rule import fused, plain
    from aegis.kernels.mlx.device import open_device
    from aegis.kernels.mlx.sizes import CACHE_NBYTES

    rule = fused(open_device("f32", CACHE_NBYTES), spec)
    assert rule is not None
    given = inputs(spec, 70)
    whole = in_pieces(rule, given, [70])
    for found, expected in zip(whole, in_pieces(plain(spec), given, [70]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    check_same_bits(whole, in_pieces(rule, given, [1] * 20 + [43, 7]))


def test_a_cpu_and_sizes_that_do_not_fit_a_warp_have_none() -> None:
    from aegis.kernels.mlx.delta_rule import fused
    from aegis.kernels.mlx.device import Traits

    assert fused(Traits("cpu", "f32", 4, 1), LARGE) is None
    for device in ("metal", "cuda"):
        odd = DeltaSpec(64, 2, 6, 48, 16, 4, 1e-6)
        assert fused(Traits(device, "f32", 16, 1), odd) is None
