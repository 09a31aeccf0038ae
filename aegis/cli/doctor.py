"""``aegis doctor``: what the machine is, what is wrong with it, and whether it computes right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import json_option, quiet_option, usual_backend
from aegis.cli.report import SCHEMA_VERSION, note, print_json
from aegis.errors import AegisError

if TYPE_CHECKING:
    from aegis.doctor.selftest import Selftest


@click.command("doctor", short_help="Look at the machine, and test what it computes.")
@click.option("--selftest", is_flag=True, help="Also compute goldens on every backend there is.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "native", "reference", "mlx"]),
    help="The only backend to test; with --selftest.",
)
@click.option("--no-disk", is_flag=True, help="Do not measure the disk; nothing is written.")
@json_option
@quiet_option
def command(**options: Any) -> int:
    """Say what this machine is and what is wrong with it, with a remedy for each problem.

    The disk is measured with a file of at most 256 MiB where converted models go; it has no name
    and is gone at the end. --selftest computes prompts of the embedded model on every backend and
    instruction set and compares them with another library's results; exit code 1 says that
    something differs.
    """
    if options["backend"] is not None and not options["selftest"]:
        raise click.UsageError("--backend chooses what --selftest tests; add --selftest")
    usual_backend()  # Before anything is measured: a wrong one is refused.
    from aegis.doctor.advice import find_problems
    from aegis.doctor.facts import gather
    from aegis.doctor.report import describe, to_json

    if not options["quiet"] and not options["no_disk"]:
        note("measuring the disk, for a few seconds (--no-disk leaves it out)")
    facts = gather(disk=not options["no_disk"])
    problems = find_problems(facts)
    if not options["as_json"]:
        for line in describe(facts, problems):
            click.echo(line)
    tested = _selftest(options) if options["selftest"] else None
    if options["as_json"]:
        from aegis.doctor.table import selftest_json

        result = None if tested is None else selftest_json(tested)
        found = {**to_json(facts, problems), "selftest": result}
        print_json({"schema_version": SCHEMA_VERSION, **found})
    if tested is not None and not tested.ok:
        raise AegisError(_verdict(tested))
    return 0


def _selftest(options: dict[str, Any]) -> Selftest:
    from aegis.doctor.selftest import Selftest, selftest
    from aegis.doctor.table import header, lines_of, skipped_line

    def show(text: str) -> None:
        if not options["as_json"]:
            click.echo(text)

    show("\n" + header())
    try:
        tested = selftest(
            options["backend"] or "auto", lambda result: show("\n".join(lines_of(result)))
        )
    except AegisError as error:
        return Selftest(error=str(error))
    for skipped in tested.skipped:
        show(skipped_line(skipped))
    return tested


def _verdict(tested: Selftest) -> str:
    if tested.error is not None:
        return tested.error
    if not tested.results:
        reasons = "; ".join(f"{skip.backend}: {skip.reason}" for skip in tested.skipped)
        return f"nothing could be tested ({reasons})"
    wrong = sum(1 for result in tested.results if result.failures)
    return (
        f"{wrong} of {len(tested.results)} runs of the selftest failed: do not trust what is"
        " computed here; install aegis-moe again, and report it if it stays"
    )
