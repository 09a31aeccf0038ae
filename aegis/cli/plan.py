"""``aegis plan``: the memory plan, from headers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import (
    DEFAULT_CAP_HELP,
    Options,
    cap_option,
    engine_options,
    engine_settings,
    json_option,
    model_option,
    noted_caps,
    quiet_option,
)
from aegis.cli.report import note, note_fallback, print_json
from aegis.cli.source import only_model
from aegis.errors import PlanError

if TYPE_CHECKING:
    from pathlib import Path

    from aegis.engine.sources import Model, Source
    from aegis.planner import MemoryPlan


@click.command("plan", short_help="Show the memory plan; nothing is converted or loaded.")
@click.argument("positional", required=False, metavar="[MODEL]")
@model_option
@cap_option(f"Memory cap, as 4GiB or 512MiB. {DEFAULT_CAP_HELP}")
@engine_options
@json_option
@quiet_option
def command(positional: str | None, **options: Any) -> int:
    """Show what a memory cap would be spent on.

    Reads headers only, of a model on the hub (ORG/NAME) too, or a shape where MODEL is
    synthetic:SHAPE: nothing is downloaded, converted, loaded or written. Exit code 3 says that the
    plan does not fit; the smallest cap that opens is named.
    """
    model = only_model(positional, options)
    note_fallback(options)
    choice = noted_caps(options)
    source = find_model(model, options)
    plan = plan_for(source, choice.single, options)
    _show(plan, source, options)
    if not plan.feasible:
        raise PlanError(plan.refusal())
    return 0


def find_model(model: Model, options: Options) -> Source:
    """The store that MODEL stands for, or else what its store will be made of."""
    from aegis.engine.planning import backend_layout, choose_backend, settings_for
    from aegis.engine.planning import find_model as find

    backend = choose_backend(options["backend"])
    source = find(model, backend, settings_for(1, engine_settings(options)))
    announce(source, source.place(backend_layout(backend)), options)
    return source


def announce(source: Source, place: Path, options: Options) -> None:
    """Say what is going to be made of a model at ``place``, where nobody asked for it."""
    said = source.announcement(place)
    if said is not None and not options["quiet"]:
        note(said)


def plan_for(source: Source, cap_nbytes: int, options: Options) -> MemoryPlan:
    """The plan at one cap for the command line's settings; a wrong setting is a UsageError."""
    from aegis.engine.planning import make_plan
    from aegis.errors import UsageError
    from aegis.settings import Settings

    try:
        return make_plan(source, Settings(cap_nbytes=cap_nbytes, **engine_settings(options)))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _show(plan: MemoryPlan, source: Source, options: Options) -> None:
    if options["as_json"]:
        print_json(plan.to_json())
        return
    from aegis.planner import format_size
    from aegis.planner.explain import explain_plan

    for line in explain_plan(plan):
        click.echo(line)
    if not options["quiet"]:
        note(_surroundings(source))
        if source.missing_nbytes is not None:
            note(f"{source.name} is not here yet: {format_size(source.missing_nbytes)} to download")


def _surroundings(source: Source) -> str:
    """Free memory and whether reads can bypass the page cache where the store lies."""
    from aegis.cli.machine import read_machine
    from aegis.convert.cache import cache_folder
    from aegis.engine.planning import store_storage
    from aegis.engine.sources import StoreSource

    store = source.path if isinstance(source, StoreSource) else cache_folder()
    reads = store_storage(source, "il16").describe()
    return f"machine: {read_machine().describe()}; {store}: {reads}"
