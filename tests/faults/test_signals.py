"""SIGINT, SIGTERM and SIGHUP at any moment: the exit code says which, nothing is left behind but
what is finished, and nobody sees a traceback. SIGKILL: the next one cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from fault_tools import check_kept, contents, python_script
from small_model import linux
from strategies import write_checkpoint

from aegis.convert.build import JOURNAL
from aegis.convert.cache import ensure_store
from aegis.convert.convert import convert
from aegis.convert.verify import verify
from aegis.errors import Note

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SMALL = ("--backend", "reference", "-c", "64", "--cap", "1GiB", "-q")

AT_IMPORT = """
import os, sys
number, name, *arguments = sys.argv[1:]
class Watch:
    def find_spec(self, module, path=None, target=None):
        if module == name:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Watch())
sys.argv[1:] = arguments
from aegis.cli import main
main()
"""


@cache
def loaded_at_start() -> list[str]:
    """What an interpreter has imported before it runs anything."""
    return python_script("import sys; print(*sys.modules)").stdout.split()


@pytest.mark.parametrize(
    "module",
    [
        *("enum", "threading", "aegis.cli.signals", "click", "aegis.cli.app", "aegis.cli.run"),
        *("aegis.engine.planning", "numpy", "tokenizers", "aegis.engine.engine"),
    ],
)
def test_ctrl_c_while_anything_is_imported_exits_130_in_silence(
    module: str, tmp_path: Path
) -> None:
    if module in loaded_at_start():
        pytest.skip(f"what is installed beside this interpreter has it load {module} by itself")
    source = write_checkpoint(tmp_path / "m")
    arguments = ("run", str(source), "hello", "--raw", "-n", "1", *SMALL)
    done = python_script(
        AT_IMPORT, str(int(signal.SIGINT)), module, *arguments, env={"AEGIS_CACHE": str(tmp_path)}
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nothing_is_imported_before_signals_are_looked_after() -> None:
    """What is loaded by then: Ctrl-C earlier is the interpreter's own traceback."""
    code = (
        "import sys; before = set(sys.modules); import aegis.cli;"
        "print(sorted(set(sys.modules) - before))"
    )
    loaded = python_script(code).stdout.strip()
    assert loaded in ("['__future__', 'aegis', 'aegis.cli']", "['aegis', 'aegis.cli']")


IN_HOOK = """
import os, signal, sys, time, weakref
from aegis.cli import signals
signals.GRACE_S = 0.3
signals.install()
{body}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (
            "lost in a callback",
            "class A: pass\n"
            "a = A()\n"
            "ref = weakref.ref(a, lambda _: os.kill(os.getpid(), signal.SIGTERM))\n"
            "del a",
        ),
        (
            "swallowed by someone",
            "try:\n    os.kill(os.getpid(), signal.SIGTERM)\nexcept BaseException:\n    pass",
        ),
        (
            "a way out that takes too long",
            "try:\n    os.kill(os.getpid(), signal.SIGTERM)\nfinally:\n    time.sleep(60)",
        ),
        (
            "a way out inside of a library",
            "import threading\n"
            "stuck = threading.Thread(target=time.sleep, args=(60,))\n"
            "stuck.start()\n"
            "try:\n    os.kill(os.getpid(), signal.SIGTERM)\nfinally:\n    stuck.join()",
        ),
    ],
)
def test_a_signal_ends_the_process_even_where_its_exception_does_not(name: str, body: str) -> None:
    done = python_script(IN_HOOK.format(body=body), timeout=30)
    assert (done.returncode, done.stderr) == (143, "")


TURNED = """
import os, signal, sys
from aegis.cli import app, main
def turn(arguments):
    class Field:
        def __set_name__(self, owner, name):
            os.kill(os.getpid(), signal.SIGTERM)
    class Owner:
        field = Field()
app.group.invoke = turn
sys.argv[1:] = ["plan"]
main()
"""


def test_a_signal_turned_into_another_exception_is_still_a_signal() -> None:
    done = python_script(TURNED)
    assert (done.returncode, done.stderr) == (143, "")


def test_a_signal_that_is_to_be_ignored_is_ignored() -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from aegis.cli import signals\n"
        "signals.install()\n"
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,"
        " signal.getsignal(signal.SIGTERM) is signals.end)"
    )
    assert python_script(code).stdout == "True True\n"


def test_a_second_signal_does_not_disturb_the_way_out() -> None:
    body = (
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "finally:\n    os.kill(os.getpid(), signal.SIGINT); print('undone', flush=True);"
        " os._exit(7)"
    )
    done = python_script(IN_HOOK.format(body=body))
    assert (done.returncode, done.stdout) == (7, "undone\n")


IN_CONVERSION = """
import os, sys
number, after, *arguments = sys.argv[1:]
from aegis.cli import progress
def strike(self, done, total):
    if done >= float(after) * total:
        os.kill(os.getpid(), int(number))
