"""Products with resident weights, and the small functions that blocks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from aegis.kernels.base import Format, SwigluClamp, Weight
from aegis.kernels.mlx.device import Traits
from aegis.kernels.mlx.memory import Arrays, MlxMemory, quantised
from aegis.kernels.mlx.sizes import inputs_behind


class Linear:
    """x [T, in] to x @ weight.T (+ bias), in the numbers of x."""

    def __init__(
        self, memory: MlxMemory, traits: Traits, weight: Weight, bias: mx.array | None = None
    ) -> None:
        self._dtype, self._multiple = traits.dtype, traits.row_multiple
        self._format, self._bias = weight.format, bias
        self._arrays = in_numbers(memory.arrays(weight), weight, traits)
        self._behind = rows_behind(weight.shape, weight.format, traits)
        one_group = self._format.kind != "dense" and weight.shape[1] == self._format.group_size
        self._by_index = traits.by_index and one_group
        in_tiles = traits.wide_groups_in_tiles and self._format.group_size > 64
        self._most_rows = traits.tile_rows if in_tiles else None

    def __call__(self, x: mx.array) -> mx.array:
        """The product; weights of wider numbers than x's are computed with in theirs."""
        rows = x.shape[0]
        if rows > 1 and rows % self._multiple:
            padded = mx.pad(x, [(0, -rows % self._multiple), (0, 0)])
            return self._product(padded)[:rows]
        return self._product(x)

    def _product(self, x: mx.array) -> mx.array:
        rows = x.shape[0]
        if self._format.kind == "dense":
            out = x @ self._arrays[0].T
        else:
            fmt = self._format
            if tiled := self._most_rows is not None and rows > 1:
                x = x.reshape(-1, self._most_rows, x.shape[1])
            x = with_room(x, self._behind)
            if self._by_index and rows > 1:
                out = mx.gather_qmm(
                    x,
                    *quantised(tuple(array[None] for array in self._arrays)),
                    rhs_indices=mx.array(0, mx.uint32),
                    group_size=fmt.group_size,
                    bits=fmt.bits,
                    mode=fmt.kind,
                )
            else:
                out = mx.quantized_matmul(
                    x,
                    *quantised(self._arrays),
                    group_size=fmt.group_size,
                    bits=fmt.bits,
                    mode=fmt.kind,
                )
            if tiled:
                out = out.reshape(rows, -1)
        if out.dtype != self._dtype:
            out = out.astype(self._dtype)
        return out if self._bias is None else out + self._bias


