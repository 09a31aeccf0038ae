"""Runs command lines, each in a forked process of its own, without starting Python each time.

Run as a script: a line of JSON per request on stdin, a line of JSON per answer on stdout. The child
runs the command's own entry point; its exit code is the process's, and what it took at most beyond
what the parent had is measured by the kernel.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

LIMIT_S = 30


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    stdout: str
    stderr: str
    grown_nbytes: int
    """The most it ever took beyond what it began with; 0 where /proc does not say."""
    wall_s: float

    @property
    def sentence(self) -> str:
        """The one line on stderr, without what introduces it."""
        [line] = self.stderr.strip().splitlines()
        assert line.startswith("error: "), line
        return line.removeprefix("error: ")


class CommandServer:
    """A warm interpreter that forks itself for every command line."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            # A library's backtrace of its panic would take 60 MiB.
            env={
                **os.environ,
                "PYTHONSAFEPATH": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "RUST_BACKTRACE": "0",
            },
        )

    def __enter__(self) -> CommandServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(self, *arguments: object, **environment: object) -> Ended:
        """``aegis ARGUMENTS`` with variables of its own."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [list(map(str, arguments)), {k: str(v) for k, v in environment.items()}]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _child(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Never returns."""
    signal.alarm(LIMIT_S)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the parent's has been read from
    os.environ.update(environment)
    sys.argv = ["aegis", *arguments]
    from aegis.cli import main

    before = 0
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS:")
    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        Path(f"{folder}/grown").write_text(str(max(0, _status("VmHWM:") - before)))


def _answer(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="aegis-command-") as folder:
        begun = time.perf_counter()
        child = os.fork()
        if not child:
            code = 1
            try:
                _child(arguments, environment, folder)
            except SystemExit as ending:
                code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
            except BaseException as error:  # what the interpreter would print and end with
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        wall_s = time.perf_counter() - begun
        grown = Path(folder, "grown")
        return {
            "code": os.waitstatus_to_exitcode(status),
            "stdout": Path(folder, "stdout").read_text(errors="replace"),
            "stderr": Path(folder, "stderr").read_text(errors="replace"),
            "grown_nbytes": int(grown.read_text()) if grown.exists() else 0,
            "wall_s": wall_s,
        }


def _serve() -> None:
    import aegis.cli.convert
    import aegis.cli.plan
    import aegis.cli.run
    import aegis.cli.verify
    import aegis.convert.convert
    import aegis.engine.engine
    import aegis.text.tokenizer  # noqa: F401 - what every child would import first

    for line in sys.stdin:
        print(json.dumps(_answer(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
