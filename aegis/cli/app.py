"""The command group, and how every ending becomes an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Iterator, Sequence

import click

from aegis.cli.signals import Ended, ending, ignore
from aegis.cli.streams import forget, prepare_streams, tell
from aegis.cli.wrong_usage import sentence
from aegis.errors import BARE_SOURCES, AegisError, notes_of

INTERRUPTED = 130
VERBS = (
    "run",
    "plan",
    "sweep",
    "bench",
    "predict",
    "pull",
    "convert",
    "list",
    "show",
    "rm",
    "verify",
    "trace",
    "eval",
    "doctor",
)


class LazyGroup(click.Group):
    """Imports a verb's module when that verb, or the list of verbs, is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order of use."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """``command`` of ``aegis.cli.<verb>``."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"aegis.cli.{cmd_name}").command
        return command


@click.command(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 error, 2 usage, 3 plan does not fit, 4 cap exceeded, "
    "130 interrupted, 143 terminated (128 + the signal).",
)
@click.version_option(package_name="aegis-moe", prog_name="aegis")
@click.pass_context
def group(ctx: click.Context) -> None:
    """Run Mixture-of-Experts language models under a hard memory cap.

    The experts stay on the SSD and stream through a fixed pool of slots; the tokens are the same
    at every cap.
    """
    if ctx.invoked_subcommand is None:
        tell(ctx.get_help())
        ctx.exit(click.UsageError.exit_code)


def run_command(arguments: Sequence[str] | None = None) -> None:
    """Run one command line (None: the process's) and exit with its code."""
    prepare_streams()
    code = _flushed(_guarded(arguments))
    ignore()  # A signal while the interpreter takes itself apart would only leave a traceback.
    sys.exit(code)


def _flushed(code: int) -> int:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        forget(sys.stdout)
    except OSError as error:
        forget(sys.stdout)
        return code or _fail(_system_error(error), 1)  # Or the failure has been told already.
    return code


def _guarded(arguments: Sequence[str] | None) -> int:
    notes: list[str] = []
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        # Not group.main(): it has its own ideas about a closed pipe and Ctrl-C.
        with _noting(notes), group.make_context("aegis", given) as ctx:
            code = group.invoke(ctx)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except AegisError as error:
        return _fail(str(error), error.exit_code)
    except click.UsageError as error:
        return _fail(sentence(error), error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except Ended as ended:
        return ended.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        forget(sys.stdout)
        return 0
    except MemoryError:
        return _fail("the system gave no more memory; use a smaller --cap or --ctx-size", 1)
    except OSError as error:
        return _fail(_system_error(error), 1)
    except Exception as error:
        if os.environ.get("AEGIS_TRACEBACK"):
            raise
        return _fail(f"{_unforeseen(error)} (AEGIS_TRACEBACK=1 shows where)", 1)
    finally:
        for note in notes:
            tell(note)


@contextlib.contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Collect what was added to whatever ends the block: what is kept of a conversion."""
    try:
        yield
    except BaseException as error:
        notes += notes_of(error)
        raise


def _unforeseen(error: Exception) -> str:
    """One line, whatever a library has to say."""
    if isinstance(error, ImportError):
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        if getattr(error, "name", None) in ("aegis.planner", "aegis.tiers", "aegis.kernels"):
            return BARE_SOURCES
        return (
            f"a library could not be loaded: {_one_line(error)}; give more address space"
            " (ulimit -v) or install aegis-moe again"
        )
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _system_error(error: OSError) -> str:
    """What the system refused, and for which file where there is one."""
    if error.errno == errno.ENOENT and error.filename is None:
        return "the current folder was removed; change to one that is there"
    where = f"{error.filename}: " if error.filename else "reading or writing failed: "
    return f"{where}{error.strerror or error}"


def _fail(what: str, code: int) -> int:
    if (signalled := ending()) is not None:
        return signalled  # Not an error of its own: it came of the way out.
    tell(f"error: {what}")
    return code
