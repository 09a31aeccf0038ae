"""``aegis bench`` as people and scripts meet it: rows, formats, endings."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_tools import measured
from command_here import Done
from small_model import linux
from synthetic_tools import write_shape

from aegis import Engine
from aegis.bench import runs
from aegis.bench.measure import Meter, repetition
from aegis.checkpoint.store import Store
from aegis.cli import benching
from aegis.engine.forced import token_stream
from aegis.errors import AegisError

Aegis = Callable[..., Done]
QUICK = ("-p", "8", "-n", "4", "-r", "2", "--no-limits")
ROW = {
    *("cap_nbytes", "experts", "guess_width", "threads", "io_threads", "feasible"),
    *("min_cap_nbytes", "description", "slots", "borrowed_slots", "record_nbytes"),
    *("peak_nbytes", "given_back_nbytes", "test", "tokens", "tps", "tps_sd", "s_per_token"),
    *("split_s", "hit_rate", "late_rate", "wasted_rate", "read_nbytes_per_token", "ttft_s"),
    *("token_s", "disk", "ram", "predicted", "repetitions"),
}
HEAD = {
    *("schema_version", "model", "backend", "prompt_tokens", "generation_tokens"),
    *("repetition_count", "seed", "context", "complete", "rows"),
}


@pytest.fixture
def aegis(in_process: Aegis) -> Aegis:
    """In this process; what it measures is measured in others."""
    return in_process


@pytest.fixture
def smallest(aegis: Aegis, small_model: str) -> int:
    """The smallest cap that opens with the context of QUICK."""
    nbytes: int = aegis("plan", small_model, "-c", "12", "--json").json["min_cap_nbytes"]
    return nbytes


def test_each_cap_has_a_row_for_the_prompts_and_one_for_the_tokens(
    aegis: Aegis, small_model: str, smallest: int
) -> None:
    caps = f"{smallest}B,{smallest - 1}B,1GiB"
    done = aegis("bench", small_model, *QUICK, "--cap", caps, "--json")
    assert done.returncode == 0, done.stderr
    assert "does not fit" in done.stderr
    found = done.json
    assert set(found) == HEAD
    assert (found["model"], found["complete"], found["context"]) == ("small", True, 12)
    fitting = [row for row in found["rows"] if row["feasible"]]
    [refused] = [row for row in found["rows"] if not row["feasible"]]
    assert refused["reason"] == f"the smallest is {smallest}B"
    assert [row["test"] for row in fitting] == ["pp8", "tg4"] * 2
    for row in fitting:
        assert set(row) == ROW
        assert sum(row["split_s"].values()) == pytest.approx(row["s_per_token"])
        assert len(row["repetitions"]) == 2
        assert 0 <= row["disk"]["busy"] <= 1.001
        assert row["disk"]["limit_nbytes_per_s"] is None
        assert row["peak_nbytes"] <= row["cap_nbytes"]
        for one in row["repetitions"]:
            assert sum(one["split_s"].values()) == pytest.approx(one["seconds"])
    small, *_, large = fitting
    assert len(small["ttft_s"]) == 2
    assert small["slots"] < large["slots"]
    assert large["repetitions"][1]["hit_rate"] == 1


def test_hits_are_those_of_a_forced_run(aegis: Aegis, small_model: str) -> None:
    """Exactly: with nothing guessed, the order in which reads end does not matter."""
    smallest = aegis("plan", small_model, "-c", "64", "--json").json["min_cap_nbytes"]
    cap, text, tokens = smallest + (64 << 10), "the sea is wide and the sky", 12
    options = ("--raw", "-c", "64", "--forced", "--seed", "3", "--guess-width", "0")
    ran = aegis("run", small_model, text, *options, "-n", str(tokens), "--cap", f"{cap}B", "--json")
    assert ran.returncode == 0, ran.stderr
    with (
        Engine.open(small_model, cap=cap, context=64, guess_width=0) as engine,
        engine.timing() as timing,
    ):
        ids = engine.tokenizer.encode(text)
        stream = list(islice(token_stream(3, engine.tokenizer.vocab_size), tokens - 1))
        found = repetition(engine, Meter(engine, timing), ids, stream)
    assert found.prompt is not None
    assert found.decoded is not None
    run = ran.json
    assert found.prompt.tokens == run["prompt_tokens"]
    assert found.decoded.counted.hit_rate == run["hit_rate"]
    read = [window.counted.read_nbytes for window in (found.prompt, found.decoded)]
    assert sum(read) == run["read_nbytes"] > 0
    assert read[1] / (tokens - 1) == run["read_nbytes_per_token"]


def test_limits_are_measured_with_the_store_and_the_threads_of_the_run(
    aegis: Aegis, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(runs, "LOOK_S", 0.02)

    def ask(request: dict[str, Any], *rest: Any) -> dict[str, Any]:
        asked.append(request)
        return runs_ask(request, *rest)

    runs_ask = runs.ask
    monkeypatch.setattr(runs, "ask", ask)
    options = ("-p", "4", "-n", "2", "-r", "1", "--cap", "100MiB", "--io-threads", "1")
    found = aegis("bench", small_model, *options, "--threads", "1", "--json").json
    before, _, after = asked
    assert before == after
    assert (before["io_threads"], before["threads"]) == (1, 1)
    prompt, token = found["rows"]
    assert prompt["disk"]["records_per_read"] in before["runs"]
    assert prompt["disk"]["limit_nbytes_per_s"] > 0
    assert token["disk"]["limit_nbytes_per_s"] > 0
    assert token["ram"]["limit_nbytes_per_s"] > 0
    assert token["ram"]["computing_nbytes_per_s"] > token["ram"]["nbytes_per_s"] > 0


def test_every_combination_is_one_line_of_csv(
    aegis: Aegis, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake(monkeypatch, lambda count, found: found["repetitions"].pop())
    options = ("--cap", "1GiB,2GiB", "--guess-width", "0,3", "--threads", "1,2", "-o", "csv", "-q")
    done = aegis("bench", "-m", small_model, *QUICK, *options, "--policy", "lru")
    assert (done.returncode, done.stderr) == (0, "")
    table = list(csv.DictReader(done.stdout.splitlines()))
    assert len(table) == 2 * len(asked) == 16
    names = ("guess_width", "threads", "policy", "context", "io_threads")
    settings = [tuple(one["settings"][name] for name in names) for one in asked]
    assert settings == [
        (width, threads, "lru", 12, 2) for width in (0, 3) for threads in (1, 2) for _ in range(2)
    ]
    assert [one["cap_nbytes"] >> 30 for one in asked] == [1, 2] * 4
    same = {"prompt_tokens": 8, "tokens": 4, "repetitions": 2, "seed": 0}
    assert all(same.items() <= one.items() for one in asked)


def test_random_weights_are_written_with_the_experts_that_are_asked_for(
    aegis: Aegis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = write_shape(tmp_path / "shape")
    asked = fake(monkeypatch, lambda count, found: None)
    done = aegis("bench", shape, *QUICK, "--experts", "4bit,3bit", "--cap", "1GiB", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["experts"] for row in done.json["rows"]] == ["4bit", "4bit", "3bit", "3bit"]
    assert [(one["model"], one["settings"]["experts"]) for one in asked] == [
        (shape, "4bit"),
        (shape, "3bit"),
    ]
    assert done.json["model"] == shape
    assert Store.open(aegis("convert", shape).stdout.strip()).has_3bit


def test_md_is_what_is_printed_without_a_format(aegis: Aegis, small_model: str) -> None:
    done = aegis("bench", small_model, "-p", "5", "-n", "0", "-r", "1", "--no-limits")
    assert done.returncode == 0
    head, rule, row, *rest = done.stdout.splitlines()
    assert head.startswith("| model ")
    assert set(rule) == set("|-:")
    assert " pp5 " in row
    assert "pp5: first token after" in rest[-1]
    assert "no --cap was given" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-p", "0", "-n", "0"), "leave nothing to measure"),
        (("-p", "-1"), "--n-prompt"),
        (("-r", "0"), "--repetitions"),
        (("-c", "11", "-p", "8", "-n", "4"), "more than the context of 11"),
        (("-p", "1000000"), "this model's context ends at"),
        (("--cap", "4GiB,5"), "write 5GiB"),
        (("--cap", "4GiB,"), "is not a size"),
        (("--experts", "4bit,5bit"), "'5bit' is not one of"),
        (("--guess-width", "6,17"), "17 is not in the range"),
        (("--threads", "1,0"), "0 is not in the range"),
        (("--io-threads", "2,"), "'' is not a valid"),
        (("--seed", "-1"), "--seed"),
        (("-o", "sql"), "--output"),
        (("-m", "embedded", "embedded"), "MODEL is given twice"),
        (("nowhere",), "there is no folder nowhere"),
    ],
)
def test_a_wrong_command_line_exits_2_before_anything_is_measured(
    aegis: Aegis,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.setattr(runs, "ask", None)
    done = aegis("bench", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr.splitlines()[-1]


def test_where_no_cap_fits_the_rows_say_so_and_it_exits_3(aegis: Aegis, small_model: str) -> None:
    done = aegis("bench", small_model, *QUICK, "--cap", "10MiB,20MiB", "--json")
    assert done.returncode == 3
    rows = done.json["rows"]
    assert [row["feasible"] for row in rows] == [False, False]
    assert f"the smallest that opens is {rows[0]['min_cap_nbytes']}B" in done.stderr


def test_experts_that_are_not_there_are_told_before_anything_is_measured(
    aegis: Aegis, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "ask", None)
    done = aegis("bench", small_model, *QUICK, "--experts", "4bit,3bit")
    assert done.returncode == 1
    assert "aegis convert" in done.stderr


def fake(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[int, dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Nothing is measured; what the n-th process says may be changed, or an exception comes in
    its place. Returns what they are asked, as it comes."""
    asked: list[dict[str, Any]] = []

    def ask(
        request: dict[str, Any], what: str, tick: Callable[[int], None] = lambda tokens: None
    ) -> dict[str, Any]:
        tick(6)
        asked.append(request)
        found = measured()
        change(len(asked) - 1, found)
        return found

    monkeypatch.setattr(runs, "ask", ask)
    return asked


