"""What a model's kernels take here, from a small model of the same layers that really runs.

First every expert is in a slot: the layers' blocks, the head and what lies between them are timed
at a position in the context. Then there are fewer slots than experts, and records come from the
disk: that tells what a read takes of the thread that computes, how much slower blocks are beside
reads, and how much of the disk's speed is left while something is computed. The last is found with
the simulator: of the disks that it knows, the one with which the same tokens wait as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from aegis.engine.engine import Engine
from aegis.engine.forced import token_stream
from aegis.engine.timing import Spent
from aegis.predict.cut import kinds_of
from aegis.tiers.simulate import Tiering, Times, simulate
from aegis.tiers.virtual_disk import Disk

if TYPE_CHECKING:
    from aegis.engine.timing import Timing
    from aegis.models.base import ModelShape
    from aegis.tiers.trace import RoutingTrace

MOST_DEPTH = 1024
"""Positions behind that are not computed but extrapolated to."""
_MOST_TOKENS = 64
_FEWEST_TOKENS = 8
_SECONDS = 2.5
"""What the first pass of tokens may take."""
_SLOTS = 0.35
"""Share of the experts that have a slot where records are read."""
_LEAST_SPEED = 1 / 16
"""Of what the disk gives, at least, while something is computed."""
_UNUSUAL = 3
"""Tokens that took so many times what they usually take say nothing of the model."""
_STEPS = 12
_PLENTY = 1 << 40


@dataclass(frozen=True)
class Timed:
    """Means over tokens that were decoded one by one, in seconds per token."""

    tokens: int
    seconds: float
    spent: Spent
    layers_s: list[tuple[float, float]]
    """Of each layer: attention, and the MLP where there are no experts."""
    reads: float
    """That were issued."""
    busy: float
    """The part of the time with a read under way."""
    has_blocks: bool
    usual_s: float
    """In blocks, of the median token: what a single one of them does not change."""

    @property
    def other_s(self) -> float:
        """Between blocks."""
        return max(0.0, self.seconds - self.spent.total)


@dataclass(frozen=True)
class _Token:
    seconds: float
    spent: Spent
    layers_s: list[tuple[float, float]]


def measure_kernels(
    store: Path,
    settings: dict[str, Any],
    depth: int,
    disk: Disk,
    record_nbytes: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The costs of a store's layers; ``Kernels`` says what they are.

    depth: position in the context. disk: while nothing is computed. tick: called four times.
    """
    context = min(depth, MOST_DEPTH) + 2 * _MOST_TOKENS
    settings = {**settings, "context": context}
    with Engine.open(store, cap=_PLENTY, **settings) as engine:
        shape = engine._opened.request.shape
        ids = list(islice(token_stream(0, engine.tokenizer.vocab_size), _MOST_TOKENS))
        trace, count = _traced(engine, ids)
        tick()
        deep = _timed(engine, min(depth, MOST_DEPTH), count)
        tick()
        flat = _timed(engine, 1, count)
        head_s = _head_s(engine)
        tick()
    slots = _few_slots(shape)
    with Engine.open(store, cap=_PLENTY, **settings, max_slots=slots) as engine:
        streamed = _streamed(engine, ids[:count])
    costs = _costs(shape, deep, flat, depth, head_s)
    tick()
    tiering = Tiering(slots, settings["policy"], settings["guess"], settings["guess_width"])
    return costs | _beside_reads(shape, trace, tiering, flat, streamed, disk, record_nbytes)


def _few_slots(shape: ModelShape) -> int:
    every = len(shape.moe_layers) * shape.num_experts
    return min(every, max(shape.num_experts_per_tok + 1, round(_SLOTS * every)))


def _traced(engine: Engine, ids: list[int]) -> tuple[RoutingTrace, int]:
    """The routing of the first tokens, as many as there is time for."""
    end, count = monotonic() + _SECONDS, 0
    with engine.tracing() as tracing:
        while count < len(ids) and (count < _FEWEST_TOKENS or monotonic() < end):
            engine.feed_token(ids[count])
            count += 1
        return tracing.recorder.trace(engine.name, ids[:count]), count


def _timed(engine: Engine, depth: int, count: int) -> Timed:
    """Tokens behind a prompt that the cache knows nothing of."""
    ids = list(islice(token_stream(depth, engine.tokenizer.vocab_size), depth + count))
    while engine.cached_prefix(ids):
        ids = ids[1:] + ids[:1]
    with engine.timing() as timing:
        engine.logits(engine.feed(ids[:depth]))
        return _window(engine, timing, ids[depth:])


def _streamed(engine: Engine, ids: list[int]) -> Timed:
    """All but the first tokens, which fill the slots."""
    skip = len(ids) // 4
    for token in ids[:skip]:
        engine.feed_token(token)
    with engine.timing() as timing:
        return _window(engine, timing, ids[skip:])


def _window(engine: Engine, timing: Timing, ids: list[int]) -> Timed:
    found, counted, busy_s = list[_Token](), engine.stats.totals(), timing.busy_s
    spent, layers_s = timing.spent, timing.layers_s
    for token in ids:
        begin = perf_counter()
        engine.logits(engine.feed_token(token))
        seconds, before, layers_before = perf_counter() - begin, spent, layers_s
        spent, layers_s = timing.spent, timing.layers_s
        layers = [
            (now[0] - then[0], now[1] - then[1])
            for now, then in zip(layers_s, layers_before, strict=True)
        ]
        found.append(_Token(seconds, spent.since(before), layers))
    counted = engine.stats.totals().since(counted)
    reads = (counted.misses + counted.guesses) / len(ids)
    busy = (timing.busy_s - busy_s) / sum(token.seconds for token in found)
    return _means(found, reads, busy, timing.has_blocks)