class ByHead:
    """Each head's rows through a matrix of its own: x [heads, T, in] to [heads, T, out]."""

    def __init__(self, memory: MlxMemory, traits: Traits, weight: Weight, heads: int) -> None:
        """weight: the heads' matrices one behind the other, (heads * out, in)."""
        self._dtype, self._tile_rows = traits.dtype, traits.tile_rows
        self._format, self._heads = weight.format, heads
        whole = in_numbers(memory.arrays(weight), weight, traits)
        self._arrays = tuple(array.reshape(heads, -1, array.shape[-1]) for array in whole)
        rows, *width = weight.shape
        self._behind = rows_behind((rows // heads, *width), weight.format, traits)

    def __call__(self, x: mx.array) -> mx.array:
        """All products, in tiles of equal rows, for which GPUs have kernels."""
        heads, rows, width = x.shape
        size = 1 if rows == 1 else self._tile_rows
        padded = mx.pad(x, [(0, 0), (0, -rows % size), (0, 0)]) if rows % size else x
        tiles = padded.shape[1] // size
        out = self._product(padded.reshape(heads * tiles, size, width), tiles)
        out = out.reshape(heads, tiles * size, -1)[:, :rows]
        return out if out.dtype == self._dtype else out.astype(self._dtype)

    def _product(self, x: mx.array, tiles: int) -> mx.array:
        """x [heads * tiles, rows, in]."""
        if self._format.kind == "dense":
            matrices = self._arrays[0].swapaxes(-1, -2)[:, None]
            by_head = x.reshape(self._heads, tiles, *x.shape[1:])
            return by_head @ matrices
        which = mx.arange(self._heads * tiles, dtype=mx.uint32) // tiles
        return mx.gather_qmm(
            with_room(x, self._behind),
            *quantised(self._arrays),
            rhs_indices=which,
            transpose=True,
            group_size=self._format.group_size,
            bits=self._format.bits,
            mode=self._format.kind,
        )


class SideBySide:
    """One input through several matrices, their outputs beside each other: x [T, in] to
    [T, sum of rows]. It is one product, a third of the time to queue, if formats agree."""

    def __init__(
        self,
        memory: MlxMemory,
        traits: Traits,
        weights: Sequence[Weight],
        biases: Sequence[Weight] = (),
    ) -> None:
        """biases: one for every matrix, or none at all."""
        one = memory.join(weights, biases)
        parts = weights if one is None else one[:1]
        vectors = [vector(memory, traits, bias) for bias in (biases if one is None else one[1:])]
        if one is not None and vectors:
            vectors = [mx.concatenate(vectors)]
            mx.eval(vectors)
        self._linears = [
            Linear(memory, traits, weight, vectors[place] if vectors else None)
            for place, weight in enumerate(parts)
        ]

    def __call__(self, x: mx.array) -> mx.array:
        """All products."""
        outputs = [linear(x) for linear in self._linears]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)


def rows_behind(shape: tuple[int, ...], fmt: Format, traits: Traits) -> int:
    """How many rows behind what a matrix of this shape multiplies are read, see ``sizes``."""
    if not traits.reads_behind or len(shape) != 2:
        return 0
    return -(-inputs_behind((shape[0], shape[1]), fmt) // shape[1])


def with_room(x: mx.array, count: int) -> mx.array:
    """x [.., in], where ``count`` further rows follow it in its allocation."""
    if not count:
        return x
    rows = x.reshape(-1, x.shape[-1])
    return mx.pad(rows, [(0, count), (0, 0)])[: rows.shape[0]].reshape(x.shape)


def in_numbers(arrays: Arrays, weight: Weight, traits: Traits) -> Arrays:
    """Scales and biases widened once where activations are float32: MLX would do it every call."""
    if weight.format.kind != "affine" or traits.numbers != "f32":
        return arrays
    widened = (arrays[0], *(array.astype(mx.float32) for array in arrays[1:]))
    mx.eval(widened)
    return widened


def vector(memory: MlxMemory, traits: Traits, weight: Weight) -> mx.array:
    """A norm or a bias in the numbers of activations, which it had before it was stored."""
    array = memory.arrays(weight)[0].astype(traits.dtype)
    mx.eval(array)
    return array


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up."""
    return gate * mx.sigmoid(gate) * up


@partial(mx.compile, shapeless=True)
def mixed_swiglu(gate: mx.array, up: mx.array, weights: mx.array) -> mx.array:
    """The same times weights, which takes no operation of its own."""
    return gate * mx.sigmoid(gate) * up * weights


@partial(mx.compile, shapeless=True)
def _clamped(gate: mx.array, up: mx.array, limit: float, alpha: float) -> mx.array:
    gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
    return gate * mx.sigmoid(alpha * gate) * (up + 1)


def activation(clamp: SwigluClamp | None) -> Callable[[mx.array, mx.array], mx.array]:
    """SwiGLU of a gate and what it is for, clamped or plain."""
    if clamp is None:
        return swiglu
    limit, alpha = clamp.limit, clamp.alpha
    return lambda gate, up: _clamped(gate, up, limit, alpha)


def halves(x: mx.array) -> tuple[mx.array, mx.array]:
    """The two outputs that lie beside each other in the last dimension."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@partial(mx.compile, shapeless=True)
def gated_sum(x: mx.array, routed: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    """x + (routed + sigmoid(gate) * shared)."""
    return x + (routed + mx.sigmoid(gate) * shared)
