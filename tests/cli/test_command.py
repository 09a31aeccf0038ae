"""The command as people and scripts meet it: streams, exit codes and JSON objects."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from strategies import write_checkpoint

Aegis = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--backend", "reference", "-c", "64", "--cap", "1GiB")


def test_help_lists_every_verb(aegis: Aegis) -> None:
    done = aegis("--help")
    assert done.returncode == 0
    verbs = ("run", "plan", "sweep", "bench", "pull", "convert", "list", "show", "rm", "verify")
    for verb in (*verbs, "eval", "predict"):
        assert f"  {verb} " in done.stdout
        told = aegis(verb, "--help")
        assert told.returncode == 0
        assert "None" not in told.stdout


def test_plan_loads_no_array_library(command_env: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; from aegis.cli.app import _guarded; "
        "rc = _guarded(['plan', '--cap', '1GiB', '-q']); "
        "sys.exit(rc or bool({'numpy', 'tokenizers', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=command_env,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_plan_prints_a_table_and_writes_nothing(aegis: Aegis, command_env: dict[str, str]) -> None:
    before = sorted(Path(command_env["AEGIS_CACHE"]).iterdir())
    done = aegis("plan", "--cap", "1GiB", "-c", "512")
    assert done.returncode == 0
    assert "hot tier" in done.stdout
    assert "free" in done.stderr
    assert sorted(Path(command_env["AEGIS_CACHE"]).iterdir()) == before


def test_a_plan_that_does_not_fit_exits_3_and_names_the_smallest_cap(aegis: Aegis) -> None:
    done = aegis("plan", "--cap", "10MiB", "--json")
    plan = json.loads(done.stdout)
    assert (done.returncode, plan["feasible"]) == (3, False)
    assert f"{plan['min_cap_nbytes']}B" in done.stderr
    smallest = plan["min_cap_nbytes"]
    assert aegis("plan", "--cap", f"{smallest}B").returncode == 0
    refused = aegis("run", "--cap", f"{smallest - 1}B", "hello")
    assert (refused.returncode, refused.stdout) == (3, "")


def test_without_a_cap_the_choice_is_printed(aegis: Aegis) -> None:
    assert "no --cap was given" in aegis("plan", "-c", "64").stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("plan", "--cap", "4"), "write 4GiB"),
        (("plan", "nowhere"), "or ORG/NAME of a model on the Hugging Face hub"),
        (("run", "synthetic:x", "hi"), "there is no shape"),
        (("run", "--kv-format", "q8", "hi"), "kv-format"),
        (("run", "--guess-width", "17", "hi"), "guess-width"),
        (("run", "--temp", "-1", "hi"), "temperature"),
        (("plan", "--cap", "1GiB..2GiB"), "one size"),
        (("plan", "-c", "999999"), "context"),
        (("plan", "--embedding", "disk", "--cap", "1GiB"), "tied"),
        (("nonsense",), "No such command"),
        (("plan", ""), "MODEL is empty"),
        (("run", "-m", "", "hi"), "MODEL is empty"),
        (("run", ""), "the prompt is empty"),
        (("run", "-p", ""), "the prompt is empty"),
        (("run", "--raw", "--system-prompt", "Be kind.", "hi"), "--system-prompt would be"),
        (("sweep", "--raw", "--chat-template", "x", "hi"), "--chat-template would be"),
    ],
)
def test_usage_errors_exit_2_with_one_sentence(
    aegis: Aegis, arguments: tuple[str, ...], sentence: str
) -> None:
    done = aegis(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert sentence in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run --temperature 1", "there is no option --temperature; here it is called --temp, see"),
        ("run --max-kv-size 9", "here it is called --ctx-size, see aegis run --help"),
        ("run -t 4", "there is no option -t; here it is called --threads, see"),
        ("plan --ctx_size 9", "here it is called --ctx-size, see aegis plan --help"),
        ("plan --temperature 1", "there is no option --temperature; see aegis plan --help"),
        ("run --ctx 9", "perhaps --ctx-size is meant, see aegis run --help"),
        ("run --expert 3bit", "perhaps --experts is meant, see aegis run --help"),
        ("run -c 4k", "'4k' is not a valid whole number; see aegis run --help"),
    ],
)
def test_an_option_that_there_is_not_names_the_one_that_is_meant(
    aegis: Aegis, arguments: str, sentence: str
) -> None:
    done = aegis(*arguments.split())
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert sentence in line


def test_each_verb_says_what_its_cap_may_be(aegis: Aegis) -> None:
    cap = {verb: aegis(verb, "--help").stdout.partition("--cap ")[2] for verb in ("plan", "sweep")}
    assert "HIGH" not in cap["plan"].partition("--ctx-size")[0]
    assert "half of the free" not in cap["sweep"].partition("--ctx-size")[0]


def test_run_prints_only_the_text_on_stdout(aegis: Aegis, small_model: str) -> None:
    done = aegis("run", small_model, "one two", "--raw", "-n", "6", "--ignore-eos", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert "memory plan" in done.stderr
    assert "hit rate" in done.stderr
    assert f"{Path(small_model).name}: reference (" in done.stderr
    assert "sample" not in done.stderr
    quiet = aegis("run", small_model, "one two", "--raw", "-n", "6", "--ignore-eos", "-q", *SMALL)
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_without_a_prompt_or_a_terminal_the_sample_is_named(aegis: Aegis, small_model: str) -> None:
    done = aegis("run", "-m", small_model, "--raw", "-n", "2", *SMALL)
    assert done.returncode == 0
    assert "a sample is answered: What is a mixture of experts?" in done.stderr


def test_json_is_one_object_with_every_figure(aegis: Aegis, small_model: str) -> None:
    done = aegis(
        "run", small_model, "one two", "--raw", "-n", "6", "--ignore-eos", "--json", *SMALL
    )
    result = json.loads(done.stdout)
    assert set(result) == {
        *("schema_version", "model", "backend", "plan", "prompt_tokens", "generation_tokens"),
        *("token_ids", "text", "finish_reason", "prompt_tps", "generation_tps", "ttft_s"),
        *("peak_nbytes", "hit_rate", "read_nbytes", "read_nbytes_per_token", "wait_s"),
        "given_back",
    }
    assert result["generation_tokens"] == len(result["token_ids"]) == 6
    assert (result["backend"], result["finish_reason"]) == ("reference", "length")
    assert result["plan"]["cap_nbytes"] == 1 << 30
    assert result["read_nbytes"] > 0


def test_piped_text_is_the_prompt(aegis: Aegis, small_model: str) -> None:
    options = (*SMALL, "--raw", "-n", "3", "--ignore-eos", "--json", "-m", small_model)
    piped = json.loads(aegis("run", *options, stdin="one two\n").stdout)
    given = json.loads(aegis("run", *options, "-p", "one two").stdout)
    assert piped["token_ids"] == given["token_ids"]


@pytest.mark.parametrize("wrong", [("--stop", ""), ("--temp", "-1"), ("--top-p", "0")])
def test_settings_that_mean_nothing_are_refused_before_a_model_is_opened(
    aegis: Aegis, small_model: str, wrong: tuple[str, str]
) -> None:
    done = aegis("run", small_model, "one", "--raw", "--cap", "1MiB", *wrong)
    assert done.returncode == 2  # with exit code 3 the plan would have been made first
    assert "plan" not in done.stderr


def test_verbose_adds_the_ledger(aegis: Aegis, small_model: str) -> None:
    done = aegis("run", small_model, "one", "--raw", "-n", "1", "-v", *SMALL)
    ledger = done.stderr[done.stderr.index("ledger") :].splitlines()
    assert ledger[0].split() == ["ledger", "planned", "measured"]
    rows = {line.split("  ")[0] for line in ledger[1:]}
    assert {"runtime", "resident weights", "KV cache", "slots", "total"} <= rows
    assert not any(" 0 B" in line for line in ledger)


def test_a_model_without_a_chat_template_says_to_use_raw(aegis: Aegis, small_model: str) -> None:
    done = aegis("run", small_model, "one two", "-n", "1", *SMALL)
    assert done.returncode == 1
    assert "--raw" in done.stderr
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    given = aegis("run", small_model, "one", "-n", "1", "--chat-template", template, *SMALL)
    assert given.returncode == 0, given.stderr


def test_a_prompt_longer_than_the_context_names_the_number_needed(
    aegis: Aegis, small_model: str
) -> None:
    done = aegis("run", small_model, "one two " * 100, "--raw", *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert "context of 64" in done.stderr


def test_a_sweep_has_a_row_per_cap_and_says_that_they_are_identical(
    aegis: Aegis, small_model: str
) -> None:
    common = ("-p", "one two", "--raw", "-n", "4", "--ignore-eos", "-m", small_model)
    fixed = ("--backend", "reference", "-c", "64")
    done = aegis("sweep", *common, *fixed, "--cap", "1MiB..1025MiB:512MiB", "--json")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert [row["feasible"] for row in table["rows"]] == [False, True, True]
    assert table["identical"] is True
    text = aegis("run", *common, *fixed, "--cap", "513MiB..1025MiB:512MiB")
    assert text.stdout.count("yes") == 2, text.stderr


def test_a_sweep_runs_the_prompt_that_a_run_would(
    aegis: Aegis, small_model: str, tmp_path: Path
) -> None:
    """Ends of lines count where they were typed, and a folder may be called like a home."""
    (tmp_path / "~m").symlink_to(small_model)
    common = ("-m", "./~m", "-p", "\n", "--raw", "-n", "1", "--backend", "reference", "-c", "64")
    tokens = [
        json.loads(aegis(verb, *common, "--cap", "1GiB", "--json").stdout)["prompt_tokens"]
        for verb in ("run", "sweep")
    ]
    assert tokens == [1, 1]


def test_a_sweep_where_nothing_fits_exits_3(aegis: Aegis) -> None:
    done = aegis("sweep", "hello", "--cap", "1MiB..2MiB:1MiB")
    assert done.returncode == 3
    assert "no cap fits" in done.stderr


def test_convert_prints_the_store_and_verify_finds_damage(
    aegis: Aegis, small_model: str, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    made = aegis("convert", small_model, str(store), "--experts", "3bit", "--json")
    assert json.loads(made.stdout)["experts"] == ["4bit", "3bit"], made.stderr
    whole = aegis("verify", str(store))
    assert (whole.returncode, "all as written" in whole.stdout) == (0, True)
    record = next((store / "experts").iterdir())
    data = bytearray(record.read_bytes())
    data[100] ^= 1
    record.write_bytes(data)
    damaged = aegis("verify", str(store), "--json")
    assert (damaged.returncode, json.loads(damaged.stdout)["ok"]) == (1, False)
    assert "convert the model again" in damaged.stderr


def test_a_plain_checkpoint_is_quantised_into_a_store_that_runs(
    aegis: Aegis, tmp_path: Path
) -> None:
    plain = str(write_checkpoint(tmp_path / "plain", dense=True))
    made = aegis("convert", plain, "store", "--experts", "3bit", "--json")
    assert json.loads(made.stdout)["experts"] == ["4bit", "3bit"], made.stderr
    assert "the numbers of plain become 4-bit codes in groups of 64; --bits 8" in made.stderr
    done = aegis("run", "store", "one", "--raw", "-n", "4", "--ignore-eos", "-q", *SMALL)
    assert done.returncode == 0, done.stderr
    other = aegis("convert", plain, "store", "--bits", "4", "--group-size", "32")
    assert (other.returncode, "another checkpoint or layout" in other.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bits", "none", "--group-size", "32"], "goes with --bits"),
        (["store", "--group-size", "32"], "goes with --bits"),
        (["store", "--bits", "7"], "'7' is not one of"),
    ],
)
def test_a_quantisation_that_is_half_said_is_wrong_usage(
    aegis: Aegis, small_model: str, arguments: list[str], words: str
) -> None:
    done = aegis("convert", small_model, *arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_a_damaged_expert_ends_a_run_in_one_sentence(
    aegis: Aegis, small_model: str, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    aegis("convert", small_model, str(store))
    for file in (store / "experts").iterdir():
        data = bytearray(file.read_bytes())
        data[100::4096] = bytes(byte ^ 1 for byte in data[100::4096])
        file.write_bytes(data)
    for prompt in ("one two three", "one"):
        done = aegis("run", str(store), prompt, "--raw", "-n", "6", "--ignore-eos", "-q", *SMALL)
        assert (done.returncode, done.stdout) == (1, "")
        [sentence] = done.stderr.strip().splitlines()
        assert sentence.startswith(f"error: {store / 'experts' / 'layer_00'}")
        assert "is damaged (checksum mismatch); convert the model again" in sentence


def test_the_embedded_model_converts_into_a_folder_of_ones_own(
    aegis: Aegis, tmp_path: Path
) -> None:
    made = aegis("convert", "--output", "mine")
    assert (made.returncode, made.stdout) == (0, f"{tmp_path / 'mine'}\n")
    assert aegis("verify", "mine").returncode == 0
    twice = aegis("convert", "mine", "other", "-o", "third")
    assert (twice.returncode, "given twice" in twice.stderr) == (2, True)


def test_verify_of_what_was_never_converted_names_the_command(aegis: Aegis, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = aegis("verify", str(tmp_path / "model"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")


def test_a_reader_that_leaves_early_ends_it_quietly(
    command_env: dict[str, str], tmp_path: Path
) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "aegis", "plan", "--cap", "1GiB", "-q"],
            stdout=write,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=command_env,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupted_answer_exits_130_without_a_traceback(
    command_env: dict[str, str], small_model: str, tmp_path: Path
) -> None:
    arguments = ["run", small_model, "one two", "--raw", "--ignore-eos", "-q", "-n", "1500"]
    with subprocess.Popen(
        [sys.executable, "-m", "aegis", *arguments, *SMALL, "-c", "2048"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=command_env,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == b""
    assert process.returncode == 130


@pytest.mark.parametrize("redirect", [">&-", ">&- 2>&-", "2>&-", ">/dev/full", "2>/dev/full"])
def test_streams_that_are_closed_or_full_are_no_reason_for_a_traceback(
    command_env: dict[str, str], tmp_path: Path, redirect: str
) -> None:
    line = f'"{sys.executable}" -m aegis plan --cap 1GiB {redirect}'
    done = subprocess.run(
        ["sh", "-c", line],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=command_env,
        check=False,
    )
    assert done.returncode == int(redirect == ">/dev/full")  # Without stderr nothing is lost.
    assert "Traceback" not in done.stderr
    if redirect == ">/dev/full":
        assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_prompt_beyond_any_context_is_refused_before_it_is_read_whole(
    aegis: Aegis, small_model: str
) -> None:
    done = aegis("run", "-m", small_model, "--raw", *SMALL, stdin="x" * (64 * 128 + 1))
    assert (done.returncode, done.stdout) == (2, "")
    assert "more than 8192 bytes" in done.stderr.splitlines()[-1]