@pytest.mark.parametrize("exception", [KeyboardInterrupt, AegisError])
def test_what_was_measured_is_kept_whatever_ends_it(
    aegis: Aegis,
    small_model: str,
    monkeypatch: pytest.MonkeyPatch,
    exception: type[BaseException],
) -> None:
    def end(count: int, found: dict[str, Any]) -> None:
        if count == 1:
            raise exception("it ends here")

    fake(monkeypatch, end)
    done = aegis("bench", small_model, *QUICK, "--guess-width", "0,1,2", "--json", "--cap", "1GiB")
    assert done.returncode == (130 if exception is KeyboardInterrupt else 1)
    assert not done.json["complete"]
    assert [row["guess_width"] for row in done.json["rows"]] == [0, 0]


def test_a_process_above_its_cap_is_shown_and_exits_4(
    aegis: Aegis, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, lambda count, found: found.update(peak_nbytes=2 << 30))
    done = aegis("bench", small_model, *QUICK, "--cap", "1GiB", "--json")
    assert done.returncode == 4
    assert done.json["complete"]
    assert len(done.json["rows"]) == 2


def test_the_sentence_and_the_exit_code_of_a_process_are_ours(small_model: str) -> None:
    request = {"model": small_model, "cap_nbytes": 1, "settings": {"context": 12}}
    sizes = {"prompt_tokens": 8, "tokens": 4, "repetitions": 1, "seed": 0}
    with pytest.raises(AegisError, match="does not fit the cap of 1 B") as refused:
        runs.ask(request | sizes, "a run")
    assert refused.value.exit_code == 3
    with pytest.raises(AegisError, match="a run ended with 1: KeyError"):
        runs.ask({}, "a run")


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("import os; os.kill(os.getpid(), 9)", "a run was ended by signal 9 (out of memory, if"),
        ("import sys; sys.exit(3)", "a run ended with 3"),
        ("print('{}')", "a run ended with 0"),
        ("raise OSError('no disk')", "a run ended with 1: OSError: no disk"),
    ],
)
def test_a_process_that_dies_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, sentence: str
) -> None:
    monkeypatch.setattr(runs, "WORKER", stand_in(monkeypatch, tmp_path, program))
    with pytest.raises(AegisError) as told:
        runs.ask({}, "a run")
    assert str(told.value).startswith(sentence)


