"""``aegis predict`` as people and scripts meet it, and what a bench says of it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_here import Done
from small_model import linux
from synthetic_tools import SMALL, write_shape

from aegis.bench import runs
from aegis.cli import predictor
from aegis.errors import AegisError
from aegis.predict.cut import Sizes
from aegis.predict.probe import Kernels, Probe
from aegis.synthetic import shipped
from aegis.tiers.virtual_disk import Disk

Aegis = Callable[..., Done]
ROW = {
    *("cap_nbytes", "experts", "feasible", "min_cap_nbytes", "slots", "borrowed_slots"),
    *("slot_nbytes", "tps", "s_per_token", "compute_s", "wait_s", "hit_rate", "late_rate"),
    *("wasted_rate", "read_nbytes_per_token", "disk_busy"),
}
HEAD = {"schema_version", "model", "backend", "depth", "routing", "probes", "rows"}
KERNELS = Kernels(1e-4, 1e-4, 0.0, 1e-5, 2e-4, 1e-3, 1e-4, 5e-5)
PROBE = Probe(KERNELS, Disk(1e9, 5e-5), Sizes(3, 6, 512), own_files=False)


@pytest.fixture
def aegis(in_process: Aegis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Aegis:
    """In this process, with a cache of its own."""
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    return in_process


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Nothing is probed; what would have been."""
    asked: list[tuple[Any, ...]] = []

    def run_probe(*request: Any) -> Probe:
        asked.append(request)
        return PROBE

    monkeypatch.setattr(predictor, "run_probe", run_probe)
    return asked


def test_a_model_is_predicted_and_nothing_of_it_is_left(
    aegis: Aegis, small_model: str, tmp_path: Path
) -> None:
    done = aegis("predict", small_model, "-c", "64", "--cap", "1GiB", "--json")
    assert done.returncode == 0, done.stderr
    assert set(done.json) == HEAD
    assert done.json["depth"] == 32
    [row] = done.json["rows"]
    assert set(row) == ROW
    assert (row["hit_rate"], row["wait_s"]) == (1, 0)
    assert row["tps"] == pytest.approx(1 / row["s_per_token"])
    assert done.json["probes"]["4bit"]["kernels"]["experts_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_every_cap_and_kind_of_experts_is_a_row_of_one_probe_each(
    aegis: Aegis, tmp_path: Path, probes: list[Any]
) -> None:
    shape = write_shape(tmp_path / "shape")
    smallest = aegis("plan", shape, "--json").json["min_cap_nbytes"]
    caps = ",".join(f"{smallest + extra}B" for extra in (-1, 0, 4 << 20, 1 << 30))
    done = aegis("predict", shape, "--cap", caps, "--experts", "4bit,3bit", "--json")
    assert done.returncode == 0, done.stderr
    rows = done.json["rows"]
    assert [row["experts"] for row in rows] == ["4bit"] * 4 + ["3bit"] * 4
    assert [row["feasible"] for row in rows[:4]] == [False, True, True, True]
    assert all(set(row) == ROW for row in rows)
    for kind in (rows[1:4], rows[5:]):
        speeds = [row["tps"] for row in kind]
        assert speeds == sorted(speeds)
        assert kind[-1]["hit_rate"] == 1
    assert rows[1]["read_nbytes_per_token"] > rows[2]["read_nbytes_per_token"] > 0
    assert [settings["experts"] for _, settings, *_ in probes] == ["4bit", "3bit"]
    assert "synthetic:qwen3.6-35b-a3b" in done.json["routing"]


def test_hits_are_those_of_trace_replay(aegis: Aegis, probes: list[Any]) -> None:
    smallest = aegis("plan", "-c", "64", "--json").json["min_cap_nbytes"]
    caps = f"{smallest + (4 << 20)}B,{smallest + (12 << 20)}B"
    options = ("-c", "64", "--guess", "none", "--cap", caps, "--json")
    rows = aegis("predict", *options).json["rows"]
    slots = [row["slots"] + row["borrowed_slots"] for row in rows]
    file = shipped._FOLDER / "smolmoe-135m.trace"
    replay = ("trace", "replay", str(file), "--guess", "none", "--again", "--json")
    found = aegis(*replay, "--slots", ",".join(map(str, slots))).json
    assert found["counted_tokens"] == 128
    assert 0 < rows[0]["hit_rate"] < rows[1]["hit_rate"] < 1
    assert [row["hit_rate"] for row in rows] == [row["hit_share"] for row in found["rows"]]
    for here, there in zip(rows, found["rows"], strict=True):
        reads = here["read_nbytes_per_token"] / here["slot_nbytes"]
        assert reads == pytest.approx(there["reads_per_token"])


def test_a_trace_of_the_model_itself_may_be_given(
    aegis: Aegis, small_model: str, probes: list[Any]
) -> None:
    traced = aegis("trace", small_model, "--tokens", "12", "--cap", "1GiB", "-q", "-c", "64")
    assert traced.returncode == 0, traced.stderr
    done = aegis("predict", small_model, "--trace", "routing.trace", "--cap", "1GiB", "--json")
    assert done.json["routing"] == "the trace in routing.trace"
    other = aegis("predict", "--trace", "routing.trace", "--cap", "1GiB")
    assert other.returncode == 2
    assert "embedded" in other.stderr or "smolmoe" in other.stderr
    assert "record one with 'aegis trace'" in other.stderr


