"""Where the time of a token goes on the mlx backend: ``split`` and ``layers`` of measure_mlx.py."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from aegis import Engine
from aegis.kernels.mlx import device
from aegis.kernels.mlx.attention import over_keys
from aegis.kernels.mlx.queue import MlxQueue
from aegis.kernels.mlx.router import MlxRouting

CAP = "64GiB"
PROMPT = list(range(100, 140))
SKIPPED = 32
"""Tokens behind a prompt that do not count."""
SPLIT_SLOTS = (None, 240, 60, 8)
SPLIT_TOKENS, PREFILL_TOKENS = (128, 16), (768, 64)
"""In earnest, and to try the script."""
SHORT_ROUNDS, WARM_SHORT_ROUNDS = (20, 8), 4
FEW_LAYERS = 32
"""Models of fewer layers have so many times more rounds: a layer is found from a difference."""
SHORT_TOKENS, SHORT_SKIPPED = 32, 8
"""Of a short round: other programs on the machine disturb all that it compares, or nothing."""
GROUP = 8
"""Tokens' pieces that are started together: what starting costs belongs to no piece."""
CLOCKS = [
    (device, "start", "queueing"),
    (MlxQueue, "token", "device"),
    (MlxQueue, "read", "device"),
    (MlxQueue, "settle", "device"),
    (MlxRouting, "_on_host", "device"),
]
"""Where a token's time goes: owner and name of functions, and what the time in them is."""


def heat(engine: Engine) -> None:
    """Generate until every expert is in a slot, if there are slots for all: nothing is read."""
    before = -1
    while engine.stats.totals("decode").read_nbytes != before:
        before = engine.stats.totals("decode").read_nbytes
        list(engine.generate(PROMPT, 50, ignore_eos=True))


def timed(function: Callable[..., Any], label: str, seconds: dict[str, float]) -> Any:
    """The same function, which adds its time to a label's."""

    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args)
        finally:
            seconds[label] += time.perf_counter() - begin

    return call


@contextmanager
def clocks(watched: Sequence[tuple[Any, str, str]]) -> Iterator[dict[str, float]]:
    """Seconds in functions by label, of calls made while inside."""
    seconds: dict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for owner, name, label in watched:
            call = timed(getattr(owner, name), label, seconds)
            stack.enter_context(mock.patch.object(owner, name, call))
        yield seconds


def token_parts(engine: Engine, count: int) -> str:
    """Speed over so many tokens, and what the time of one is made of."""
    tokens = engine.generate(PROMPT, SKIPPED + count + 2, ignore_eos=True)
    with clocks(CLOCKS) as seconds:
        list(islice(tokens, SKIPPED))
        before = engine.stats.totals("decode")
        seconds.clear()
        begin = time.perf_counter()
        list(islice(tokens, count))
        total = time.perf_counter() - begin
        waits, queueing = seconds["device"], seconds["queueing"]
    after = engine.stats.totals("decode")
    reads = after.wait_s - before.wait_s
    us = 1e6 / count
    return (
        f"{count / total:.1f} tokens/s, {us * total:.0f} us a token: waits for the GPU"
        f" {us * waits:.0f}, waits for reads {us * reads:.0f}, queueing in MLX {us * queueing:.0f},"
        f" the rest {us * (total - waits - reads - queueing):.0f};"
        f" {(after.read_nbytes - before.read_nbytes) / count / 2**20:.2f} MiB read a token,"
        f" hit rate {(after.hits - before.hits) / (after.choices - before.choices):.3f}"
    )


