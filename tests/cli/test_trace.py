"""``aegis trace`` and ``synthetic:`` as people meet them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_here import Done
from synthetic_tools import write_shape

from aegis.synthetic.shipped import shipped_trace
from aegis.tiers.trace import RoutingTrace

Aegis = Callable[..., Done]
OPTIONS = ("--cap", "1GiB", "-c", "64")


@pytest.fixture
def aegis(in_process: Aegis) -> Aegis:
    """In this process: what is new here is no matter of processes."""
    return in_process


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shape(tmp_path_factory.mktemp("shape"))


def test_a_synthetic_model_is_planned_written_run_swept_and_verified(
    aegis: Aegis, shape: str, command_env: dict[str, str], tmp_path: Path
) -> None:
    cache = Path(command_env["AEGIS_CACHE"])
    before = set(cache.iterdir())
    assert aegis("verify", shape).returncode == 1
    planned = json.loads(aegis("plan", shape, *OPTIONS, "--json").stdout)
    assert set(cache.iterdir()) == before
    done = aegis("run", shape, "hello", *OPTIONS, "--forced", "-n", "9", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["plan"]["items"] == planned["items"]
    assert (result["model"], result["finish_reason"]) == (shape, "length")
    assert len(result["token_ids"]) == 9
    [store] = set(cache.iterdir()) - before
    assert aegis("convert", shape).stdout == f"{store}\n"
    assert "all as written" in aegis("verify", shape).stdout
    lows = json.loads(aegis("plan", shape, "-c", "64", "--json").stdout)["min_cap_nbytes"]
    # More slots than are wanted are not planned, so a few KiB make the difference.
    caps = f"{lows}B..{lows + (1 << 20)}B:512KiB"
    arguments = ("sweep", shape, "hello", "--forced", "-n", "9", "--json", "-c", "64")
    swept = aegis(*arguments, "--cap", caps)
    assert swept.returncode == 0, swept.stderr
    found = json.loads(swept.stdout)
    assert found["identical"]
    assert len({row["slots"] for row in found["rows"]}) > 1
    evidence = {(row["nll"], row["logits_digest"]) for row in found["rows"]}
    assert evidence == {(result["nll"], result["logits_digest"])}
    other = json.loads(aegis(*arguments, "--cap", f"{lows}B", "--seed", "1").stdout)["rows"][0]
    assert other["logits_digest"] != result["logits_digest"]
    elsewhere = tmp_path / "store"
    assert aegis("convert", f"{shape}@3", str(elsewhere)).returncode == 0
    assert aegis("convert", f"{shape}@3", str(elsewhere), "--experts", "3bit").returncode == 0
    assert "all as written" in aegis("verify", str(elsewhere)).stdout
    done = aegis("run", shape, "hello", *OPTIONS, "--experts", "3bit", "-n", "2", "-q")
    assert done.returncode == 0, done.stderr


def test_a_cap_that_is_too_small_is_refused_before_anything_is_written(
    aegis: Aegis, shape: str, command_env: dict[str, str]
) -> None:
    cache = Path(command_env["AEGIS_CACHE"])
    before = set(cache.iterdir())
    done = aegis("run", f"{shape}@99", "hello", "--cap", "10MiB")
    assert (done.returncode, set(cache.iterdir())) == (3, before)


def test_a_trace_is_written_and_shown(aegis: Aegis, shape: str, tmp_path: Path) -> None:
    arguments = ("trace", shape, "--tokens", "24", *OPTIONS, "--slots", "30,90")
    done = aegis(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "wrote routing.trace" in done.stderr
    assert (found["tokens"], found["layers"], found["experts"]) == (24, 8, 64)
    assert [hit["slots"] for hit in found["hits"]] == [30, 90]
    assert found["published"] is None
    trace = RoutingTrace.load(tmp_path / "routing.trace")
    assert trace.shape == (24, 8, 4)
    shown = aegis("trace", "show", "routing.trace", "--slots", "30,90", "--json")
    assert json.loads(shown.stdout) == found
    table = aegis("trace", "show", "routing.trace").stdout
    assert "experts guessed right one layer ahead" in table
    assert "published" not in table
    again = aegis(*arguments, "-o", "again.trace", "-q")
    assert (again.returncode, again.stderr) == (0, "")
    assert (tmp_path / "again.trace").read_bytes() == (tmp_path / "routing.trace").read_bytes()


def test_the_prompt_and_its_answer_are_recorded(aegis: Aegis, shape: str, tmp_path: Path) -> None:
    prompted = aegis("trace", shape, "-n", "3", "--ignore-eos", *OPTIONS, "hello", "--json")
    assert prompted.returncode == 0, prompted.stderr
    tokens = json.loads(prompted.stdout)["tokens"]
    ran = aegis("run", shape, "-n", "3", "--ignore-eos", *OPTIONS, "hello", "--json", "-q")
    assert tokens == json.loads(ran.stdout)["prompt_tokens"] + 3


def test_a_trace_is_replayed_with_slots_guesses_and_a_disk_of_any_kind(
    aegis: Aegis, tmp_path: Path
) -> None:
    trace = shipped_trace("embedded")
    assert trace is not None
    trace.save("small.trace")
    done = aegis("trace", "replay", "small.trace", "--slots", "60,120", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["tokens"], found["counted_tokens"], found["policy"]) == (128, 96, "lfu")
    few, many = found["rows"]
    assert (few["slots"], many["slots"]) == (60, 120)
    for row in (few, many):
        assert row["unguessed_hit_share"] <= row["belady_hit_share"] <= 1
        assert row["unguessed_hit_share"] < row["hit_share"] <= 1
        assert "tokens_per_s" not in row
    assert few["belady_hit_share"] < many["belady_hit_share"]
    timing = ("--disk", "1GiB/s", "--record", "64KiB", "--compute", "5")
    slow = ("trace", "replay", "small.trace", "--slots", "60", "--guess", "none", *timing)
    timed = json.loads(aegis(*slow, "--policy", "lru", "--json").stdout)
    [row] = timed["rows"]
    assert (timed["policy"], timed["disk_nbytes_per_s"], timed["compute_ms"]) == ("lru", 1 << 30, 5)
    assert row["hit_share"] == row["unguessed_hit_share"]
    assert row["tokens_per_s"] <= row["bound_tokens_per_s"] <= row["belady_bound_tokens_per_s"]
    assert row["belady_bound_tokens_per_s"] <= 200.001
    assert 0 < row["wait_share"] < 1
    table = aegis(*slow).stdout.splitlines()
    assert len(table) == 3
    assert "64 KiB an expert from a disk of 1 GiB/s" in table[0]
    assert table[1].split()[:4] == ["slots", "hits", "unguessed", "Belady"]
    assert len(aegis("trace", "replay", "small.trace").stdout.splitlines()) == 6


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("trace", "show"), 2, "the file of one trace"),
        (("trace", "replay"), 2, "replay takes the file of one trace"),
        (("trace", "replay", "gone"), 1, "gone cannot be read (No such file or directory)"),
        (("trace", "replay", "x", "--tokens", "5"), 2, "writes none"),
        (("trace", "--disk", "2GiB/s", "hello"), 2, "--disk goes with 'aegis trace replay FILE'"),
        (("trace", "replay", "x", "--disk", "fast"), 2, "'fast' is not a size"),
        (("trace", "replay", "x", "--disk", "2GiB/s"), 2, "give --record"),
        (("trace", "replay", "x", "--record", "2MiB"), 2, "say nothing without --disk"),
        (("trace", "show", "gone"), 1, "gone cannot be read (No such file or directory)"),
        (("trace", "show", "x.json"), 1, "x.json is not a trace of aegis"),
        (("trace", "--tokens", "5", "hello"), 2, "--tokens takes the place of a prompt"),
        (("trace", "--slots", "none", "hello"), 2, "numbers of slots"),
        (("trace", "--tokens", "65", "-c", "64", "--cap", "1GiB", "-q"), 2, "65 tokens do not fit"),
        (("trace", "-o", "gone/trace", "hello"), 2, "there is no folder"),
        (("run", "--forced", "--temp", "1", "hello"), 2, "--temp would be ignored"),
        (("run", "--forced", "--stop", "x", "hello"), 2, "--stop would be ignored"),
        (("convert", "synthetic:olmoe-1b-7b", "s", "--bits", "4"), 2, "no numbers to quantise"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: tuple[str, ...], code: int, sentence: str, aegis: Aegis, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text("{}")
    done = aegis(*arguments)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("\n") <= 3
