"""The command line. One module per verb; nothing heavy is imported before it is needed."""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``aegis`` command."""
    from aegis.cli.app import run_command

    run_command()
