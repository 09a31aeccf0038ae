"""``aegis run``: answer one prompt, or chat on a terminal."""

from __future__ import annotations

import sys
from typing import Any

import click

from aegis.cli.options import (
    DEFAULT_CAP_HELP,
    Options,
    cap_option,
    choose_caps,
    engine_options,
    json_option,
    model_option,
    prompt_options,
    quiet_option,
    verbose_option,
)
from aegis.cli.report import (
    check_cap,
    figures,
    note,
    note_fallback,
    note_ledger,
    note_plan,
    print_json,
)
from aegis.cli.source import SAMPLE_PROMPT, Request, on_terminal, requested


@click.command("run", short_help="Answer a prompt, or chat on a terminal.")
@click.argument("positionals", nargs=-1, metavar="[MODEL] [PROMPT]")
@model_option
@prompt_options
@cap_option(f"Memory cap, as 4GiB or 512MiB; a range LOW..HIGH[:STEP] sweeps. {DEFAULT_CAP_HELP}")
@engine_options
@json_option
@quiet_option
@verbose_option
def command(positionals: tuple[str, ...], **options: Any) -> int:
    """Answer PROMPT with MODEL under a memory cap.

    MODEL is the folder of a model or of a converted store; ORG/NAME[@REVISION] on the Hugging Face
    hub, which is downloaded and converted once; or synthetic:SHAPE[@SEED], random weights in a
    known shape or in that of a config.json, which are written first. Without it the embedded model
    answers. A single argument that is none of these is the prompt. Piped text is the prompt too, or
    is appended to it. With no prompt at all it chats on a terminal (/exit or Ctrl-D leaves). The
    memory plan and the figures go to stderr, only the answer goes to stdout.
    """
    request = requested(positionals, options)
    note_fallback(options)
    choice = choose_caps(options)
    if len(choice.caps) > 1:
        from aegis.cli.sweep import sweep

        return sweep(request, choice.caps, options)
    if choice.note and not options["quiet"]:
        note(choice.note)
    chats = request.prompt is None and not (options["as_json"] or options["forced"])
    if chats and on_terminal():
        from aegis.cli.chat import chat

        return chat(request, choice.single, options)
    return _one_shot(request, choice.single, options)


def _one_shot(request: Request, cap_nbytes: int, options: Options) -> int:
    from aegis.cli.answer import (
        answer_json,
        chosen_sampler,
        forced_json,
        generate,
        make_sampler,
        open_engine,
        prompt_ids,
    )

    quiet, as_json = options["quiet"], options["as_json"]
    sampler = make_sampler(options)
    with open_engine(request, cap_nbytes, options, None if quiet else note_plan) as engine:
        if not quiet:
            note(f"{engine.name}: {engine.describe()}\n")
            if request.prompt is None:
                note(f"no prompt was given, so a sample is answered: {SAMPLE_PROMPT}\n")
        ids = prompt_ids(engine, request.prompt or SAMPLE_PROMPT, options)
        sampler = chosen_sampler(engine, options, sampler)
        answer = generate(engine, ids, options, sampler, _ignore if as_json else _show)
        result = answer_json(engine, answer) | forced_json(sampler)
        if as_json:
            print_json(result)
        elif not answer.text.endswith("\n"):
            _show("\n")
        if not quiet:
            note(("" if as_json else "\n") + figures(result))
        if options["verbose"]:
            note_ledger(engine.ledger())
    check_cap(result)
    return 0


def _show(text: str) -> None:
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _ignore(text: str) -> None:
    """With --json the text is printed once, inside the object."""
