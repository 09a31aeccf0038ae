"""``aegis eval`` as people and scripts meet it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_server import CommandServer
from stores import edit_json

from aegis import Engine
from aegis.convert.convert import convert
from aegis.engine.evaluate import likelihood

SMALL = ("--backend", "reference", "-c", "16", "--cap", "1GiB")
TEXT = "one two three four five six seven eight nine ten " * 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    with CommandServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a cache that these tests share."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "text").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def store(small_model: str, folder: Path) -> str:
    return str(convert(small_model, folder / "store", experts3bit=True).path)


def test_one_model_gives_its_perplexity(server: CommandServer, store: str, folder: Path) -> None:
    text = str(folder / "text")
    done = server.run("eval", store, "--text", text, "--stride", "5", "--json", *SMALL)
    assert (done.code, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "A: store: reference" in done.stderr
    found = json.loads(done.stdout)
    with Engine.open(store, cap="1GiB", backend="reference", context=16) as engine:
        ids = engine.tokenizer.encode(TEXT)
        expected = likelihood(engine, ids, 5)
    assert found["a"]["perplexity"] == pytest.approx(expected.perplexity)
    assert found["a"]["mean_nll"] == pytest.approx(math.log(found["a"]["perplexity"]))
    assert found["a"]["plan"]["cap_nbytes"] >= found["a"]["peak_nbytes"] > 0
    assert (found["b"], "kl" in found) == (None, False)
    assert [found[name] for name in ("text", "tokens", "context", "stride")] == [
        text,
        len(ids),
        16,
        5,
    ]
    shown = server.run("eval", store, "--text", text, "--stride", "5", "-q", *SMALL)
    assert (shown.code, shown.stderr) == (0, "")
    assert f"perplexity {expected.perplexity:.4f}" in shown.stdout
    assert f"{len(ids)} tokens of {text} in windows of 16, each 5 behind" in shown.stdout


def test_3bit_experts_are_compared_with_4bit_ones(
    server: CommandServer, store: str, folder: Path
) -> None:
    common = ("--text", str(folder / "text"), "-q", *SMALL)
    found = json.loads(server.run("eval", store, "--experts-b", "3bit", "--json", *common).stdout)
    assert [found[side]["experts"] for side in "ab"] == ["4bit", "3bit"]
    assert found["a"]["perplexity"] != found["b"]["perplexity"]
    assert 0 < found["kl"]["median"] <= found["kl"]["p90"] <= found["kl"]["p99"]
    assert found["kl"]["p99"] <= found["kl"]["most"]
    assert 0 < found["top1"] <= 1
    assert 0 < found["top20"] < 1
    both = json.loads(
        server.run("eval", store, store, "--experts", "3bit", "--json", *common).stdout
    )
    assert both["a"]["perplexity"] == found["b"]["perplexity"]
    assert (both["kl"]["most"], both["top1"]) == (0, 1)
    shown = server.run("eval", store, "--experts-b", "3bit", *common)
    assert f"mean {found['kl']['mean']:.4f}" in shown.stdout
    assert f"top-1 the same at {100 * found['top1']:.2f} %" in shown.stdout


def test_tokens_bounds_what_is_taken_of_a_text(
    server: CommandServer, store: str, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    # Cut behind so many bytes, in the middle of a character.
    text.write_bytes(b"a" + "é".encode() * 100_000)
    done = server.run("eval", store, "--text", str(text), "-n", "3", "--json", "-q", *SMALL)
    assert json.loads(done.stdout)["tokens"] == 3, done.stderr


def test_what_cannot_be_evaluated_is_refused_with_a_sentence(
    server: CommandServer, store: str, small_model: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    text = folder / "text"
    cases: list[tuple[tuple[object, ...], int, str]] = [
        ((store, "--text", tmp_path / "empty"), 2, "the text has 0 tokens; give one of at least 2"),
        ((store, "--text", tmp_path / "binary"), 2, "binary cannot be read as UTF-8"),
        ((store, "--text", text, "--stride", "17"), 2, "a stride of 17 tokens"),
        ((tmp_path / "none", "--text", text), 2, "there is no folder"),
        ((store, tmp_path / "none", "--text", text), 2, "there is no folder"),
        ((small_model, "--experts", "3bit"), 1, "no 3-bit experts yet; make them with"),
        ((store, "--cap", "1MiB"), 3, "the smallest cap"),
        ((store, "--cap", "1GiB..2GiB"), 2, "one size"),
        (
            (store, "-c", "16", "-n", "999999999999", "--text", "/dev/zero"),
            2,
            "more than the cap leaves",
        ),
    ]
    for arguments, code, words in cases:
        done = server.run("eval", *SMALL, *arguments, "-q", AEGIS_CACHE=folder / "cache")
        assert (done.code, done.stdout, words in done.sentence) == (code, "", True), done


def test_models_whose_tokens_are_not_the_same_are_refused(
    server: CommandServer, store: str, small_model: str, folder: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(small_model, tmp_path / "other"))

    def swap(data: dict[str, dict[str, dict[str, int]]]) -> None:
        vocab = data["model"]["vocab"]
        first, second = (token for token in vocab if token in ("o", "n"))
        vocab[first], vocab[second] = vocab[second], vocab[first]

    edit_json(other / "tokenizer.json", swap)
    common = ("-q", "--text", folder / "text", *SMALL)
    done = server.run("eval", store, other, *common, AEGIS_CACHE=tmp_path / "cache")
    assert (done.code, "have different tokenizers" in done.sentence) == (2, True)
    assert not (tmp_path / "cache").exists()


def test_ctrl_c_ends_it_and_leaves_nothing(store: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT * 200)
    command = [sys.executable, "-m", "aegis", "eval", store, "--experts-b", "3bit", "-n", "9000"]
    env = {**os.environ, "PYTHONSAFEPATH": "1", "AEGIS_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(
        [*command, "--text", str(text), *SMALL],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("A: store")
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
    assert process.returncode == 130
    assert sorted(tmp_path.iterdir()) == [text]
