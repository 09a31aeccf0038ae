"""A conversation on a terminal, through a real pseudo-terminal."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aegis import Engine
from aegis.cli.answer import generate
from aegis.engine.sampling import Sampler

pty = pytest.importorskip("pty")

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


class Talk:
    """Types lines and waits for what comes back."""

    def __init__(self, process: "subprocess.Popen[bytes]", terminal: int) -> None:
        self.process, self._terminal = process, terminal
        self.seen = ""

    def type(self, line: str) -> None:
        os.write(self._terminal, line.encode() + b"\n")

    def until(self, text: str) -> str:
        """Everything since the last call, up to and with ``text``."""
        self._read_while(lambda: text not in self.seen)
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def until_anything(self) -> None:
        """Wait for the first word of an answer."""
        self._read_while(lambda: not self.seen.strip())

    def _read_while(self, waiting: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while waiting():
            assert time.monotonic() < deadline, self.seen
            if select.select([self._terminal], [], [], 1)[0]:
                self.seen += os.read(self._terminal, 4096).decode(errors="replace")


@pytest.fixture
def talk(
    request: pytest.FixtureRequest, command_env: dict[str, str], small_model: str
) -> Iterator[Talk]:
    arguments = ["run", small_model, "--backend", "reference", "-q", "--cap", "1GiB"]
    arguments += ["--ignore-eos", "--chat-template", TEMPLATE, *request.param]
    terminal, slave = pty.openpty()
    env = {**command_env, "TERM": "dumb"}
    with subprocess.Popen(
        [sys.executable, "-m", "aegis", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env,
        cwd=Path(small_model).parent,
    ) as process:
        os.close(slave)
        try:
            yield Talk(process, terminal)
        finally:
            process.kill()
            os.close(terminal)


@pytest.mark.parametrize("talk", [["-n", "3", "-c", "256"]], indirect=True)
def test_a_chat_answers_until_exit(talk: Talk) -> None:
    talk.until("> ")
    talk.type("one")
    talk.until("> ")
    talk.type("/clear")
    assert "forgotten" in talk.until("> ")
    talk.type("/exit")
    assert talk.process.wait(30) == 0


@pytest.mark.parametrize("talk", [["-n", "3", "-c", "256"]], indirect=True)
def test_end_of_input_leaves(talk: Talk) -> None:
    talk.until("> ")
    talk.type("\x04")
    assert talk.process.wait(30) == 0


@pytest.mark.parametrize("talk", [["-n", "1500", "-c", "2048"]], indirect=True)
def test_ctrl_c_ends_the_answer_and_not_the_chat(talk: Talk) -> None:
    talk.until("> ")
    talk.type("one two three")
    talk.until("three\r\n")
    talk.until_anything()
    talk.process.send_signal(signal.SIGINT)
    talk.until("(ended by Ctrl-C)")
    talk.until("> ")
    talk.type("/exit")
    assert talk.process.wait(30) == 0


@pytest.mark.parametrize("talk", [["-n", "3", "-c", "256"]], indirect=True)
def test_quiet_says_nothing_before_the_first_line_and_a_mistyped_command_is_no_prompt(
    talk: Talk,
) -> None:
    assert talk.until("> ") == "> "
    talk.type("/quit")
    assert "there is no /quit" in talk.until("> ")


@pytest.mark.parametrize("talk", [["-n", "100", "-c", "32"]], indirect=True)
def test_a_full_context_is_said(talk: Talk) -> None:
    talk.until("> ")
    talk.type("one two three")
    assert "context of 32 tokens is full" in talk.until("/clear forgets the conversation")


@pytest.mark.parametrize("talk", [["-n", "3", "-c", "64"]], indirect=True)
def test_the_oldest_turns_are_left_out_and_that_is_said(talk: Talk) -> None:
    talk.until("> ")
    seen = ""
    for _ in range(12):
        talk.type("one two three four")
        seen += talk.until("> ")
    assert "not fit the context of 64 tokens beside a new answer: left out)" in seen
    assert "error" not in seen


REFUSING = "{% if 'no' in messages[-1].content %}{{ raise_exception('Not that.') }}{% endif %}x"


@pytest.mark.parametrize(
    "talk", [["-n", "3", "-c", "64", "--chat-template", REFUSING]], indirect=True
)
def test_a_template_that_refuses_a_line_does_not_end_the_chat(talk: Talk) -> None:
    talk.until("> ")
    talk.type("no")
    assert "refuses these messages: Not that." in talk.until("> ")
    talk.type("yes")
    assert "error" not in talk.until("> ")


def test_an_answer_has_begun_before_its_first_text_is_seen(small_model: str) -> None:
    """Ctrl-C between the two said that there was none yet."""
    seen: list[str | None] = []
    options = {"max_tokens": 4, "stop": (), "ignore_eos": True, "forced": False}
    with Engine.open(small_model, cap="1GiB", backend="reference", context=64) as engine:
        ids, sampler = engine.tokenizer.encode("one two"), Sampler()
        generate(engine, ids, options, sampler, seen.append, lambda: bool(seen.append(None)))
    assert seen[0] is None
    assert any(seen)
