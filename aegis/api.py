"""load / generate / stream_generate in the shape of mlx-lm, and plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aegis.errors import UsageError

if TYPE_CHECKING:
    from aegis.engine.engine import Engine
    from aegis.engine.generate import FinishReason
    from aegis.engine.sampling import Sampler
    from aegis.engine.sources import Model
    from aegis.planner import MemoryPlan
    from aegis.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""Text, token ids, or chat messages (``{"role": ..., "content": ...}``)."""


@dataclass(frozen=True)
class GenerationResponse:
    """One piece of a generation; speeds and memory are as of now."""

    text: str
    token: int | None
    finish_reason: FinishReason | None
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    """GB (10^9 bytes), as in mlx-lm; ``Engine.ledger`` has the exact figures."""


def plan(path: Model = None, cap: str | int = "4GiB", **options: Any) -> MemoryPlan:
    """The memory plan for a store or checkpoint, or for ``ORG/NAME`` on the Hugging Face hub (None:
    the embedded model); nothing is downloaded but headers, nothing is written.

    Args:
        options: fields of ``aegis.settings.Settings``.

    Raises:
        HubError, CheckpointError, StoreError, UsageError: the request cannot be planned. A plan
        that does not fit is returned with ``feasible`` false.
    """
    from aegis.engine.planning import make_plan, settings_for

    return make_plan(path, settings_for(cap, options))


def load(path: Model = None, cap: str | int = "4GiB", **options: Any) -> tuple[Engine, Tokenizer]:
    """Open a model under a cap; returns (model, tokenizer). See ``Engine.open``."""
    from aegis.engine.engine import Engine

    engine = Engine.open(path, cap=cap, **options)
    return engine, engine.tokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: text is taken as it is, messages through the chat template.

    Raises:
        UsageError: the prompt mixes messages and token ids, or an id is no whole number.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    messages = [item for item in prompt if isinstance(item, dict)]
    if 0 < len(messages) < len(prompt):
        raise UsageError("the prompt mixes messages and token ids; give one or the other")
    if messages:
        return tokenizer.encode_chat(messages)
    from aegis.engine.token_ids import whole

    return [whole(item) for item in prompt]


def _refuse_far_too_long(model: Engine, prompt: Prompt) -> None:
    """Before a copy of the prompt, or what encoding it takes, goes beyond the plan."""
    sequence = hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")
    if not sequence or isinstance(prompt, bytes | bytearray | dict):
        kind = type(prompt).__name__
        raise UsageError(f"the prompt is a {kind}; give text, token ids or a list of messages")
    if isinstance(prompt, str):
        model.refuse_far_too_long([prompt])
    elif len(prompt) and not isinstance(prompt[0], dict):
        if len(prompt) > model.context:
            raise model.too_long(len(prompt))
    else:
        model.refuse_far_too_long(message_texts(prompt))


def message_texts(messages: Sequence[Any]) -> list[str]:
    """The contents of chat messages, which every template renders; parts of a list count too."""
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        texts += [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def stream_generate(
    model: Engine,
    tokenizer: Tokenizer,
    prompt: Prompt,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    stop: str | Sequence[str] | None = (),
    ignore_eos: bool = False,
    **sampling: Any,
) -> Iterator[GenerationResponse]:
    """Generate and yield text as it becomes final.

    Args:
        stop: one string or several; the text ends before the first that appears, or where the
            special token comes that it spells.
        sampler: takes the place of ``sampling`` (temperature, top_p, top_k, min_p, seed,
            repeat_penalty; greedy without any).
    """
    from aegis.engine.generate import Clock, stream_text
    from aegis.engine.memory import peak_nbytes
    from aegis.engine.sampling import choose_sampler

    _refuse_far_too_long(model, prompt)
    ids = encode_prompt(tokenizer, prompt)
    clock = Clock.start(model, ids)
    sampler = choose_sampler(sampler, sampling)
    steps = stream_text(model, ids, max_tokens, sampler, stop=stop, ignore_eos=ignore_eos)
    for step in steps:
        if step.token is not None:
            clock.tick()
        yield GenerationResponse(
            text=step.text,
            token=step.token,
            finish_reason=step.finish_reason,
            prompt_tokens=len(ids),
            prompt_tps=clock.prompt_tps,
            generation_tokens=clock.tokens,
            generation_tps=clock.generation_tps,
            peak_memory=peak_nbytes() / 1e9,
        )


def generate(
    model: Engine,
    tokenizer: Tokenizer,
    prompt: Prompt,
    verbose: bool = False,
    **options: Any,
) -> str:
    """Generate and return the text; ``verbose`` also streams it and its figures to stdout.

    ``options`` are those of ``stream_generate``.
    """
    pieces, response = [], None
    for response in stream_generate(model, tokenizer, prompt, **options):
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True, file=sys.stdout)
    if verbose:
        print(file=sys.stdout)
        if response is not None:
            print(_figures(response), file=sys.stdout)
    return "".join(pieces)


def _figures(last: GenerationResponse) -> str:
    """What mlx-lm prints after a verbose generation."""
    return (
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {last.peak_memory:.3f} GB"
    )
