"""Faults in a conversation on a terminal: signals at the prompt and while it answers, bytes that
are no text, a disk that fails for one turn, a terminal that goes away."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from strategies import write_checkpoint

pty = pytest.importorskip("pty")
termios = pytest.importorskip("termios")

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"

CHAT = """
import errno, os, sys
from aegis.cli import main
from aegis.tiers import PythonReadPool
import aegis.tiers.facade

# Reads fail while there is a file "broken"; computing waits while there is a file "slow", and
# leaves a file "begun".
def read(fd, views, offset):
    if os.path.exists("broken"):
        raise OSError(errno.EIO, "")
    return os.preadv(fd, views, offset)

aegis.tiers.facade.open_read_pool = lambda threads, drop_cache=False: PythonReadPool(
    threads, drop_cache, read
)
from aegis.engine.forward import Forward
prefill = Forward.prefill

def slow(self, ids, start):
    while os.path.exists("slow"):
        open("begun", "w").close()
    return prefill(self, ids, start)

Forward.prefill = slow
main()
"""


class Talk:
    """Types lines and waits for what comes back."""

    def __init__(self, folder: Path) -> None:
        arguments = ["run", str(folder / "m"), "--backend", "reference", "-q", "--cap", "1GiB"]
        arguments += ["--ignore-eos", "--chat-template", TEMPLATE, "-n", "3", "-c", "512"]
        self.terminal, self._slave = pty.openpty()
        env = {**os.environ, "PYTHONSAFEPATH": "1", "TERM": "dumb"}
        self.usual = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHAT, *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=env | {"AEGIS_CACHE": str(folder / "cache")},
            cwd=folder,
            start_new_session=True,
        )
        self.seen = ""

    def type(self, line: str | bytes) -> None:
        os.write(self.terminal, (line.encode() if isinstance(line, str) else line) + b"\n")

    def until(self, text: str) -> str:
        """Everything since the last call, up to and with ``text``."""
        deadline = time.monotonic() + 120
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.terminal], [], [], 1)[0]:
                self.seen += os.read(self.terminal, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int) -> int:
        """The exit code after a signal."""
        self.signal(number)
        return self.process.wait(30)

    def settings(self) -> list[object]:
        """The terminal's, as the next program finds them."""
        return list(termios.tcgetattr(self._slave))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self.terminal)


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    write_checkpoint(tmp_path / "m")
    talking = Talk(tmp_path)
    try:
        talking.until("> ")
        yield talking
    finally:
        talking.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_prompt_leaves_the_terminal_as_it_was(talk: Talk, number: int) -> None:
    talk.type("one")
    talk.until("> ")
    assert talk.end(number) == 128 + number
    assert talk.settings() == talk.usual


def test_ctrl_c_at_the_prompt_empties_the_line_and_stays(talk: Talk) -> None:
    for _ in range(30):  # Each right after the prompt, when it may not wait for a key yet.
        talk.signal(signal.SIGINT)
        talk.until("/exit or Ctrl-D leaves")
        talk.until("> ")
    talk.type("one")
    talk.until("> ")
    talk.type("/exit")
    assert talk.process.wait(30) == 0


def test_ctrl_c_while_the_prompt_is_computed_ends_the_turn_and_not_the_chat(
    talk: Talk, tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    talk.type("one two three")
    while not (tmp_path / "begun").exists():
        assert talk.process.poll() is None
    talk.signal(signal.SIGINT)
    talk.until("(ended by Ctrl-C before the answer began)")
    (tmp_path / "slow").unlink()
    talk.until("> ")
    talk.type("one")
    talk.until("> ")
    talk.type("/exit")
    assert talk.process.wait(30) == 0


def test_a_disk_that_fails_for_a_turn_costs_that_turn(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    talk.type("one two")
    said = talk.until("> ")
    assert "Input/output error" in said
    assert "Traceback" not in said
    (tmp_path / "broken").unlink()
    talk.type("one two")
    assert "rror" not in talk.until("> ")
    talk.type("/exit")
    assert talk.process.wait(30) == 0


def test_bytes_that_are_no_text_are_a_line_like_any_other(talk: Talk) -> None:
    talk.type(b"h\xe9llo \xff")
    said = talk.until("> ")
    assert "rror" not in said
    talk.type("/exit")
    assert talk.process.wait(30) == 0


def test_a_terminal_that_goes_away_ends_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    talking = Talk(tmp_path)
    talking.until("> ")
    os.close(talking._slave)
    os.close(talking.terminal)
    try:
        assert talking.process.wait(30) in (0, 1, 129)
    finally:
        talking.process.kill()
        talking.process.wait()
