"""Rows say what was measured, in every format the same."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest

from aegis.bench.formats import NAMES, Format, open_format
from aegis.bench.rows import PARTS, refused, rows_of
from aegis.bench.runs import Configuration, Limits, configurations, run_records
from aegis.planner import MemoryPlan

CONFIG = Configuration(1 << 30, "4bit", 6, None, 2)
LIMITS = Limits({1: 2e9, 4: 3e9}, 2e10)
HEAD = {"schema_version": 1, "model": "small", "backend": "native"}


def plan(feasible: bool = True) -> MemoryPlan:
    return MemoryPlan(
        cap_nbytes=1 << 30,
        feasible=feasible,
        items=(),
        slots=20,
        staging_slots=8,
        slot_nbytes=1 << 16,
        prefill_step=64,
        embedding="ram",
        min_cap_nbytes=(1 << 30) + (0 if feasible else 4096),
        load_peak_nbytes=0,
    )


def printed(name: str, rows: list[dict[str, Any]], complete: bool = True) -> str:
    lines: list[str] = []
    shown: Format = open_format(name, HEAD, (), lines.append)
    for row in rows:
        shown.row(row)
    shown.end(complete)
    return "\n".join(lines)


@pytest.fixture
def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    return rows_of(CONFIG, plan(), found, LIMITS)


def test_a_row_is_the_mean_over_repetitions(rows: list[dict[str, Any]]) -> None:
    prompts, tokens = rows
    assert (prompts["test"], tokens["test"]) == ("pp8", "tg4")
    assert (prompts["tps"], tokens["tps"]) == (6.0, 3.0)
    assert tokens["tps_sd"] == pytest.approx(2**0.5)
    assert prompts["ttft_s"] == [2.0, 1.0]
    assert tokens["ttft_s"] is None
    assert tokens["token_s"] == {"median": 0.375, "p90": 0.5, "most": 0.5}
    # Sums are divided: a repetition of many choices weighs more than one of few.
    assert tokens["hit_rate"] == 24 / 32
    assert (tokens["late_rate"], tokens["wasted_rate"]) == (1 / 8, 1 / 4)
    assert tokens["read_nbytes_per_token"] == 2 * (1 << 20) / 8
    for row in rows:
        assert sum(row["split_s"].values()) == pytest.approx(row["s_per_token"])
        assert set(row["split_s"]) == set(PARTS)


def test_what_is_reached_stands_beside_what_could_be(rows: list[dict[str, Any]]) -> None:
    prompts, tokens = rows
    assert run_records(plan()) == 4
    assert prompts["disk"]["limit_nbytes_per_s"] == 3e9
    assert tokens["disk"] == {
        "nbytes_per_s": 2 * (1 << 20) / 3,
        "busy": 0.5,
        "busy_nbytes_per_s": 4 * (1 << 20) / 3,
        "limit_nbytes_per_s": 2e9,
        "records_per_read": 1,
    }
    assert prompts["ram"] is None
    assert tokens["ram"]["nbytes_per_s"] == 3e8 * 8 / 3
    assert tokens["ram"]["limit_nbytes_per_s"] == 2e10
    computing = (0.125 + 0.25 + 0.0625 + 0.03125) * 3 / 8
    assert tokens["ram"]["computing_nbytes_per_s"] == pytest.approx(3e8 / computing)


def test_without_limits_and_without_reads_they_are_null(found: dict[str, Any]) -> None:
    for one in found["repetitions"]:
        one["decoded"] |= {"read_nbytes": 0, "busy_s": 0.0}
    [_, tokens] = rows_of(CONFIG, plan(), found, None)
    assert tokens["disk"]["busy_nbytes_per_s"] is None
    assert tokens["disk"]["limit_nbytes_per_s"] is None
    assert tokens["ram"]["limit_nbytes_per_s"] is None


def test_where_blocks_have_no_clock_md_says_nothing_of_them(found: dict[str, Any]) -> None:
    for one in found["repetitions"]:
        for window in one.values():
            for name in ("attention", "experts", "head", "router"):
                window["split_s"][name] = None
    rows = rows_of(CONFIG, plan(), found, Limits({1: 2e9, 4: 3e9}, None))
    assert rows[1]["ram"]["computing_nbytes_per_s"] is None
    line = printed("md", rows).splitlines()[3]
    assert line.count(" - |") == 3


def test_md_is_a_table_whose_lines_are_as_long_as_its_head(rows: list[dict[str, Any]]) -> None:
    text = printed("md", [*rows, refused(CONFIG, plan(False), 2)])
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 5
    assert len({line.count("|") for line in table}) == 1
    assert len({len(line) for line in table}) == 1
    assert "3.00 ± 1.41" in table[3]
    assert "does not fit" in table[4]
    assert "width 6, pp8: first token after 2.00 s, 1.00 s; hits 75.0 %, 75.0 %" in text


def test_csv_and_jsonl_have_the_numbers_of_json(rows: list[dict[str, Any]]) -> None:
    rows = [refused(CONFIG, plan(False), 2), *rows]
    document = json.loads(printed("json", rows, complete=False))
    assert document == {**HEAD, "complete": False, "rows": rows}
    lines = [json.loads(line) for line in printed("jsonl", rows).splitlines()]
    assert lines == [{**HEAD, **row} for row in rows]
    table = list(csv.DictReader(printed("csv", rows).splitlines()))
    assert len(table) == 3
    for line, row in zip(table, rows, strict=True):
        for name, text in line.items():
            value: Any = {**HEAD, **row}
            for part in name.split("."):
                value = None if value is None else value.get(part)
            assert text == ("" if value is None else str(value))
    flat = {name.split(".")[0] for name in table[0]}
    assert flat == ({*HEAD} | {*rows[0]} | {*rows[1]}) - {"ttft_s", "repetitions"}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_measured_is_nothing_printed(name: str) -> None:
    assert printed(name, [], complete=False) == ""


def test_columns_that_do_not_differ_are_left_out(rows: list[dict[str, Any]]) -> None:
    lines: list[str] = []
    shown = open_format("md", HEAD, ("threads",), lines.append)
    shown.row(rows[0])
    assert "threads" in lines[0]
    assert " io " not in lines[0]


@pytest.mark.parametrize(
    ("backend", "shown"),
    [("mlx", {"queue ms", "device ms"}), ("native", {"compute ms", "router ms"})],
)
def test_where_a_tokens_time_goes_is_shown_as_far_as_the_backend_can_tell(
    rows: list[dict[str, Any]], backend: str, shown: set[str]
) -> None:
    lines: list[str] = []
    table = open_format("md", HEAD | {"backend": backend}, (), lines.append)
    for row in rows:
        table.row(row)
    names = [cell.strip() for cell in lines[0].split("|")]
    clocks = {"queue ms", "device ms", "compute ms", "router ms"}
    assert clocks & set(names) == shown
    assert {line.count("|") for line in lines} == {len(names) - 1}


def test_each_configuration_comes_once_and_curves_one_by_one() -> None:
    found = configurations([2, 1, 2], ["4bit", "3bit"], [0, 6], [None], [2])
    assert len(found) == len(set(found)) == 8
    assert [config.cap_nbytes for config in found] == [2, 1] * 4
    assert [config.experts for config in found] == ["4bit"] * 4 + ["3bit"] * 4
