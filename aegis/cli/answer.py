"""One answer: prompt to ids, ids to text, and the figures of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.cli.options import Options, engine_settings
from aegis.cli.report import SCHEMA_VERSION, note_older_stores
from aegis.cli.source import Request, told_from_prompt

if TYPE_CHECKING:
    from aegis.engine.engine import Engine
    from aegis.engine.generate import Clock
    from aegis.engine.sampling import Sampler
    from aegis.engine.sources import Name
    from aegis.planner import MemoryPlan

Messages = list[dict[str, str]]


@dataclass
class Answer:
    """What was generated."""

    prompt_tokens: int
    clock: Clock
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    """None: interrupted."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the KV cache held from the turns before."""
        return self.prompt_tokens - self.clock.computed


def open_engine(
    request: Request,
    cap_nbytes: int,
    options: Options,
    on_plan: Callable[[MemoryPlan], None] | None,
) -> Engine:
    """Open the model with the command line's settings."""
    from aegis.cli.plan import find_model
    from aegis.cli.progress import DownloadBar, ProgressBar
    from aegis.engine.engine import Engine

    model = request.model
    with told_from_prompt(request):
        source = find_model(model, options)
        bar = ProgressBar(source.making, options["quiet"])
        engine = Engine.open(
            source,
            cap=cap_nbytes,
            progress=bar,
            on_plan=on_plan,
            on_download=DownloadBar(options["quiet"]),
            **engine_settings(options),
        )
    if bar.used and not options["quiet"]:
        note_older_stores(engine.store.path)
    if options["chat_template"] is not None:
        _use_template(engine, model, options["chat_template"])
    return engine


def _use_template(engine: Engine, model: Name, template: str) -> None:
    from aegis.text.chat_template import ChatTemplates

    folder = model if isinstance(model, Path) else engine.store.path
    config = folder / "tokenizer_config.json"
    known = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    engine.tokenizer.chat_templates = ChatTemplates.find(folder, known, template)


def make_sampler(options: Options) -> Sampler:
    """The sampler that the options describe; UsageError names a value out of range, stops too."""
    from aegis.engine.sampling import Sampler
    from aegis.text.stop import stop_strings

    stop_strings(options["stop"])
    return Sampler(
        temperature=options["temp"],
        top_p=options["top_p"],
        top_k=options["top_k"],
        min_p=options["min_p"],
        seed=options["seed"],
        repeat_penalty=options["repeat_penalty"],
    )


def chosen_sampler(engine: Engine, options: Options, sampler: Sampler) -> Sampler:
    """The sampler, or with ``--forced`` the one that takes its place."""
    if not options["forced"]:
        return sampler
    from aegis.engine.forced import ForcedSampler

    return ForcedSampler(options["seed"] or 0, engine.tokenizer.vocab_size)


def first_messages(options: Options) -> Messages:
    """The system message, if there is one."""
    system = options["system_prompt"]
    return [] if system is None else [{"role": "system", "content": system}]


def prompt_ids(engine: Engine, prompt: str, options: Options) -> list[int]:
    """Token ids of a single prompt, through the chat template unless it goes raw."""
    engine.refuse_far_too_long([prompt])
    if options["raw"]:
        return engine.tokenizer.encode(prompt)
    messages = [*first_messages(options), {"role": "user", "content": prompt}]
    return engine.tokenizer.encode_chat(messages)


def generate(
    engine: Engine,
    ids: Sequence[int],
    options: Options,
    sampler: Sampler,
    write: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Generate after ``ids``; every piece of final text goes to ``write`` at once."""
    from aegis.engine.generate import Clock, stream_text

    answer = Answer(len(ids), Clock.start(engine, ids))
    steps = stream_text(
        engine,
        ids,
        options["max_tokens"],
        sampler,
        stop=options["stop"],
        ignore_eos=options["ignore_eos"] or options["forced"],
    )
    for step in steps:
        last = stopped()  # Before its text is seen: whoever interrupts then means the answer.
        if step.token is not None:
            answer.clock.tick()
            answer.token_ids.append(step.token)
        answer.text += step.text
        if step.text:
            write(step.text)
        answer.finish_reason = step.finish_reason
        if last:
            break
    return answer


def forced_json(sampler: Sampler) -> dict[str, Any]:
    """What ``--forced`` adds to it: the tokens of two runs are the same anyway, this may not be."""
    from aegis.engine.forced import ForcedSampler

    if not isinstance(sampler, ForcedSampler):
        return {}
    return {"nll": sampler.nll, "logits_digest": sampler.logits_digest}


def answer_json(engine: Engine, answer: Answer) -> dict[str, Any]:
    """The object that ``aegis run --json`` prints."""
    from aegis.engine.memory import peak_nbytes

    stats, generated = engine.stats, len(answer.token_ids)
    total = stats.totals()
    return {
        "schema_version": SCHEMA_VERSION,
        "model": engine.name,
        "backend": engine.backend,
        "plan": engine.plan.to_json(),
        "prompt_tokens": answer.prompt_tokens,
        "generation_tokens": generated,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tps": answer.clock.prompt_tps,
        "generation_tps": answer.clock.generation_tps,
        "ttft_s": answer.clock.ttft_s,
        "peak_nbytes": peak_nbytes(),
        "hit_rate": stats.hit_rate,
        "read_nbytes": total.read_nbytes,
        "read_nbytes_per_token": stats.totals("decode").read_nbytes / max(1, generated - 1),
        "wait_s": total.wait_s,
        "given_back": asdict(stats.given_back),
    }
