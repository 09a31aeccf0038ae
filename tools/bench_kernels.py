"""Measure the native kernels against this machine's limits: memory reads, multiply-adds, disk.

    python tools/bench_kernels.py [--isa avx2] [--file-dir DIR] [--json]

Everything is measured in one run, in turns and in windows of about a millisecond. The speed printed
is the best of many; the share of the limit is the median over rounds, each of which compares a
kernel with the limit measured beside it, so that it holds on a machine whose limit moves. Weights
come from a working set far larger than the caches, in huge pages; each window takes the next part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aegis.kernels.base import ExpertsSpec, Format, Routing, Segment, WorkspaceSpec
from aegis.kernels.native import _native, sizes
from aegis.kernels.native.descs import located_desc
from aegis.kernels.native.moe import NativeExperts
from aegis.kernels.native.workspace import Workspace
from aegis.kernels.sizes import GROUPS, MXFP4, align_up, nbytes
from aegis.tiers.arena import Arena

ARENA_NBYTES = 320 << 20
WINDOW_NBYTES = 16 << 20
WINDOWS = ARENA_NBYTES // WINDOW_NBYTES
HIDDEN, INNER, CHOICES = 2048, 512, 8
GEMM_ROWS = (1, 4, 16, 64, 512)
GEMV_ROWS = 4096
Row = dict[str, Any]


class Slots:
    """Slot memory over an arena."""

    def __init__(self, base: int, stride: int, num_slots: int) -> None:
        self.base, self.stride, self.num_slots = base, stride, num_slots


def affine(bits: int, group_size: int = 64) -> Format:
    """MLX's usual format."""
    return Format("affine", "bf16", bits, group_size)


FORMATS = {f"{bits}-bit": affine(bits) for bits in (4, 3, 8, 2, 5, 6)}
FORMATS |= {f"4-bit/{size}": affine(4, size) for size in GROUPS if size != 64}
FORMATS["mxfp4"] = MXFP4
WITH_MANY_ROWS = ("4-bit", "3-bit", "8-bit", "mxfp4")
"""Those that have tiles of their own; the others share one copy."""


def fill(arena: Any) -> None:
    """Bytes that are finite scales and any codes."""
    pattern = np.random.default_rng(0).integers(0, 60, 1 << 20, dtype=np.uint8)
    for start in range(0, len(arena), len(pattern)):
        arena[start : start + len(pattern)] = pattern[: len(arena) - start]


class Measured(NamedTuple):
    """One timer's best value, and the median of the first timer's value over its own."""

    best: float
    share: float


def in_turns(repeats: int, *timers: Callable[[], float]) -> list[Measured]:
    """Every timer once a round; the first one measures the limit."""
    rounds = [[timer() for timer in timers] for _ in range(repeats)]
    return [
        Measured(min(values), statistics.median(r[0] / r[i] for r in rounds))
        for i, values in enumerate(zip(*rounds, strict=True))
    ]


def read_time(pool: Any, base: int, turn: Iterator[int]) -> float:
    """Seconds to read the next window, per byte."""
    start = base + next(turn) * WINDOW_NBYTES
    return _native.time_read(pool, start, WINDOW_NBYTES, 1) / WINDOW_NBYTES


def gemv(pool: Any, base: int, repeats: int) -> Iterator[Row]:
    """Matrix times vector from memory, against plain reading."""
    turn = itertools.cycle(range(WINDOWS))

    def linears(fmt: Format) -> float:
        shape = (GEMV_ROWS, HIDDEN)
        size = nbytes(shape, fmt, "il16")
        start, count = base + next(turn) * WINDOW_NBYTES, WINDOW_NBYTES // size
        descs = [located_desc(start + i * size, shape, fmt) for i in range(max(count, 1))]
        return float(_native.time_linears(pool, descs, 1, 1)) / (len(descs) * size)

    timers = [partial(linears, fmt) for fmt in FORMATS.values()]
    limit, *kernels = in_turns(repeats, partial(read_time, pool, base, turn), *timers)
    yield row("read memory", pool, 1e-9 / limit.best, "GB/s", limit.share)
    for name, kernel in zip(FORMATS, kernels, strict=True):
        yield row(f"GEMV {name}", pool, 1e-9 / kernel.best, "GB/s", kernel.share)