def test_rows_are_a_table_or_csv(aegis: Aegis, small_model: str, probes: list[Any]) -> None:
    options = ("predict", small_model, "--cap", "10MiB,1GiB", "-c", "64")
    head, rule, refused, row, _, *below = aegis(*options, "-q").stdout.splitlines()
    assert head.split("|")[4].strip() == "tok/s"
    assert set(rule) == set("|-:")
    assert "no plan" in refused
    assert "100.0 %" in row
    assert len({len(line) for line in (head, rule, refused, row)}) == 1
    assert below[1].startswith("- routing: ")
    assert "1.00 GB/s and 0.05 ms a read of files of the probe" in below[2]
    table = list(csv.DictReader(aegis(*options, "-o", "csv").stdout.splitlines()))
    assert [line["feasible"] for line in table] == ["False", "True"]
    assert float(table[1]["tps"]) > 0
    assert table[0]["tps"] == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-m", "embedded", "embedded"), "MODEL is given twice"),
        (("nowhere",), "there is no folder nowhere"),
        (("synthetic:nothing",), "there is no shape"),
        (("--cap", "4GiB,5"), "write 5GiB"),
        (("--cap", "4GiB,"), "is not a size"),
        (("--experts", "4bit,5bit"), "'5bit' is not one of"),
        (("--depth", "0"), "--depth"),
        (("--depth", "64", "-c", "64"), "leaves no room in the context of 64 tokens"),
        (("--trace", "nowhere.trace"), "nowhere.trace"),
        (("-o", "sql"), "--output"),
        (("-c", "1000000"), "is outside this model's"),
    ],
)
def test_a_wrong_command_line_exits_2_before_anything_is_probed(
    aegis: Aegis, probes: list[Any], arguments: tuple[str, ...], sentence: str
) -> None:
    done = aegis("predict", *arguments)
    assert (done.returncode, done.stdout, probes) == (2, "", [])
    assert sentence in done.stderr.splitlines()[-1]


def test_what_is_no_trace_is_refused(aegis: Aegis, tmp_path: Path, probes: list[Any]) -> None:
    (tmp_path / "a.trace").write_bytes(b"AEGISTRC")
    done = aegis("predict", "--trace", "a.trace")
    assert (done.returncode, done.stdout, probes) == (1, "", [])
    assert "a.trace is damaged" in done.stderr


def test_where_no_cap_fits_nothing_is_probed_and_it_exits_3(
    aegis: Aegis, small_model: str, probes: list[Any]
) -> None:
    done = aegis("predict", small_model, "--cap", "10MiB,20MiB", "--json")
    assert (done.returncode, probes) == (3, [])
    assert [row["feasible"] for row in done.json["rows"]] == [False, False]
    assert f"the smallest that opens is {done.json['rows'][0]['min_cap_nbytes']}B" in done.stderr


def test_a_probe_that_fails_is_told_in_a_sentence(
    aegis: Aegis, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*request: Any) -> Probe:
        raise AegisError("the probe was ended by signal 9 (out of memory, if it is 9)")

    monkeypatch.setattr(predictor, "run_probe", fails)
    done = aegis("predict", small_model, "--cap", "1GiB")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("error: the probe was ended by signal 9")


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("early", [True, False])
def test_a_signal_leaves_no_file_and_no_process(
    command_env: dict[str, str], tmp_path: Path, number: signal.Signals, early: bool
) -> None:
    """While the small model is written, and while it runs."""
    config = {**SMALL, "text_config": {**SMALL["text_config"], "hidden_size": 1024}}
    shape, cache = write_shape(tmp_path / "shape", config), tmp_path / "cache"
    cache.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "aegis", "predict", shape, "--cap", "1GiB"],
        cwd=tmp_path,
        env={**command_env, "AEGIS_CACHE": str(cache)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        awaited = ".aegis-probe-*" if early else ".aegis-probe-*/store/store.json"
        while not list(cache.glob(awaited)):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        stdout, stderr = process.communicate()
        assert (stdout, stderr) == ("", "")
        assert process.returncode == 128 + number
    assert list(cache.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


BENCH = ("-p", "8", "-n", "4", "-r", "2", "--cap", "1GiB")


def test_a_bench_says_how_wrong_the_prediction_is(
    aegis: Aegis, small_model: str, probes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LOOK_S", 0.02)
    done = aegis("bench", small_model, *BENCH, "--json")
    assert done.returncode == 0, done.stderr
    prompt, token = done.json["rows"]
    assert prompt["predicted"] is None
    said = token["predicted"]
    assert said["error"] == pytest.approx(said["tps"] / token["tps"] - 1)
    assert said["hit_rate"] == 1
    [(_, settings, _, _, depth, _)] = probes
    assert (depth, settings["context"]) == (10, 12)
    shown = aegis("bench", small_model, *BENCH, "--guess-width", "0,6").stdout
    assert shown.count("; predicted ") == 2
    assert len(probes) == 2
    lines = aegis("bench", small_model, *BENCH, "-o", "csv").stdout.splitlines()
    prompt, token = csv.DictReader(lines)
    assert prompt["predicted.error"] == ""
    assert float(token["predicted.error"]) > -1


@pytest.mark.parametrize("option", ["--no-predict", "--no-limits"])
def test_a_bench_can_be_told_not_to_predict(
    option: str, aegis: Aegis, small_model: str, probes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LOOK_S", 0.02)
    done = aegis("bench", small_model, *BENCH, option, "-o", "jsonl")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["predicted"] for line in done.stdout.splitlines()] == [None, None]
    assert probes == []
