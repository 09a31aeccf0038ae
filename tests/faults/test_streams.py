"""Standard streams that are closed, full, gone early, non-blocking or in another encoding."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fault_tools import python_script
from strategies import write_checkpoint

SMALL = ("--backend", "reference", "-c", "64", "--cap", "1GiB")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint "m" and a cache that the tests share."""
    folder = tmp_path_factory.mktemp("home")
    write_checkpoint(folder / "m")
    shell(folder, f"{AEGIS} convert m -q")
    return folder


AEGIS = f"{sys.executable} -m aegis"
RUN = f"{AEGIS} run m hello --raw -n 6 --ignore-eos {' '.join(SMALL)}"
SWEEP = f"{AEGIS} sweep m hello --raw -n 2 --backend reference -c 64 --cap 1GiB..2GiB:1GiB"


def shell(
    home: Path, line: str, env: dict[str, str] | None = None, stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """One line for bash."""
    variables = {**os.environ, "PYTHONSAFEPATH": "1", "AEGIS_CACHE": str(home / "cache")}
    # What tests are run with must not hide what users would see.
    variables.pop("PYTHONUNBUFFERED", None)
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    return subprocess.run(
        ["bash", "-c", line],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        cwd=home,
        env=variables | (env or {}),
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "line",
    [
        f"{RUN} -q --json",
        f"{AEGIS} plan m -q --cap 1GiB",
        f"{AEGIS} convert m -q",
        f"{AEGIS} verify m -q",
        f"{AEGIS} run --help",
        SWEEP + " -q",
    ],
)
def test_a_reader_that_leaves_early_ends_every_verb_in_silence(home: Path, line: str) -> None:
    done = shell(home, f"{line} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, b"")


def test_one_that_leaves_in_mid_answer_ends_it_at_once(home: Path) -> None:
    line = f"{RUN} -q -n 100000 -c 4096 | head -c 3; exit ${{PIPESTATUS[0]}}"
    done = shell(home, line)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 3, b"")


@pytest.mark.parametrize(
    ("closed", "lost"),
    [("<&-", ""), (">&-", "out"), ("2>&-", "err"), ("<&- >&- 2>&-", "out err")],
)
def test_closed_streams_change_nothing_else(
    home: Path, answer: bytes, closed: str, lost: str
) -> None:
    done = shell(home, f"{RUN} {closed}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (b"" if "out" in lost else answer)
    assert bool(done.stderr) == ("err" not in lost)
    assert b"Traceback" not in done.stderr


@pytest.fixture(scope="module")
def answer(home: Path) -> bytes:
    """With every stream open."""
    return shell(home, RUN).stdout


def test_what_is_meant_for_people_never_goes_into_a_file_of_the_store(home: Path) -> None:
    """The numbers of closed streams are the next that files get."""
    line = f"{AEGIS} convert m made --json <&- >&- 2>&-; {AEGIS} verify made && rm -r made"
    done = shell(home, line)
    assert (done.returncode, done.stderr) == (0, b"")
    code = (
        "import os; os.closerange(0, 3)\n"
        "from aegis.cli.streams import prepare_streams\n"
        "prepare_streams()\n"
        "fd = os.open('number', os.O_CREAT | os.O_WRONLY)\n"
        "os.write(fd, str(fd).encode())"
    )
    python_script(code, cwd=home)
    assert int((home / "number").read_text()) > 2


@pytest.mark.parametrize("line", [RUN + " -q", RUN + " -q --json", f"{AEGIS} convert m -q"])
def test_a_full_disk_behind_stdout_is_an_error_in_a_sentence(home: Path, line: str) -> None:
    done = shell(home, f"{line} > /dev/full")
    assert done.returncode == 1
    told = done.stderr.decode()
    assert told == "error: reading or writing failed: No space left on device\n"


@pytest.mark.parametrize("lost", ["2>/dev/full", "2> >(true)"])
def test_what_people_cannot_be_told_costs_no_answer(home: Path, answer: bytes, lost: str) -> None:
    done = shell(home, f"{RUN} {lost}")
    assert (done.returncode, done.stdout) == (0, answer)
    done = shell(home, f"{AEGIS} plan m --cap 1B {lost}")
    assert (done.returncode, done.stdout[:11]) == (3, b"memory plan")


def test_a_pipe_that_does_not_wait_is_made_to(home: Path) -> None:
    """Both ends of other programs' pipes may be non-blocking: nothing is lost, nothing fails."""
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    code = (
        "import sys; from aegis.cli.streams import prepare_streams\n"
        "prepare_streams()\n"
        "sys.stdout.write('x' * 100_000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=read, stdout=write) as process:
        os.close(write)
        os.set_blocking(read, True)
        with os.fdopen(read, "rb") as stream:
            assert len(stream.read()) == 100_000
    assert process.returncode == 0


LOCALES = {
    "C": {"LC_ALL": "C"},
    "POSIX": {"LC_ALL": "POSIX"},
    "none of these": {"LC_ALL": "xx_YY.ISO-8859-1"},
    "C without UTF-8 mode": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "ASCII streams": {"PYTHONIOENCODING": "ascii"},
    "Latin-1 streams": {"PYTHONIOENCODING": "latin-1"},
}
PROMPT = "héllo wörld 你好 😀"


PIPED = "Wörter 言葉"

TOLD = """
import sys
from aegis.cli.streams import prepare_streams
from aegis.cli.source import resolve_request
prepare_streams()
request = resolve_request(sys.argv[1:], None, None, None)
sys.stdout.buffer.write(ascii(request.prompt).encode())
"""


@pytest.mark.parametrize("locale", LOCALES)
def test_a_prompt_means_the_same_in_every_locale(home: Path, locale: str) -> None:
    line = f"{sys.executable} -c '{TOLD}' '{PROMPT}'"
    done = shell(home, line, LOCALES[locale], PIPED.encode())
    assert done.stdout.decode() == ascii(f"{PROMPT}\n{PIPED}")


TEXTS = "--stop 'é你' --system-prompt 'é你' --chat-template '{{ messages[0].content }}'"


def test_other_texts_mean_the_same_in_every_locale_and_in_the_runs_of_a_sweep(home: Path) -> None:
    locale = LOCALES["C without UTF-8 mode"]
    code = (
        "from aegis.cli import app; from aegis.text import stop\n"
        "given = stop.stop_strings\n"
        "stop.stop_strings = lambda stops: print(ascii(stops)) or given(stops)\n"
        "app.run_command()"
    )
    arguments = RUN.removeprefix(AEGIS).replace("--raw", TEXTS)
    done = shell(home, f'{sys.executable} -c "$CODE" {arguments}', locale | {"CODE": code})
    assert done.stdout.splitlines()[0].decode() == ascii(("é你",))
    done = shell(home, SWEEP.replace("--raw", TEXTS).replace("1GiB..2GiB:1GiB", "1GiB"), locale)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("locale", ["C", "C without UTF-8 mode", "ASCII streams"])
def test_folders_may_be_named_in_any_letters_in_every_locale(home: Path, locale: str) -> None:
    folder = home / "mödel 你好"
    if not folder.exists():
        shutil.copytree(home / "m", folder)
    done = shell(home, f"{AEGIS} convert -q '{folder.name}'", LOCALES[locale])
    assert (done.returncode, done.stderr) == (0, b"")
    missing = shell(home, f"{AEGIS} plan 'nö such/folder'", LOCALES[locale])
    assert missing.returncode == 2
    assert b"Traceback" not in missing.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
@pytest.mark.parametrize("locale", ["C without UTF-8 mode", "Latin-1 streams"])
def test_an_object_of_json_loses_nothing_in_any_locale(home: Path, locale: str) -> None:
    odd = home / "m\udce9 \xe9 \u4f60"
    if not odd.exists():
        shutil.copytree(home / "m", odd)
    line = f"{AEGIS} convert $'m\\xe9 é 你' --json"
    told = json.loads(shell(home, line, LOCALES[locale]).stdout.decode())
    assert Path(told["store"]).is_dir()
    path = shell(home, line.removesuffix(" --json"), LOCALES[locale]).stdout
    assert path == os.fsencode(told["store"]) + b"\n"


def test_bytes_that_are_no_text_do_not_end_it(home: Path) -> None:
    line = f"{AEGIS} run -m m $'h\\xe9llo \\xff' --raw -n 2 -q {' '.join(SMALL)}"
    done = shell(home, line, LOCALES["C without UTF-8 mode"])
    assert (done.returncode, done.stderr) == (0, b"")
