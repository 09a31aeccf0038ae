"""The commands on a model of the hub, as people use them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from command_here import Done
from fake_hub import REPO, FakeHub, Fault, Handler, Repo, breaks_off

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.store import Store
from aegis.cli import predictor
from aegis.convert.convert import convert
from aegis.convert.three_bit import add_3bit
from aegis.engine.sources import Source
from aegis.predict.cut import Sizes
from aegis.predict.probe import Kernels, Probe
from aegis.tiers.virtual_disk import Disk

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
PLAIN = "org/plain"
WEIGHTS = "model.safetensors"
SMALL = ("--backend", "native", "-c", "64", "--cap", "1GiB")
RUN = ("one two", "--raw", "-n", "4", "--ignore-eos", *SMALL)

Aegis = Callable[..., Done]


def cached(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_model_is_pulled_once_and_then_everything_works_without_a_network(
    here: FakeHub, aegis: Aegis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pulled = aegis("pull", REPO)
    assert pulled.returncode == 0, pulled.stderr
    store = Path(pulled.stdout.strip())
    assert store.parent == tmp_path / "aegis"
    assert f"downloading {REPO}, 636.3 KiB, into {tmp_path}/hf/hub; converting" in pulled.stderr
    here.asked.clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    first = aegis("run", REPO, *RUN, "--json", "-q")
    assert (first.returncode, first.stderr) == (0, "")
    assert first.json["model"] == REPO
    shutil.rmtree(tmp_path / "hf")
    again = aegis("run", REPO, *RUN, "--json", "-q")
    assert again.json["token_ids"] == first.json["token_ids"]
    assert aegis("verify", REPO).returncode == 0
    assert aegis("plan", REPO, *SMALL).returncode == 0
    assert aegis("convert", REPO).stdout == pulled.stdout
    swept = aegis("sweep", REPO, *RUN, "--json", "-q")
    assert (swept.json["identical"], swept.json["model"]) == (True, REPO)
    assert here.asked == []


def test_pull_asks_for_what_is_newest_and_run_does_not(here: FakeHub, aegis: Aegis) -> None:
    first = aegis("pull", REPO, "-q").stdout
    assert aegis("pull", REPO, "-q").stdout == first
    repo = here.repos[REPO]
    config = json.loads(repo.files["config.json"]) | {"rope_theta": 5e5}
    old = Repo(repo.files, commit="a" * 40)
    here.repos[REPO] = Repo(
        {**repo.files, "config.json": json.dumps(config).encode()}, commit="b" * 40
    )
    here.asked.clear()
    here.sent.clear()
    assert aegis("run", REPO, *RUN, "-q").returncode == 0
    assert here.asked == []
    pulled = aegis("pull", REPO)
    assert pulled.stdout != first
    assert f"{first.strip()} (" in pulled.stderr
    assert "is an older store of that name; aegis rm removes it" in pulled.stderr
    assert here.sent["model.safetensors"] <= 100_000  # The same content has the same blob.
    here.repos[REPO] = Repo(repo.files, commit="b" * 40, refs={"v1": old.commit})
    assert aegis("pull", REPO, "--revision", "v1", "-q").stdout == first
    assert aegis("run", f"{REPO}@v1", *RUN, "-q").returncode == 0


def test_a_plain_model_is_pulled_and_quantised(here: FakeHub, aegis: Aegis, tmp_path: Path) -> None:
    here.repos[PLAIN] = Repo.of(GOLDENS / "qwen3_moe" / "hf_bf16")
    assert f"the numbers of {PLAIN} become 4-bit codes" in aegis("plan", PLAIN, *SMALL).stderr
    first = aegis("pull", PLAIN)
    assert f"the numbers of {PLAIN} become 4-bit codes in groups of 64; --bits 8" in first.stderr
    options = ("--bits", "4", "--experts", "3bit", "--json", "-q")
    pulled = aegis("pull", PLAIN, *options).json
    assert first.stdout == f"{pulled['store']}\n"
    # 3-bit experts come from the numbers, though the store has codes.
    spec, folder = QuantSpec(4, 64), GOLDENS / "qwen3_moe" / "hf_bf16"
    made = convert(folder, tmp_path / "made", quantize=spec, experts3bit=True)
    assert Store.open(pulled["store"]).expert_checksums("3bit") == made.expert_checksums("3bit")
    coded = add_3bit(convert(folder, tmp_path / "coded", quantize=spec).path)
    assert coded.expert_checksums("3bit") != made.expert_checksums("3bit")
    assert pulled["experts"] == ["4bit", "3bit"]
    shown = aegis("show", PLAIN, "--json").json
    assert shown["path"] == pulled["store"]
    assert shown["experts"] == dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "4bit")
    assert (shown["repo"], shown["has_3bit"]) == (PLAIN, True)
    here.sent.clear()
    again = aegis("pull", PLAIN, *options).json
    assert again == pulled
    assert "tokenizer.json" not in here.sent
    assert len(cached(tmp_path / "aegis")) == 1
    here.asked.clear()
    ran = aegis("run", PLAIN, *RUN)
    assert (ran.returncode, "the numbers of" in ran.stderr) == (0, False)
    assert aegis("run", PLAIN, *RUN, "-q", "--experts", "3bit").returncode == 0
    assert here.asked == []
    kept = aegis("pull", PLAIN, "--bits", "none")
    assert (kept.returncode, "the numbers of" in kept.stderr) == (0, False)
    assert "older store" not in kept.stderr
    assert aegis("show", PLAIN, "--json").json["experts"]["gate_proj"] == "bf16"
    for bits, experts in (("none", "bf16"), ("4", "4bit")):
        here.asked.clear()
        assert aegis("run", PLAIN, *RUN, "-q", "--bits", bits).returncode == 0
        assert here.asked == []
        pulled = aegis("pull", PLAIN, "-q", "--bits", bits).stdout.strip()
        assert aegis("show", pulled, "--json").json["experts"]["gate_proj"] == experts
    assert len(cached(tmp_path / "aegis")) == 2


def test_a_plain_folder_is_quantised_when_it_is_first_run(here: FakeHub, aegis: Aegis) -> None:
    folder = str(GOLDENS / "qwen3_moe" / "hf_bf16")
    said = "become 4-bit codes in groups of 64; --bits 8 makes others, --bits none keeps them\n"
    assert aegis("run", folder, *RUN, "-q").stderr == ""
    assert said not in aegis("run", folder, *RUN).stderr
    assert aegis("rm", folder, "-y", "-q").returncode == 0
    assert aegis("run", folder, *RUN).stderr.count(said) == 1
    kept = aegis("run", folder, *RUN, "--bits", "none")
    assert (kept.returncode, said in kept.stderr) == (0, False)
    swept = aegis("sweep", folder, *RUN, "--bits", "8", "--json")
    assert swept.returncode == 0, swept.stderr
    assert aegis("verify", folder).returncode == 0


def test_predict_reads_headers_alone(
    here: FakeHub, aegis: Aegis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[Source] = []

    def run_probe(source: Source, *request: object) -> Probe:
        sources.append(source)
        return Probe(Kernels(*(1e-4 for _ in range(7))), Disk(1e9), Sizes(3, 6, 512), False)

    monkeypatch.setattr(predictor, "run_probe", run_probe)
    done = aegis("predict", REPO, *SMALL, "--json", "-q")
    assert done.returncode == 0, done.stderr
    assert (done.json["model"], done.json["rows"][0]["hit_rate"]) == (REPO, 1)
    assert here.sent[WEIGHTS] <= 100_000 < len(here.repos[REPO].files[WEIGHTS])
    assert [source.missing_nbytes is not None for source in sources] == [True]
    assert cached(tmp_path / "aegis") == []


def test_plan_and_show_say_what_a_download_would_take(
    here: FakeHub, aegis: Aegis, tmp_path: Path
) -> None:
    planned = aegis("plan", REPO, *SMALL)
    assert planned.returncode == 0
    assert "hot tier" in planned.stdout
    assert f"{REPO} is not here yet: 636.3 KiB to download" in planned.stderr
    shown = aegis("show", REPO)
    for line in (
        "hub           not downloaded yet: 636.3 KiB",
        "experts       8 in a layer, 4 for",
    ):
        assert line in shown.stdout
    assert "smallest cap" in shown.stdout
    assert cached(tmp_path / "hf") == cached(tmp_path / "aegis") == []


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("run", "and/or", "-q"), 1, "no model on http"),
        (("pull", "and/or"), 1, "no model on http"),
        (("run", "and/or", "is it?"), 1, "no model on http"),
        (("sweep", "and/or", "-q"), 1, "no model on http"),
        (("verify", REPO), 1, f"has not been converted; run aegis pull {REPO} first"),
        (("pull", "24/7"), 2, "24/7 is not the name of a model on the hub; give ORG/NAME"),
        (("pull", REPO, "--revision", "../x"), 2, "is not the name of a model on the hub"),
        (("pull", REPO, "--group-size", "32"), 2, "--group-size goes with --bits"),
        (("plan", f"{REPO}@v9", "-q"), 1, "has no revision v9; give a branch"),
        (("run", REPO, *RUN, "--experts", "3bit"), 1, f"aegis convert --experts 3bit {REPO}"),
        (("run", REPO, "hi", "-q", "--cap", "1MiB"), 3, "the smallest"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    here: FakeHub,
    aegis: Aegis,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    sentence: str,
) -> None:
    done = aegis(*arguments)
    assert (done.returncode, done.stdout.count("\n") <= 1) == (code, True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert sentence in last
    lone = arguments[:2] in (("run", "and/or"), ("sweep", "and/or")) and len(arguments) == 3
    hint = last.endswith("; if it is the prompt, give it with -p")
    assert hint == (lone and arguments[2] == "-q")
    assert cached(tmp_path / "hf") == []


def cut_off_then_silent(reached: threading.Event) -> Fault:
    """The weights break off after 300,000 bytes; who comes back for the rest gets no answer."""
    cut = breaks_off(300_000, 1)

    def fault(handler: Handler, file: str) -> bool:
        if file != "model.safetensors" or handler.headers["Range"] == "bytes=0-99999":
            return False
        if not cut(handler, file):
            reached.set()
            handler.rfile.read(1)
        return True

    return fault


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_download_that_is_ended_goes_on_with_the_next_command(
    here: FakeHub, aegis: Aegis, tmp_path: Path, number: int
) -> None:
    reached = threading.Event()
    here.fault = cut_off_then_silent(reached)
    with subprocess.Popen(
        [sys.executable, "-m", "aegis", "pull", REPO],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        if not reached.wait(300):
            process.kill()
            pytest.fail(f"no second request came: {process.communicate()}")
        # As a terminal does it: to the whole group. Killed, it is the command alone.
        kill = os.kill if number == signal.SIGKILL else os.killpg
        kill(process.pid, number)
        stdout, stderr = process.communicate()
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert stdout == ""
    assert "Traceback" not in stderr
    listed = aegis("list")
    assert f"of an unfinished download; aegis pull {REPO} goes on with it" in listed.stderr
    [partial] = (tmp_path / "hf").rglob("*.incomplete")
    kept = partial.stat().st_size
    assert 300_000 - (64 << 10) <= kept <= 300_000
    here.fault = None
    here.sent.clear()
    pulled = aegis("pull", REPO)
    assert pulled.returncode == 0, pulled.stderr
    assert here.sent["model.safetensors"] == 100_000 + 618_995 - kept
    assert not partial.exists()


def test_two_commands_pull_one_download_and_one_store(hub: FakeHub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aegis", "pull", REPO, "-q"]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    results = [(*process.communicate(), process.returncode) for process in both]
    assert results[0] == results[1]
    assert results[0][1:] == (b"", 0)
    assert hub.sent["model.safetensors"] == 2 * 100_000 + 618_995
    assert len(cached(tmp_path / "aegis")) == 1


def test_list_show_and_rm_are_about_the_same_stores(
    here: FakeHub, aegis: Aegis, tmp_path: Path
) -> None:
    assert aegis("list").stdout == ""
    store = Path(aegis("pull", REPO, "-q").stdout.strip())
    (tmp_path / "aegis" / ".left-il16-v2-0123456789ab.partial-1-aaaaaaaa").mkdir()
    listed = aegis("list")
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert rows[1][:2] == ["left", "-"]
    assert rows[2][:4] == [REPO, "qwen2_moe", "4bit", "il16"]
    assert rows[2][-2:] == ["ready", store.name]
    assert f"(hf cache rm model/{REPO})" in listed.stderr
    left, found = aegis("list", "--json").json["stores"]
    assert (left["state"], left["model"]) == ("unfinished", "left")
    assert (found["repo"], found["revisions"], found["commit"]) == (REPO, ["main"], "a" * 40)
    shown = aegis("show", store.name)
    assert f"store         {store}" in shown.stdout
    assert aegis("show", REPO, "--json").json["nbytes"] == found["nbytes"]
    refused = aegis("rm", REPO)
    assert (refused.returncode, store.is_dir()) == (2, True)
    assert "add --yes to delete without asking" in refused.stderr
    removed = aegis("rm", REPO, "left", "--yes", "--json").json
    assert removed["freed_nbytes"] == found["nbytes"] + left["nbytes"]
    assert str(store) in removed["deleted"]
    assert cached(tmp_path / "aegis") == []
    assert (tmp_path / "hf" / "hub").is_dir()
    assert "has no store of" in aegis("rm", REPO, "-y").stderr


@pytest.mark.parametrize(("answer", "goes"), [("y", True), ("n", False), ("", False)])
def test_rm_asks_on_a_terminal(here: FakeHub, aegis: Aegis, answer: str, goes: bool) -> None:
    store = Path(aegis("pull", REPO, "-q").stdout.strip())
    terminal, end = os.openpty()
    os.write(terminal, f"{answer}\n".encode())
    done = subprocess.run(
        [sys.executable, "-m", "aegis", "rm", REPO],
        stdin=end,
        stdout=end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(end)
    os.close(terminal)
    assert "delete this, " in done.stderr
    assert (done.returncode, store.exists()) == (0 if goes else 1, not goes)


def test_a_bar_is_drawn_on_a_terminal_only(hub: FakeHub) -> None:
    terminal, end = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "aegis", "pull", REPO], stderr=end, stdout=subprocess.PIPE
    ) as process:
        os.close(end)
        said = b""
        while piece := _read(terminal):
            said += piece
        process.communicate()
    os.close(terminal)
    assert b"downloading [" in said
    assert b"converting [##############################] 100 %" in said


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