def test_what_a_library_prints_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = """print('hello'); print('{"done": 3}'); print('{"done": 9}'); print('{"a": 1}')"""
    monkeypatch.setattr(runs, "WORKER", stand_in(monkeypatch, tmp_path, program))
    done: list[int] = []
    assert runs.ask({}, "a run", done.append) == {"a": 1}
    assert done == [3, 9]


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> str:
    """A module that takes the worker's place."""
    (folder / "stand_in_for_worker.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return "stand_in_for_worker"


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_all_it_has_begun(
    command_env: dict[str, str], small_model: str, tmp_path: Path, number: signal.Signals
) -> None:
    options = (*QUICK[:4], "--no-limits", "-r", "2", "--threads", "1", "-o", "jsonl")
    arguments = ["bench", small_model, *options, "--cap", "1GiB,2GiB..900GiB:1GiB"]
    with subprocess.Popen(
        [sys.executable, "-m", "aegis", *arguments, "-q"],
        cwd=tmp_path,
        env=command_env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        kept = [json.loads(process.stdout.readline())]
        process.send_signal(number)
        kept += [json.loads(line) for line in process.stdout]
        assert process.stderr.read() == ""
        assert process.wait() == 128 + number
    assert [row["test"] for row in kept[:1]] == ["pp8"]
    # Nothing of it is left: its group is empty.
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_bar_is_cleared_before_a_row_is_printed(
    aegis: Aegis, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("aegis.cli.progress.tell", lambda text, end: said.append(text + end))

    class Rows:
        def row(self, row: dict[str, Any]) -> None:
            said.append("a row")

        def end(self, complete: bool) -> None:
            assert complete

    monkeypatch.setattr(benching, "open_format", lambda *arguments: Rows())

    class Bar(benching.ProgressBar):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._on = True

    fake(monkeypatch, lambda count, found: None)
    monkeypatch.setattr(benching, "ProgressBar", Bar)
    done = aegis("bench", small_model, *QUICK, "--guess-width", "0,1", "-o", "jsonl")
    assert done.returncode == 0
    bars = [text for text in said if "measuring" in text]
    assert "12 %" in bars[0]
    assert "62 %" in bars[-1]
    for before, after in pairwise(said):
        assert after != "a row" or before in ("a row", "\r\x1b[K")
