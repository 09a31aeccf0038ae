"""One configuration: prompts and tokens of a seeded stream through an open model.

A repetition is a prompt that the cache knows nothing of, then tokens behind it, one by one. Tokens
come from the stream, whatever the logits are, so that every run computes the same. What is counted
of prompt and tokens are differences of the engine's own counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

from aegis.engine.forced import token_stream
from aegis.engine.timing import Spent
from aegis.tiers.stats import Counters

if TYPE_CHECKING:
    from aegis.engine.engine import Engine
    from aegis.engine.timing import Timing

_TRIES = 64
"""Draws for a first token that the cache does not begin with; a vocabulary of one has no other."""


@dataclass
class Window:
    """What happened between two moments."""

    tokens: int
    seconds: float
    spent: Spent
    counted: Counters
    busy_s: float
    token_s: list[float] = field(default_factory=list)
    """Of each decoded token."""

    def to_json(self, has_blocks: bool) -> dict[str, Any]:
        """As it goes from the process that measures to the one that prints."""
        spent = self.spent
        blocks = {name: getattr(spent, name) for name in ("attention", "experts", "head", "router")}
        parts = {name: seconds if has_blocks else None for name, seconds in blocks.items()}
        rest = self.seconds - spent.total
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "split_s": {
                **parts,
                "wait": spent.wait,
                "queue": spent.queue,
                "device": spent.device,
                "other": rest,
            },
            "busy_s": self.busy_s,
            "token_s": self.token_s,
            **self.counted.as_dict(),
        }


class Meter:
    """Takes windows of an engine."""

    def __init__(self, engine: Engine, timing: Timing) -> None:
        self._engine, self._timing = engine, timing
        self._begin()

    def _begin(self) -> None:
        self._counted = self._engine.stats.totals()
        self._spent, self._busy_s = self._timing.spent, self._timing.busy_s
        self._start = perf_counter()

    def window(self, tokens: int, token_s: Sequence[float] = ()) -> Window:
        """What happened since the last one; the next one begins."""
        seconds = perf_counter() - self._start
        busy_s = self._timing.busy_s - self._busy_s
        # What queued calls have chosen is counted now, and is part of it.
        counted = self._engine.stats.totals().since(self._counted)
        spent = self._timing.spent.since(self._spent)
        found = Window(tokens, seconds, spent, counted, busy_s, list(token_s))
        self._begin()
        return found


@dataclass(frozen=True)
class Repetition:
    """A prompt and the tokens behind it; None: none were asked for."""

    prompt: Window | None
    decoded: Window | None


def repetition(
    engine: Engine,
    meter: Meter,
    prompt: Sequence[int],
    tokens: Sequence[int],
    tick: Callable[[int], None] = lambda tokens: None,
) -> Repetition:
    """Compute ``prompt``, whose logits are the first token's, then ``tokens`` one by one.

    tick: called with the number of tokens that were computed since the last call.
    """
    meter.window(0)
    first = None
    if prompt:
        computed = engine.uncached(prompt)
        engine.logits(engine.feed(prompt))
        first = meter.window(computed)
        tick(len(prompt))
    if not tokens:
        return Repetition(first, None)
    return Repetition(first, _decoded(engine, meter, bool(prompt), tokens, tick))


def _decoded(
    engine: Engine,
    meter: Meter,
    follows: bool,
    tokens: Sequence[int],
    tick: Callable[[int], None],
) -> Window:
    """follows: there is a prompt before them; else the first one is the prompt."""
    token_s = []
    meter.window(0)
    begin = perf_counter()
    for index, token in enumerate(tokens):
        fed = engine.feed_token(token) if index or follows else engine.feed([token])
        engine.logits(fed)
        now = perf_counter()
        token_s.append(now - begin)
        tick(1)
        begin = now
    return meter.window(len(tokens), token_s)


def measure(
    engine: Engine,
    timing: Timing,
    prompt_tokens: int,
    tokens: int,
    repetitions: int,
    seed: int,
    tick: Callable[[int], None] = lambda tokens: None,
) -> list[Repetition]:
    """So many repetitions, each of the next tokens of the stream."""
    stream = token_stream(seed, engine.tokenizer.vocab_size)
    meter, done, last = Meter(engine, timing), list[Repetition](), -1
    for _ in range(repetitions):
        ids = _unlike(last, stream, prompt_tokens + tokens)
        last = ids[0]
        prompt, behind = ids[:prompt_tokens], ids[prompt_tokens:]
        done.append(repetition(engine, meter, prompt, behind, tick))
    return done


def _unlike(first: int, stream: Iterator[int], count: int) -> list[int]:
    """The next tokens, from the first one that is another: what is cached would not be computed."""
    for token in islice(stream, _TRIES):
        if token != first:
            break
    return [token, *islice(stream, count - 1)]