def device_us(engine: Engine, repetitions: int = 9) -> float:
    """What the GPU alone takes for a hot token: all of it is queued before it may begin, behind
    products that are made larger until they outlast that.

    nan where none does: MLX lets the host wait when much is queued, on a CPU behind few operations.
    """
    if mx.default_device().type != mx.DeviceType.gpu:
        return float("nan")
    forward: Any = engine._opened.forward
    token, position = mx.array(PROMPT[:1], mx.int32), len(PROMPT) + SPLIT_TOKENS[0]
    # A recurrent state has to be there that has seen so many tokens.
    engine.feed((PROMPT * -(-position // len(PROMPT)))[:position])
    with engine.turn, engine.turn.inside():
        forward.count()
        for size in (1024, 2048, 4096, 8192, 16384):
            large = mx.full((size, size), 1 / size)
            found = []
            for _ in range(repetitions):
                product = large @ large @ large @ large
                device.start(product)
                results = forward.decode_ahead(token, position)
                forward.forget_ahead()
                stamps = [time.perf_counter()]
                for awaited in (product, results):
                    mx.eval(awaited)
                    stamps.append(time.perf_counter())
                if stamps[1] - stamps[0] > 1e-3:
                    found.append(1e6 * (stamps[2] - stamps[1]))
            if len(found) > repetitions // 2:
                return statistics.median(found)
    return float("nan")


def prefill_speed(engine: Engine, count: int) -> float:
    """Tokens/s of a prompt of so many, when its kernels are compiled."""
    for first in (5, 6):
        ids = [(first + 11 * place) % 40000 for place in range(count)]
        begin = time.perf_counter()
        engine.logits(engine.feed(ids))
        took = time.perf_counter() - begin
    return count / took


def split(small: bool) -> None:
    """The embedded model's time, with fewer and fewer slots."""
    tokens, prompt = SPLIT_TOKENS[small], PREFILL_TOKENS[small]
    for slots in SPLIT_SLOTS:
        options: dict[str, Any] = {} if slots is None else {"max_slots": slots}
        name = "all in slots" if slots is None else f"{slots} slots"
        with Engine.open(cap=CAP, backend="mlx", context=1024, **options) as engine:
            if slots is None:
                print(engine.describe())
                heat(engine)
            print(f"{name}: {token_parts(engine, tokens)}")
            if slots is None:
                print(f"{name}: the GPU alone takes {device_us(engine):.0f} us for a token")
            print(f"{name}: prefill of {prompt}: {prefill_speed(engine, prompt):.0f} tokens/s")


class Pieces:
    """What a token is made of where every expert is in a slot, as calls of which each takes what
    the one before gave. Those of layers go through all layers."""

    def __init__(self, engine: Engine) -> None:
        opened: Any = engine._opened
        self._decoder, self._queued = opened.decoder, opened.forward._queued
        self._layers = self._decoder.layers
        self._tables = [opened.forward._table(layer.mlp.index) for layer in self._layers]
        assert all(table is not None for table in self._tables), "there are experts in no slot"
        first, position = self._layers[0], len(PROMPT)
        self._at = first.attention._positions.at
        self.token = mx.array(PROMPT[:1], mx.int32)
        self.hidden = self._decoder.embedding(self.token)
        self.queries, *self._entry = first.attention._enter_one(self.hidden, self._at(position))
        self._mixed = first.attention.attend(self.hidden, first.cache, position)
        mx.eval(self.hidden, self.queries, self._entry, *self._mixed)

    def layers(self, x: mx.array, position: int) -> mx.array:
        """As the engine calls them."""
        for queued, layer, table in zip(self._queued, self._layers, self._tables, strict=True):
            x, _ = queued(x, layer.cache, position, table)
        return x

    def enter(self, x: mx.array, position: int) -> mx.array:
        """Up to rotated queries, keys and values."""
        for layer in self._layers:
            x = layer.attention._enter_one(x, self._at(position))[0].reshape(x.shape)
        return x

    def attend(self, queries: mx.array, position: int) -> mx.array:
        """Writing keys and values, and attention."""
        for layer in self._layers:
            layer.cache.append(*self._entry, position)
            queries = over_keys(queries, layer.cache, position, layer.attention._scale, None)
        return queries

    def behind(self, x: mx.array, position: int) -> mx.array:
        """What follows the heads: the router and the experts above all."""
        for queued, table in zip(self._queued, self._tables, strict=True):
            x, _ = queued._behind_heads(x, table, *self._mixed)
        return x

    def ends(self, token: mx.array, position: int) -> mx.array:
        """Embedding and head."""
        best: mx.array = self._decoder.head.best(self._decoder.embedding(token))
        return best


def back_to_back(step: Callable[[Any, int], Any], first: Any, group: int = GROUP) -> float:
    """us a step of steps that follow each other at the positions of a short round. So many are
    started together, and waited for while the next are under way, as tokens are in decode."""
    waiting = result = first
    stamps = []
    for count in range(1, SHORT_SKIPPED + SHORT_TOKENS + 1):
        result = step(result, len(PROMPT) + count)
        if count % group == 0:
            device.start(result)
            mx.eval(waiting)
            waiting = result
            stamps.append(time.perf_counter())
    mx.eval(result)
    return 1e6 * (stamps[-1] - stamps[SHORT_SKIPPED // group - 1]) / SHORT_TOKENS


def half_token_us(engine: Engine) -> float:
    """The same with half of the layers."""
    with half_of_the_layers(engine):
        return token_us(engine)


def token_us(engine: Engine) -> float:
    """us a token of a short round, whose last is followed by another."""
    tokens = engine.generate(PROMPT, SHORT_SKIPPED + SHORT_TOKENS + 2, ignore_eos=True)
    stamps = [time.perf_counter() for _ in islice(tokens, SHORT_SKIPPED + SHORT_TOKENS + 1)]
    return 1e6 * (stamps[-1] - stamps[SHORT_SKIPPED]) / SHORT_TOKENS


@contextmanager
def half_of_the_layers(engine: Engine) -> Iterator[None]:
    """Tokens mean nothing without the others, but what a layer adds to their time shows."""
    forward: Any = engine._opened.forward
    decoder, queued = forward._decoder, forward._queued
    half = len(queued) // 2
    with ExitStack() as stack:
        for name, value in (
            ("_decoder", replace(decoder, layers=decoder.layers[:half])),
            ("_queued", queued[:half]),
        ):
            stack.enter_context(mock.patch.object(forward, name, value))
        yield


def short_rounds(engine: Engine, count: int) -> list[dict[str, float]]:
    """us a token of everything that is compared, by turns, every other time the other way round."""
    rounds = []
    with engine.turn, engine.turn.inside():
        pieces = Pieces(engine)
        turns: dict[str, Callable[[], float]] = {
            "token": lambda: token_us(engine),
            "half": lambda: half_token_us(engine),
            "layers": lambda: back_to_back(pieces.layers, pieces.hidden, 1),
            "ends": lambda: back_to_back(pieces.ends, pieces.token),
            "enter": lambda: back_to_back(pieces.enter, pieces.hidden),
            "attend": lambda: back_to_back(pieces.attend, pieces.queries),
            "behind": lambda: back_to_back(pieces.behind, pieces.hidden),
        }
        for number in range(count):
            order = list(turns) if number % 2 else list(reversed(turns))
            rounds.append({name: turns[name]() for name in order})
    return rounds[WARM_SHORT_ROUNDS:]


def compare_layer(name: str, engine: Engine, rounds: list[dict[str, float]]) -> None:
    """Print a layer's time in a token, its time alone, and what the one is of the other."""
    count = len(engine._opened.decoder.layers)
    added = count - count // 2
    inside = [(found["token"] - found["half"]) / added for found in rounds]
    alone = [found["layers"] / count for found in rounds]
    groups = [
        sum(found[part] for part in ("enter", "attend", "behind")) / count for found in rounds
    ]
    middle = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    print(f"{name}: {engine.describe()}, medians of {len(rounds)} rounds")
    print(
        f"  a token {middle['token']:.0f} us, with half of the layers {middle['half']:.0f}, so"
        f" that a layer adds {statistics.median(inside):.1f}; alone: embedding and head"
        f" {middle['ends']:.0f}, a layer's enter"
        f" {middle['enter'] / count:.1f}, write and attend {middle['attend'] / count:.1f},"
        f" behind the heads {middle['behind'] / count:.1f}"
    )
    for what, figures in (("layer's call alone", alone), ("three groups alone", groups)):
        ratios = [one / other for one, other in zip(inside, figures, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        print(
            f"  {what}: {statistics.median(figures):.1f} us a layer;"
            f" in a token {ratio:.3f} times that (quartiles {low:.3f} to {high:.3f})"
        )


def layers(models: Sequence[Path | None], small: bool) -> None:
    """Of checkpoints, and of the embedded model (None). small: fewer rounds."""
    for path in models:
        name = "embedded" if path is None else "random checkpoint"
        with Engine.open(path, cap=CAP, backend="mlx", context=1024) as engine:
            heat(engine)
            few = max(1, FEW_LAYERS // len(engine._opened.decoder.layers))
            rounds = short_rounds(engine, SHORT_ROUNDS[small] * few)
            compare_layer(name, engine, rounds)