progress.ProgressBar.__call__ = strike
sys.argv[1:] = arguments
from aegis.cli import main
main()
"""


def struck(number: int, after: float, cache: Path, *arguments: str) -> int:
    """The exit code of a command that a signal strikes while it converts."""
    return struck_saying(number, after, cache, *arguments)[0]


def struck_saying(number: int, after: float, cache: Path, *arguments: str) -> tuple[int, str]:
    """The same, and what it says about what it keeps."""
    done = python_script(
        IN_CONVERSION, str(int(number)), str(after), *arguments, env={"AEGIS_CACHE": str(cache)}
    )
    assert done.stderr == "" or "error" not in done.stderr
    assert "Traceback" not in done.stderr
    kept = [line for line in done.stderr.splitlines() if "are kept" in line]
    assert len(kept) < 2
    return done.returncode, "".join(kept)


def check_left(cache: Path, source: Path, said: str) -> set[str]:
    """What an ended conversion kept, and that the next one goes on with it."""
    sound = contents(convert(source, cache.parent / "whole").path)
    error = KeyboardInterrupt()
    if said:
        error.add_note(Note(said))
    kept = check_kept(cache, sound, error)
    store = ensure_store(source)
    assert contents(store.path) == sound
    assert list(cache.iterdir()) == [store.path]
    for name, inode in kept.items():
        assert (store.path / name).stat().st_ino == inode
    return set(kept)


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("after", [0.01, 0.99])
def test_a_conversion_that_is_ended_leaves_what_is_finished(
    number: int, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_checkpoint(tmp_path / "m"), tmp_path / "cache"
    monkeypatch.setenv("AEGIS_CACHE", str(cache))
    code, said = struck_saying(number, after, cache, "convert", str(source))
    assert code == 128 + number
    expected = {0.01: set(), 0.99: {"resident.bin", "experts/layer_000.bin"}}[after]
    assert check_left(cache, source, said) == expected


def test_a_run_that_is_ended_while_it_converts_leaves_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_checkpoint(tmp_path / "m"), tmp_path / "cache"
    monkeypatch.setenv("AEGIS_CACHE", str(cache))
    arguments = ("run", str(source), "hello", "--raw", *SMALL)
    code, said = struck_saying(signal.SIGTERM, 0.6, cache, *arguments)
    assert code == 143
    assert "resident.bin" in check_left(cache, source, said)


def test_a_killed_conversion_is_made_whole_and_its_remains_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_checkpoint(tmp_path / "m"), tmp_path / "cache"
    monkeypatch.setenv("AEGIS_CACHE", str(cache))
    assert struck(signal.SIGKILL, 0.5, cache, "convert", str(source)) == -signal.SIGKILL
    left = sorted(path.name for path in cache.iterdir())
    assert [".lock" in left[0], ".partial-" in left[1]] == [True, True]
    store = ensure_store(source)
    assert verify(store).ok
    assert list(cache.iterdir()) == [store.path]


def test_remains_go_even_if_their_model_is_never_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = write_checkpoint(tmp_path / "m"), write_checkpoint(tmp_path / "other", 1)
    cache = tmp_path / "cache"
    monkeypatch.setenv("AEGIS_CACHE", str(cache))
    store = ensure_store(source)
    for _ in range(2):
        assert struck(signal.SIGKILL, 0.5, cache, "convert", str(other)) == -signal.SIGKILL
    struck(signal.SIGKILL, 0.5, cache, "convert", str(store.path), "--experts", "3bit")
    assert len(list(cache.iterdir())) > 1
    assert len(list(store.path.glob(".*"))) > 0
    for journal in cache.rglob(JOURNAL):  # Nobody has gone on with them for a week.
        os.utime(journal, (1, 1))
    ensure_store(source)
    assert list(cache.iterdir()) == [store.path]
    assert list(store.path.glob(".*")) == []
    assert verify(store).ok


def test_a_killed_conversion_to_3_bits_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = convert(write_checkpoint(tmp_path / "m"), tmp_path / "s")
    before = (store.path / "store.json").read_bytes()
    arguments = ("convert", str(store.path), "--experts", "3bit")
    assert struck(signal.SIGKILL, 0.5, tmp_path / "cache", *arguments) == -signal.SIGKILL
    assert (store.path / "store.json").read_bytes() == before
    assert verify(store).ok
    done = python_script("import sys; from aegis.cli import main; main()", *arguments, "--json")
    assert '"3bit"' in done.stdout, done.stderr
    assert list(store.path.glob(".*")) == []


def start(*arguments: str, cache: Path) -> subprocess.Popen[str]:
    """A command in a group of its own, so that no terminal's signal reaches it."""
    return subprocess.Popen(
        [sys.executable, "-m", "aegis", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", "AEGIS_CACHE": str(cache)},
        start_new_session=True,
    )


@pytest.mark.parametrize("number", ENDING)
def test_an_answer_is_ended_by_each_of_them(number: int, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    arguments = ("run", str(source), "hello", "--raw", "--ignore-eos", "-n", "1500", *SMALL)
    with start(*arguments, "-c", "2048", cache=tmp_path / "cache") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(number)
        process.stdout.read()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + number


def test_a_sweep_that_is_ended_ends_its_run_too(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    arguments = ("sweep", str(source), "hello", "--raw", "--ignore-eos", "-n", "2000")
    fixed = ("--backend", "reference", "-c", "2048", "--cap", "1GiB")
    with start(*arguments, *fixed, cache=tmp_path / "cache") as process:
        deadline = time.monotonic() + 60
        while not (children := children_of(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def children_of(pid: int) -> list[int]:
    """Processes that a process has started."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        pytest.skip("/proc does not tell whose child is whose")


BORN = """
import signal, subprocess, sys
from aegis.cli import app, signals

class Born(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print(self.pid, flush=True)
        signal.raise_signal(signal.SIGTERM)

subprocess.Popen = Born
signals.install()
app.run_command(sys.argv[1:])
"""


@linux
def test_a_run_of_a_sweep_is_ended_from_its_birth_on(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    fixed = ("--backend", "reference", "-c", "64", "--cap", "1GiB", "--raw")
    env = {"AEGIS_CACHE": str(tmp_path / "cache")}
    done = python_script(BORN, "sweep", str(source), "hello", *fixed, env=env)
    assert done.returncode == 143, done.stderr
    assert not Path(f"/proc/{int(done.stdout.split()[-1])}").exists()
