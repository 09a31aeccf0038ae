"""``aegis plan``: the memory plan, from headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import (
    DEFAULT_CAP_HELP,
    Options,
    cap_option,
    choose_caps,
    engine_options,
    engine_settings,
    json_option,
    model_option,
    quiet_option,
)
from aegis.cli.report import note, note_fallback, print_json
from aegis.cli.source import resolve_model
from aegis.errors import PlanError

if TYPE_CHECKING:
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

    Reads headers only, or a shape where MODEL is synthetic:SHAPE: nothing is converted, loaded or
    written. Exit code 3 says that the plan does not fit; the smallest cap that opens is named.
    """
    if positional is not None and options["model"] is not None:
        raise click.UsageError("MODEL is given twice: as an argument and with --model")
    folder = model_folder(resolve_model(options["model"] if positional is None else positional))
    note_fallback(options)
    choice = choose_caps(options)
    if choice.note and not options["quiet"]:
        note(choice.note)
    plan = plan_for(folder, choice.single, options)
    _show(plan, folder, options)
    if not plan.feasible:
        raise PlanError(plan.refusal())
    return 0


def model_folder(model: Path | None) -> Path:
    """The folder of a model, the embedded one for None."""
    from aegis.convert.cache import embedded_path

    return embedded_path() if model is None else model


def plan_for(folder: Path, cap_nbytes: int, options: Options) -> MemoryPlan:
    """The plan at one cap for the command line's settings; a wrong setting is a UsageError."""
    from aegis.engine.planning import make_plan
    from aegis.errors import UsageError
    from aegis.settings import Settings

    try:
        return make_plan(folder, Settings(cap_nbytes=cap_nbytes, **engine_settings(options)))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _show(plan: MemoryPlan, folder: Path, options: Options) -> None:
    if options["as_json"]:
        print_json(plan.to_json())
        return
    from aegis.planner.explain import explain_plan

    for line in explain_plan(plan):
        click.echo(line)
    if not options["quiet"]:
        note(_surroundings(folder))


def _surroundings(folder: Path) -> str:
    """Free memory and whether reads can bypass the page cache where the store lies."""
    from aegis.checkpoint.store import is_store
    from aegis.cli.machine import read_machine
    from aegis.convert.cache import cache_folder
    from aegis.engine.planning import store_storage

    store = folder if is_store(folder) else cache_folder()
    reads = store_storage(folder, "il16").describe()
    return f"machine: {read_machine().describe()}; {store}: {reads}"
