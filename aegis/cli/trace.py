"""``aegis trace``: what routers choose, recorded, and what it says about caching and guessing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
)
from aegis.cli.replayed import (
    refuse_incomplete,
    refuse_timing,
    replay_options,
    replayed,
    replayed_lines,
)
from aegis.cli.report import SCHEMA_VERSION, note, note_fallback, note_plan, print_json
from aegis.cli.source import SAMPLE_PROMPT, Request, requested
from aegis.errors import AegisError, UsageError

if TYPE_CHECKING:
    from aegis.engine.engine import Engine
    from aegis.tiers.trace import RoutingTrace

PARTS = (1 / 32, 890 / 10240, 1 / 8, 1 / 4)
"""Of all experts: the numbers of slots that are tried without ``--slots``."""
_USUAL_WIDTH = 6
_WARM_UP = 4
"""One in so many of the first tokens fill the slots and are not counted."""
PUBLISHED: dict[str, Any] = {
    "one_layer_ahead": 6.37,
    "two_layers_ahead": 5.75,
    "useful_cross_layer": (78, 121),
    "useful_previous": (13, 35),
    "hit_share": (0.33, 0.5),
    "hit_share_slots": 890,
}
"""Of Qwen3.6-35B-A3B at 4 GiB on another engine."""
_PUBLISHED_SHAPE = (40, 256, 8)


def _read_slots(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """``890,1268`` as numbers."""
    if value is None:
        return None
    words = value.split(",")
    if not all(word.isdigit() and 0 < int(word) < 1 << 30 for word in words):
        raise click.BadParameter("give numbers of slots, as 890 or 890,1268", ctx, param)
    return tuple(int(word) for word in words)


@click.command("trace", short_help="Record routing, and say what it is worth to caches.")
@click.argument("positionals", nargs=-1, metavar="[MODEL] [PROMPT] | show FILE | replay FILE")
@model_option
@prompt_options
@click.option(
    "--tokens",
    type=click.IntRange(2, 1 << 20),
    metavar="N",
    help="No prompt: N tokens of a stream that --seed chooses (0 if absent) go through.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The trace's file. [default: routing.trace]",
)
@click.option(
    "--slots",
    callback=_read_slots,
    metavar="N,..",
    help="Numbers of slots to tell the hits of. [default: a few parts of all experts]",
)
@replay_options
@cap_option(f"Memory cap, as 4GiB or 512MiB. {DEFAULT_CAP_HELP}")
@engine_options
@json_option
@quiet_option
def command(
    positionals: tuple[str, ...],
    tokens: int | None,
    output: Path | None,
    slots: tuple[int, ...] | None,
    **options: Any,
) -> int:
    """Record the routing of a run of MODEL into FILE and print what follows from it.

    Every token goes through alone, the prompt's too. Printed: how many of a layer's experts the
    routers of the next layers would have guessed, and the token before chose too; how evenly
    experts are chosen; and for numbers of slots the share of choices that the hot tier would hit.
    'aegis trace show FILE' prints the same of a trace that is there.

    'aegis trace replay FILE' sends it through slots without weights: hits with --policy, --guess
    and --guess-width, hits without guesses, and the most that any policy could hit without them
    (Belady's). With --disk, --record and --compute also tokens per second, and the most that
    policy, or any, could reach if no read were waited for that was not needed.
    """
    if positionals[:1] == ("replay",):
        _print(_replayed(positionals[1:], tokens, output, slots, options), options, replayed_lines)
        return 0
    refuse_timing(options)
    if positionals[:1] == ("show",):
        trace = _loaded(positionals[1:], tokens, output)
    else:
        output = output or Path("routing.trace")
        trace = _recorded(positionals, tokens, output, options)
        if not options["quiet"]:
            note(f"wrote {output}\n")
    _print(statistics(trace, slots or _usual_slots(trace)), options, _lines)
    return 0


def _print(
    found: dict[str, Any], options: Options, lines: Callable[[dict[str, Any]], list[str]]
) -> None:
    if options["as_json"]:
        print_json({"schema_version": SCHEMA_VERSION, **found})
    else:
        for line in lines(found):
            click.echo(line)


def _replayed(
    files: tuple[str, ...],
    tokens: int | None,
    output: Path | None,
    slots: tuple[int, ...] | None,
    options: Options,
) -> dict[str, Any]:
    if len(files) != 1 or tokens is not None or output is not None:
        raise click.UsageError("replay takes the file of one trace, and writes none")
    refuse_incomplete(options)
    trace = _loaded(files, tokens, output)
    return replayed(trace, slots or _usual_slots(trace), trace.shape[0] // _WARM_UP, options)


def _loaded(files: tuple[str, ...], tokens: int | None, output: Path | None) -> RoutingTrace:
    from aegis.tiers.errors import TraceError
    from aegis.tiers.trace import RoutingTrace

    if len(files) != 1 or tokens is not None or output is not None:
        raise click.UsageError("show takes the file of one trace, and only --slots and --json")
    try:
        return RoutingTrace.load(files[0])
    except TraceError as error:
        raise AegisError(str(error)) from None


def _recorded(
    positionals: tuple[str, ...], tokens: int | None, output: Path, options: Options
) -> RoutingTrace:
    from aegis.cli.answer import make_sampler, open_engine

    if not output.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {output.absolute().parent}; choose another --output")
    request = requested(positionals, options)
    if tokens is not None and (request.prompt is not None or options["forced"]):
        raise UsageError("--tokens takes the place of a prompt and its answer; drop one of them")
    note_fallback(options)
    choice = choose_caps(options)
    make_sampler(options)
    on_plan = None if options["quiet"] else note_plan
    with open_engine(request, choice.single, options, on_plan) as engine:
        trace = _run(engine, request, tokens, options)
    trace.save(output)
    return trace


def _run(engine: Engine, request: Request, tokens: int | None, options: Options) -> RoutingTrace:
    """Decode every token of the prompt, then those that follow."""
    from itertools import islice

    from aegis.cli.answer import chosen_sampler, make_sampler, prompt_ids
    from aegis.engine.forced import token_stream

    count = options["max_tokens"]
    if tokens is None:
        ids = prompt_ids(engine, request.prompt or SAMPLE_PROMPT, options)
    else:
        count, stream = 0, token_stream(options["seed"] or 0, engine.tokenizer.vocab_size)
        ids = list(islice(stream, tokens))
    if len(ids) + count > engine.context:
        count = max(0, engine.context - len(ids))
    if len(ids) > engine.context:
        raise engine.too_long(len(ids))
    sampler = chosen_sampler(engine, options, make_sampler(options))
    goes_on = options["ignore_eos"] or options["forced"]
    ends = frozenset() if goes_on else engine.tokenizer.eos_token_ids
    with engine.tracing() as tracing:
        for token in ids:
            hidden = engine.feed_token(token)
        for _ in range(count):
            token = sampler.sample(engine.logits(hidden)[0], ids)
            if token in ends:
                break
            ids.append(token)
            hidden = engine.feed_token(token)
        return tracing.recorder.trace(engine.name, ids)


def _usual_slots(trace: RoutingTrace) -> tuple[int, ...]:
    _, layers, per_token = trace.shape
    return tuple(max(per_token, round(part * layers * trace.num_experts)) for part in PARTS)


def statistics(trace: RoutingTrace, slots: tuple[int, ...]) -> dict[str, Any]:
    """What ``aegis trace --json`` prints of a trace."""
    from aegis.tiers.replay import replay
    from aegis.tiers.routing_stats import chosen_again, guessed_right, popular_share

    tokens, layers, per_token = trace.shape
    skip = tokens // _WARM_UP
    counted = max(1, tokens - skip)
    hits, useful = [], {}
    for number in slots:
        found = replay(trace, number, skip=skip)
        hits.append({"slots": number, "hit_share": found.hit_rate})
    middle = slots[min(1, len(slots) - 1)]
    for kind in ("cross-layer", "previous"):
        found = replay(trace, middle, guess=kind, guess_width=_USUAL_WIDTH, skip=skip)
        useful[kind] = found.useful / counted
    same_shape = (layers, trace.num_experts, per_token) == _PUBLISHED_SHAPE
    return {
        "model": trace.model,
        "tokens": tokens,
        "ids_sha256": trace.ids_sha256,
        "layers": layers,
        "experts": trace.num_experts,
        "experts_per_token": per_token,
        "one_layer_ahead": guessed_right(trace, 1),
        "two_layers_ahead": guessed_right(trace, 2),
        "token_before": chosen_again(trace),
        "popular_tenth": popular_share(trace),
        "hits": hits,
        "useful_slots": middle,
        "useful_cross_layer": useful["cross-layer"],
        "useful_previous": useful["previous"],
        "published": PUBLISHED if same_shape else None,
    }


def _lines(found: dict[str, Any]) -> list[str]:
    """The same as a table, with what was published where that is of this shape."""
    of = f"of {found['experts_per_token']}"
    published = found["published"] or {}
    all_slots = found["layers"] * found["experts"]

    def ids(name: str) -> str:
        return "-" if found[name] is None else f"{found[name]:.2f} {of}"

    rows = [
        ("experts guessed right one layer ahead", ids("one_layer_ahead"), "one_layer_ahead"),
        ("two layers ahead", ids("two_layers_ahead"), "two_layers_ahead"),
        ("chosen by the token before too", ids("token_before"), ""),
        ("share of a layer's most chosen tenth", f"{found['popular_tenth']:.1%}", ""),
    ]
    rows += [
        (f"hits with {hit['slots']} of {all_slots} slots", f"{hit['hit_share']:.1%}", "hit_share")
        for hit in found["hits"]
    ]
    for kind, name in (("the next layer", "cross_layer"), ("the token before", "previous")):
        what = f"useful reads ahead per token, by {kind} ({found['useful_slots']} slots)"
        rows.append((what, f"{found[f'useful_{name}']:.0f}", f"useful_{name}"))
    head = (
        f"{found['model']}: {found['tokens']} tokens, {found['layers']} layers of"
        f" {found['experts']} experts"
    )
    lines = [head, ("" if not published else f"{'':62}{'here':>12}   published")]
    for what, here, name in rows:
        said = _said(published.get(name))
        if name == "hit_share" and f" {published.get('hit_share_slots')} " not in what:
            said = ""
        lines.append(f"{what:62}{here:>12}   {said}".rstrip())
    return [line for line in lines if line]


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        low, high = value
        return f"{low:.0%} to {high:.0%}" if high <= 1 else f"{low} to {high}"
    return f"{value:.2f}"
