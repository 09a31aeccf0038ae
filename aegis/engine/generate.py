"""Tokens one after another, as ids and as text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aegis.engine.token_ids import refuse_no_ids, token_array, whole
from aegis.errors import UsageError

if TYPE_CHECKING:
    from aegis.engine.engine import Engine
    from aegis.engine.sampling import Sampler

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Step:
    """One token, or the end. ``token`` is None on a final step that brings no token."""

    token: int | None
    finish_reason: FinishReason | None = None


def stream(
    engine: Engine,
    ids: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    *,
    ignore_eos: bool = False,
) -> Iterator[Step]:
    """Generate after ``ids``.

    Ends with finish_reason ``stop`` at an end token (which is not yielded), with ``length`` after
    ``max_tokens`` tokens or when the context is full.

    Raises:
        UsageError: the prompt is empty, longer than the context, or ``max_tokens`` is negative.
    """
    max_tokens = whole(max_tokens, "max_tokens")
    if max_tokens < 0:
        raise UsageError(f"max_tokens is {max_tokens}; it cannot be negative")
    refuse_no_ids(ids)
    if len(ids) > engine.context:
        raise engine.too_long(len(ids))
    end_tokens = frozenset() if ignore_eos else engine.tokenizer.eos_token_ids
    history = token_array(ids)
    if not max_tokens:
        engine.feed(history)
    for count in range(max_tokens):
        if count and len(history) > engine.context:
            break
        # Between two tokens the caller or another thread may use the engine for something else.
        token = engine.next_token(history, sampler, more=count + 1 < max_tokens)
        if token in end_tokens:
            yield Step(None, "stop")
            return
        history.append(token)
        yield Step(token)
    yield Step(None, "length")


@dataclass(frozen=True)
class TextStep:
    """A piece of text that is final, and the tokens it came from."""

    text: str
    token: int | None
    finish_reason: FinishReason | None = None


def stream_text(
    engine: Engine,
    ids: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    *,
    stop: str | Iterable[str] | None = (),
    ignore_eos: bool = False,
) -> Iterator[TextStep]:
    """The same as text: never half a character, nothing of a stop string or behind it.

    A stop string that spells a special token, which never is in the text, ends it at that token.
    """
    from aegis.text.detokenizer import Detokenizer
    from aegis.text.stop import StopMatcher

    detokenizer = Detokenizer(engine.tokenizer, skip_special_tokens=not ignore_eos)
    matcher = StopMatcher(stop)
    ends = frozenset() if ignore_eos else engine.tokenizer.special_ids(matcher.stops)
    for step in stream(engine, ids, max_tokens, sampler, ignore_eos=ignore_eos):
        if step.token is None or step.token in ends:
            text, stopped = matcher.feed(detokenizer.finish())
            if not stopped:
                text += matcher.finish()
            stopped = stopped or step.token in ends
            yield TextStep(text, step.token, "stop" if stopped else step.finish_reason)
            return
        text, stopped = matcher.feed(detokenizer.add(step.token))
        yield TextStep(text, step.token, "stop" if stopped else None)
        if stopped:
            return


@dataclass
class Clock:
    """When the prompt was done and when the last token came; seconds."""

    begun: float
    computed: int
    """Prompt tokens that were not in the KV cache already."""
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    @classmethod
    def start(cls, engine: Engine, ids: Sequence[int]) -> Clock:
        """Begin now, before ``ids`` are fed."""
        return cls(time.perf_counter(), engine.uncached(ids))

    def tick(self) -> None:
        """A token came."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.tokens += 1

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return max(self.first - self.begun, 0.0)

    @property
    def prompt_tps(self) -> float:
        """Computed prompt tokens per second up to the first token; cached ones do not count."""
        return self.computed / self.ttft_s if self.ttft_s else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens per second after the first."""
        elapsed = self.last - self.first
        return (self.tokens - 1) / elapsed if self.tokens > 1 and elapsed > 0 else 0.0