def _means(tokens: list[_Token], reads: float, busy: float, has_blocks: bool) -> Timed:
    """Over all tokens but those in which the machine did something else for a while."""
    usual = statistics.median(token.seconds for token in tokens)
    kept = [token for token in tokens if token.seconds <= _UNUSUAL * usual]
    count = len(kept)
    names = [field.name for field in fields(Spent)]
    spent = Spent(*(sum(getattr(token.spent, name) for token in kept) / count for name in names))
    layers = [
        (sum(at[0] for at in of_layer) / count, sum(at[1] for at in of_layer) / count)
        for of_layer in zip(*(token.layers_s for token in kept), strict=True)
    ]
    seconds = sum(token.seconds for token in kept) / count
    usual_s = statistics.median(token.spent.total - token.spent.wait for token in tokens)
    return Timed(len(tokens), seconds, spent, layers, reads, busy, has_blocks, usual_s)


def _head_s(engine: Engine) -> float:
    """What the head takes by itself, where no clock can be put around it in a pass."""
    hidden = engine.feed_token(0)
    took = []
    for _ in range(_FEWEST_TOKENS):
        begin = perf_counter()
        engine.logits(hidden)
        took.append(perf_counter() - begin)
    return sorted(took)[len(took) // 2]


def _costs(
    shape: ModelShape, deep: Timed, flat: Timed, depth: int, head_s: float
) -> dict[str, Any]:
    layers, moe = shape.num_hidden_layers, len(shape.moe_layers)
    if not deep.has_blocks:
        # Half before the experts, half in them, as ``aegis trace replay`` has it.
        half = max(0.0, deep.seconds - head_s) / layers / 2
        names = ("attention_s", "delta_s", "mlp_s", "experts_s")
        return dict.fromkeys(names, half) | {
            "router_s": 0.0,
            "head_s": head_s,
            "between_s": 0.0,
        }
    further = max(0.0, depth - MOST_DEPTH) / MOST_DEPTH
    kinds, found = kinds_of(shape), {}
    for name, is_delta in (("attention_s", False), ("delta_s", True)):
        of_kind = [
            at[0] + max(0.0, at[0] - near[0]) * further
            for at, near, kind in zip(deep.layers_s, flat.layers_s, kinds, strict=True)
            if kind[0] == is_delta
        ]
        found[name] = sum(of_kind) / len(of_kind) if of_kind else 0.0
    dense = layers - moe
    return found | {
        "mlp_s": sum(at[1] for at in deep.layers_s) / dense if dense else 0.0,
        "router_s": deep.spent.router / moe,
        "experts_s": deep.spent.experts / moe,
        "head_s": deep.spent.head + deep.spent.wait,
        "between_s": deep.other_s / layers,
    }


def _beside_reads(
    shape: ModelShape,
    trace: RoutingTrace,
    tiering: Tiering,
    flat: Timed,
    streamed: Timed,
    disk: Disk,
    record_nbytes: int,
) -> dict[str, Any]:
    """What reads cost, and what they leave of the disk and of the blocks' speed."""
    read_s, slower = 0.0, 1.0
    if flat.has_blocks and streamed.reads:
        read_s = max(0.0, streamed.other_s - flat.other_s) / streamed.reads
        slower = max(1.0, streamed.usual_s / flat.usual_s)
    computed = streamed if flat.has_blocks else flat
    times = _whole_times(shape, computed, flat, read_s)
    speed = 1.0
    if streamed.reads:
        speed = _speed_left(trace, tiering, times, flat, streamed, disk, record_nbytes)
    return {
        "read_s": read_s,
        "slower": slower,
        "slower_busy": streamed.busy,
        "disk_left": speed,
        "waited_share": streamed.spent.wait / streamed.seconds,
    }


def _whole_times(shape: ModelShape, computed: Timed, flat: Timed, read_s: float) -> Times:
    """Of a token of the small model itself, in its layers on an average."""
    moe, spent = len(shape.moe_layers), computed.spent
    if not computed.has_blocks:
        half = computed.seconds / moe / 2
        return Times(layer_s=half, expert_s=half / shape.num_experts_per_tok)
    return Times(
        layer_s=(spent.attention + spent.router + flat.other_s) / moe,
        expert_s=spent.experts / moe / shape.num_experts_per_tok,
        head_s=spent.head + flat.spent.wait,
        read_s=read_s,
    )


def _speed_left(
    trace: RoutingTrace,
    tiering: Tiering,
    times: Times,
    flat: Timed,
    streamed: Timed,
    disk: Disk,
    record_nbytes: int,
) -> float:
    """The share of the disk's speed with which simulated tokens wait as long as the real ones."""
    # Where the embedding's rows are on disk too, they are waited for in any case.
    wanted = max(0.0, streamed.spent.wait - flat.spent.wait)
    skip = trace.shape[0] - streamed.tokens

    def waited(share: float) -> float:
        slow = Disk(disk.nbytes_per_s * share, disk.latency_s, disk.readers)
        found = simulate(
            trace, tiering, disk=slow, times=times, record_nbytes=record_nbytes, skip=skip
        )
        return found.wait_s / found.tokens

    low, high = _LEAST_SPEED, 1.0
    if waited(high) >= wanted:
        return high
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if waited(middle) > wanted else (low, middle)
    return high
