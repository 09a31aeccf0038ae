from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

UNORDERED_ROWS: int

class Pool:
    """The caller and threads - 1 workers."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def set_threads(self, threads: int) -> None: ...

class LinearDesc:
    """One il16 weight at an address; bits 0 is dense."""

    def __init__(
        self,
        address: int,
        rows: int,
        in_features: int,
        bits: int,
        dtype: str,
        bias: int = 0,
        group_size: int = 64,
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Experts:
    """Experts block over slots (see aegis.kernels.native.moe)."""

    def __init__(
        self,
        pool: Pool,
        shape: tuple[int, ...],
        slot_base: int,
        slot_stride: int,
        slot_count: int,
        routed: tuple[LinearDesc, ...],
        shared: tuple[LinearDesc, ...] | None,
        shared_gate: LinearDesc | None,
        scratch: int,
        scratch_nbytes: int,
        residual: float = 1.0,
        clamp: tuple[float, float] | None = None,
    ) -> None: ...
    def begin(
        self,
        x: NDArray[np.float32],
        normed: NDArray[np.float32],
        experts: NDArray[np.int32],
        weights: NDArray[np.float32],
    ) -> None: ...
    def add(self, experts: NDArray[np.int32], slots: NDArray[np.int32]) -> None: ...
    def finish(self) -> None: ...
    def run(
        self,
        x: NDArray[np.float32],
        normed: NDArray[np.float32],
        chosen: NDArray[np.int32],
        weights: NDArray[np.float32],
        experts: NDArray[np.int32],
        slots: NDArray[np.int32],
    ) -> None: ...

def experts_scratch_nbytes(shape: tuple[int, ...]) -> int: ...
def linear(
    pool: Pool, desc: LinearDesc, x: NDArray[np.float32], out: NDArray[np.float32]
) -> None: ...
def isa() -> str: ...
def isas() -> list[str]: ...
def select_isa(name: str) -> None: ...
def usable_processors() -> int: ...
def crc32(address: int, nbytes: int, method: str = "") -> int: ...
def crc32_methods() -> list[str]: ...
def wake(pool: Pool) -> None: ...
def time_linears(pool: Pool, descs: list[LinearDesc], tokens: int, repeats: int) -> float: ...
def time_read(pool: Pool, address: int, nbytes: int, repeats: int) -> float: ...
def fma_peak(pool: Pool, repeats: int) -> float: ...

class ReadPool:
    """Reader threads with two queues: demand before guess (see aegis.tiers.read_pool)."""

    def __init__(self, threads: int, drop_cache: bool = False) -> None: ...
    def submit(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        address: int,
        demand: bool,
        checksum: int = -1,
    ) -> int: ...
    def submit_run(
        self,
        fd: int,
        offset: int,
        nbytes: int,
        addresses: Sequence[int],
        demand: bool,
        checksums: Sequence[int] = (),
    ) -> int: ...
    def promote(self, ticket: int) -> bool: ...
    def cancel(self, ticket: int) -> bool: ...
    def done(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> None: ...
    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]: ...
    def damaged(self, ticket: int) -> list[int]: ...
    def result(self, ticket: int) -> int: ...
    @property
    def read_nbytes(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    def close(self) -> None: ...

class KVCache:
    """Keys and values of one layer at an address (see aegis.kernels.native.attention)."""

    def __init__(
        self, address: int, kv_heads: int, positions: int, dim: int, value_dim: int
    ) -> None: ...

class Attention:
    """Attention block; the arrays at the addresses must outlive it."""

    def __init__(
        self,
        pool: Pool,
        hidden: int,
        heads: int,
        kv_heads: int,
        dim: int,
        max_tokens: int,
        context: int,
        eps: float,
        inv_freq: Sequence[float],
        norm: int,
        q: LinearDesc,
        k: LinearDesc,
        v: LinearDesc,
        o: LinearDesc,
        scratch: int,
        scratch_nbytes: int,
        q_norm: int = 0,
        k_norm: int = 0,
        norm_per_head: bool = False,
        scale: float | None = None,
        residual: float = 1.0,
        output_gate: bool = False,
        rotary_scale: float = 1.0,
        window: int = 0,
        sinks: int = 0,
    ) -> None: ...
    def __call__(self, x: NDArray[np.float32], cache: KVCache, start: int) -> None: ...

class DeltaState:
    """State of one layer at an address (see aegis.kernels.native.delta)."""

    def __init__(self, address: int, head_numbers: int, numbers: int) -> None: ...

class Delta:
    """Gated DeltaNet block; the arrays at the addresses must outlive it."""

    def __init__(
        self,
        pool: Pool,
        hidden: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        max_tokens: int,
        eps: float,
        norm: int,
        conv: int,
        a_log: int,
        dt_bias: int,
        out_norm: int,
        qkv: LinearDesc,
        z: LinearDesc,
        a: LinearDesc,
        b: LinearDesc,
        out: LinearDesc,
        scratch: int,
        scratch_nbytes: int,
    ) -> None: ...
    def __call__(self, x: NDArray[np.float32], state: DeltaState, first: bool) -> None: ...

class LatentAttention:
    """Latent attention; the arrays at the addresses must outlive it.

    shape: hidden, heads, rank, nope, rope, value, max_tokens, context. norms: norm, kv_norm, q_norm
    (0: none, and linears[1] is not used). linears: q, q_b, kv, embed, unembed, o.
    """

    def __init__(
        self,
        pool: Pool,
        shape: Sequence[int],
        eps: float,
        lora_eps: float,
        inv_freq: Sequence[float],
        scale: float,
        rotary_scale: float,
        norms: Sequence[int],
        linears: Sequence[LinearDesc],
        scratch: int,
        scratch_nbytes: int,
    ) -> None: ...
    def __call__(self, x: NDArray[np.float32], cache: KVCache, start: int) -> None: ...

class Mlp:
    """MLP block; the arrays at the addresses must outlive it."""

    def __init__(
        self,
        pool: Pool,
        max_tokens: int,
        eps: float,
        norm: int,
        gate: LinearDesc,
        up: LinearDesc,
        down: LinearDesc,
        scratch: int,
        scratch_nbytes: int,
        residual: float = 1.0,
    ) -> None: ...
    def __call__(self, x: NDArray[np.float32]) -> None: ...

class RouterLayer:
    """Norm, gate and rule of one router."""

    def __init__(
        self,
        norm: int,
        gate: LinearDesc,
        eps: float,
        k: int,
        normalise: bool,
        sigmoid: bool = False,
        correction: int = 0,
        groups: int = 1,
        kept: int = 1,
        scaling: float = 1.0,
    ) -> None: ...

class Router:
    """Router block over the workspace's arrays; a call returns how many experts it guessed."""

    def __init__(
        self,
        pool: Pool,
        hidden: int,
        max_tokens: int,
        layer: RouterLayer,
        next: RouterLayer | None,
        normed: int,
        experts: int,
        weights: int,
        guess: int,
        scratch: int,
        scratch_nbytes: int,
    ) -> None: ...
    def __call__(self, x: NDArray[np.float32], candidates: int) -> int: ...

class Head:
    """Final norm and logits."""

    def __init__(
        self,
        pool: Pool,
        norm: int,
        eps: float,
        lm_head: LinearDesc,
        max_rows: int,
        scratch: int,
        scratch_nbytes: int,
        scaling: float = 1.0,
    ) -> None: ...
    def __call__(self, x: NDArray[np.float32], logits: NDArray[np.float32]) -> None: ...

def gather(
    table: LinearDesc,
    ids: NDArray[np.int32],
    ranges: NDArray[np.uint8] | None,
    out: NDArray[np.float32],
    multiplier: float = 1.0,
) -> None: ...
def rms_norm(
    x: NDArray[np.float32], weight: NDArray[np.float32], eps: float, out: NDArray[np.float32]
) -> None: ...
def elementwise(name: str, x: NDArray[np.float32], out: NDArray[np.float32]) -> None: ...
