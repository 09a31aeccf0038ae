"""Where a decoded token goes: kernels, tiers, waiting for reads, and the rest of Python.

    python tools/profile_decode.py [MODEL] [--cap 1GiB] [--tokens 200] [--context 512]

Block calls are timed one by one with a clock around each, so the shares are of the run that is
printed; the clock itself costs about 0.1 us a call. The first tokens fill the hot tier and are
not counted.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aegis import Engine
from aegis.models.base import MoeBlocks

WARM_UP = 64


class Timed:
    """Calls through, adding up the seconds under a name."""

    def __init__(self, inner: Any, name: str, seconds: dict[str, float]) -> None:
        self._inner, self._name, self._seconds = inner, name, seconds

    def __call__(self, *args: Any) -> Any:
        begin = time.perf_counter()
        result = self._inner(*args)
        self._seconds[self._name] += time.perf_counter() - begin
        return result

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return Timed(value, self._name, self._seconds) if callable(value) else value


def instrument(engine: Engine, seconds: dict[str, float]) -> None:
    """Put a clock around every block of the decoder and every call of the tiers."""
    opened: Any = engine._opened
    decoder = opened.decoder
    layers = [
        replace(
            layer,
            attention=Timed(layer.attention, "attention", seconds),
            mlp=replace(
                layer.mlp,
                router=Timed(layer.mlp.router, "router", seconds),
                experts=Timed(layer.mlp.experts, "experts", seconds),
            )
            if isinstance(layer.mlp, MoeBlocks)
            else Timed(layer.mlp, "mlp", seconds),
        )
        for layer in decoder.layers
    ]
    head = Timed(decoder.head, "head", seconds)
    embedding = Timed(decoder.embedding, "embedding", seconds)
    opened.decoder = replace(decoder, layers=layers, head=head, embedding=embedding)
    forward = opened.forward
    forward._decoder, forward._embed = opened.decoder, embedding
    tiers = opened.tiers
    for name in ("acquire", "guess"):
        method: Callable[..., Any] = getattr(tiers, name)
        setattr(tiers, name, Timed(method, "tiers", seconds))


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--cap", default="1GiB")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    with Engine.open(options.model, cap=options.cap, context=options.context) as engine:
        prompt = engine.tokenizer.encode("The sea is")
        plain = list(engine.generate(prompt, WARM_UP, ignore_eos=True))
        begin = time.perf_counter()
        list(engine.generate(prompt + plain, options.tokens, ignore_eos=True))
        untimed = (time.perf_counter() - begin) / options.tokens
        seconds: dict[str, float] = defaultdict(float)
        instrument(engine, seconds)
        waited = engine.stats.totals("decode").wait_s
        begin = time.perf_counter()
        list(engine.generate(prompt + plain[:-1], options.tokens, ignore_eos=True))
        total = time.perf_counter() - begin
        waited = engine.stats.totals("decode").wait_s - waited
        print(engine.describe())
    report(seconds, waited, total, options.tokens, untimed)


def report(
    seconds: dict[str, float], waited: float, total: float, tokens: int, untimed: float
) -> None:
    """Milliseconds per token and shares."""
    blocks = ("attention", "mlp", "router", "experts", "head", "embedding")
    kernels = sum(seconds[name] for name in blocks)
    rows = [*sorted(seconds.items(), key=lambda row: -row[1]), ("waiting", waited)]
    rows.append(("other Python", total - sum(value for _, value in rows)))
    for name, value in rows:
        print(f"{name:14s} {1e3 * value / tokens:8.3f} ms/token {100 * value / total:6.1f} %")
    print(f"{'total':14s} {1e3 * total / tokens:8.3f} ms/token, {1e3 * untimed:.3f} without clocks")
    print(f"{'in kernels':14s} {100 * kernels / total:6.1f} %")


if __name__ == "__main__":
    main()