def seconds_per_flop(pool: Any) -> float:
    """At the peak rate of multiply-adds."""
    return 1.0 / float(_native.fma_peak(pool, 1))


def linear_per_flop(pool: Any, descs: list[Any], rows: int, flops: float) -> float:
    """Seconds per operation of one product with ``rows`` rows."""
    return float(_native.time_linears(pool, descs, rows, 1)) / flops


def gemm(pool: Any, base: int, repeats: int) -> Iterator[Row]:
    """Matrix times matrix, against multiply-adds in registers."""
    rows = 1024
    flops = 2.0 * rows * HIDDEN
    for name in WITH_MANY_ROWS:
        descs = [located_desc(base, (rows, HIDDEN), FORMATS[name])]
        timers: list[Callable[[], float]] = [partial(seconds_per_flop, pool)]
        timers += [partial(linear_per_flop, pool, descs, m, flops * m) for m in GEMM_ROWS]
        peak, *kernels = in_turns(-(-repeats // 4), *timers)
        if name == WITH_MANY_ROWS[0]:
            yield row("multiply-add", pool, 1e-9 / peak.best, "GFLOP/s", peak.share)
        for m, kernel in zip(GEMM_ROWS, kernels, strict=True):
            yield row(f"GEMM {name} M={m}", pool, 1e-9 / kernel.best, "GFLOP/s", kernel.share)


def ffn_spec(bits: int) -> ExpertsSpec:
    """Experts of 2048 x 512: 1.77 MB each at 4 bits."""
    segments, offset = {}, 0
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
        size = nbytes(shape, affine(bits), "il16")
        segments[name] = Segment(offset, size, shape, affine(bits))
        offset = align_up(offset + size, 64)
    experts = ARENA_NBYTES // align_up(offset + 64, 4096) // CHOICES * CHOICES
    return ExpertsSpec(HIDDEN, INNER, experts, CHOICES, 0, "il16", segments)


def ffn_block(pool: Any, base: int, spec: ExpertsSpec) -> NativeExperts:
    """A block over slots in the arena."""
    last = spec.segments["down_proj"]
    stride = align_up(last.offset + last.nbytes + 64, 4096)
    shape = WorkspaceSpec(
        max_tokens=1,
        context=64,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=0,
        num_experts=spec.num_experts,
        num_experts_per_tok=CHOICES,
        vocab_size=64,
        max_logit_rows=1,
        threads=pool.threads,
    )
    workspace = Workspace(shape, np.zeros(sizes.workspace_nbytes(shape), np.uint8))
    return NativeExperts(pool, workspace, Slots(base, stride, spec.num_experts), spec, {})


def ffn(pool: Any, base: int, repeats: int) -> Iterator[Row]:
    """One token through eight experts, other ones each time, called from Python."""
    specs = {bits: ffn_spec(bits) for bits in (4, 3)}
    blocks = {bits: ffn_block(pool, base, spec) for bits, spec in specs.items()}
    x = np.random.default_rng(0).standard_normal((1, HIDDEN)).astype(np.float32)
    weights = np.full((1, CHOICES), 1 / CHOICES, np.float32)
    turn = itertools.count()

    def call(bits: int) -> float:
        spec, out = specs[bits], x.copy()
        first = next(turn) * CHOICES % spec.num_experts
        ids = np.arange(first, first + CHOICES, dtype=np.int32)
        routing = Routing(ids[None], weights, x, ids[:0])
        _native.wake(pool)
        start = time.perf_counter()
        blocks[bits](out, routing, ids, ids)
        seconds = time.perf_counter() - start
        return seconds / (CHOICES * sum(part.nbytes for part in spec.segments.values()))

    def far_away() -> Iterator[int]:
        # Half the arena from the experts of now: what they left in the caches is not read again.
        for round_ in itertools.count():
            yield (round_ * len(specs) + WINDOWS // 2) % WINDOWS

    timers = [partial(call, bits) for bits in specs]
    _, *kernels = in_turns(repeats, partial(read_time, pool, base, far_away()), *timers)
    for bits, kernel in zip(specs, kernels, strict=True):
        name = f"FFN {CHOICES} experts {bits}-bit"
        yield row(name, pool, 1e-9 / kernel.best, "GB/s", kernel.share)


def reads(arena: Any, base: int, folder: Path, repeats: int) -> Iterator[Row]:
    """Direct reads of records at random offsets: the engine's read pool against bare preadv."""
    record, count, threads = 1769472, 240, 2
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for start in range(0, count * record, 16 << 20):
            file.write(arena[: min(16 << 20, count * record - start)].tobytes())
        file.flush()
        os.fsync(file.fileno())
        fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        try:
            order = np.random.default_rng(1).permutation(count).tolist()
            slots = len(arena) // align_up(record, 4096)
            stride = align_up(record, 4096)

            def bare() -> float:
                def some(part: list[int]) -> None:
                    for i in part:
                        at = i % slots * stride
                        os.preadv(fd, [arena[at : at + record]], i * record)

                start = time.perf_counter()
                with ThreadPoolExecutor(threads) as workers:
                    list(workers.map(some, [order[n::threads] for n in range(threads)]))
                return time.perf_counter() - start

            def pool() -> float:
                readers = _native.ReadPool(threads)
                start = time.perf_counter()
                tickets = [
                    readers.submit(fd, i * record, record, base + i % slots * stride, True)
                    for i in order
                ]
                for ticket in tickets:
                    readers.wait(ticket)
                seconds = time.perf_counter() - start
                readers.close()
                return seconds

            probe, engine = in_turns(repeats, bare, pool)
        finally:
            os.close(fd)
    limit = count * record / probe.best / 1e9
    yield Row(name="read disk", isa="", threads=threads, value=limit, unit="GB/s", ratio=1.0)
    value = count * record / engine.best / 1e9
    yield Row(
        name="read pool", isa="", threads=threads, value=value, unit="GB/s", ratio=engine.share
    )


def row(name: str, pool: Any, value: float, unit: str, share: float) -> Row:
    """One measurement and its share of the limit."""
    return Row(
        name=name,
        isa=_native.isa(),
        threads=pool.threads,
        value=value,
        unit=unit,
        ratio=share,
    )


def show(r: Row) -> None:
    """One line of the table."""
    print(
        f"{r['name']:<22} {r['isa']:<7} {r['threads']:>2} threads "
        f"{r['value']:>8.1f} {r['unit']:<8} {r['ratio']:5.2f} of the limit",
        flush=True,
    )


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows, in the order of the table."""
    region = Arena(ARENA_NBYTES)
    arena = region.take("bench", ARENA_NBYTES)
    fill(arena)
    base = int(arena.ctypes.data)
    counts = sorted({1, _native.usable_processors()})
    for isa in options.isa or [name for name in _native.isas() if name != "scalar"]:
        _native.select_isa(isa)
        for threads in counts:
            pool = _native.Pool(threads)
            for part in (gemv, gemm, ffn):
                yield from part(pool, base, options.repeats)
    if options.file_dir:
        yield from reads(arena, base, options.file_dir, 5)


def main() -> int:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--isa", action="append", choices=_native.isas())
    parser.add_argument("--repeats", type=int, default=100, help="windows of each measurement")
    parser.add_argument("--file-dir", type=Path, help="measure direct reads of a file made here")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for measured in measure(options):
        rows.append(measured)
        if not options.json:
            show(measured)
    if options.json:
        json.dump({"rows": rows}, sys.stdout, indent=1)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
