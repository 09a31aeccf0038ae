"""The cap holds: the kernel's own accounting of the real command line in a memory cgroup."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cgroup
import pytest
from small_model import needs_native

from aegis.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
GOLDEN: dict[str, Any] = json.loads((ROOT / "goldens/smolmoe-135m/golden.json").read_text())
MIB = 1 << 20
CONTEXT = 1024
PROMPT_TOKENS = 700
GENERATED = 200
FAULTS_AFTER_FIRST_TOKEN = 50
"""Pages, of some 35,000 that a run at the smallest cap touches."""

pytestmark = needs_native


@dataclass(frozen=True)
class Cli:
    """The command line of a cold interpreter with a converted store and a long prompt."""

    python: cgroup.ColdPython
    env: dict[str, str]
    prompt: Path

    def command(self, verb: str, *args: str) -> list[str]:
        """aegis with the context of these tests."""
        return [*self.python.command, "-P", "-m", "aegis", verb, "-c", str(CONTEXT), *args]

    def generate(self, cap: int, *args: str) -> list[str]:
        """The long prompt and 200 tokens under a cap."""
        prompt = ["-f", str(self.prompt), "--raw", "--ignore-eos", "-n", str(GENERATED)]
        return self.command("run", *prompt, "--cap", f"{cap}B", "-q", *args)

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run without a group."""
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def cli(cold_python: cgroup.ColdPython, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    folder = tmp_path_factory.mktemp("capped")
    env = {**cold_python.env, "AEGIS_CACHE": str(folder / "cache")}
    prompt = folder / "prompt.txt"
    prompt.write_text(_prompt())
    cli = Cli(cold_python, env, prompt)
    first = cli.run(cli.command("run", "--cap", "1GiB", "-n", "1", "-p", "Hi"))
    assert first.returncode == 0, first.stderr
    return cli


def _prompt() -> str:
    """Text of exactly 700 tokens."""
    from aegis.convert.cache import embedded_path

    tokenizer = Tokenizer.open(embedded_path())
    ids = GOLDEN["perplexity"]["ids"]
    for end in range(PROMPT_TOKENS, len(ids)):
        text = tokenizer.decode(ids[end - PROMPT_TOKENS : end])
        if len(tokenizer.encode(text)) == PROMPT_TOKENS:
            return text
    raise AssertionError("no stretch of the text encodes to as many tokens again")


@pytest.fixture(scope="module")
def smallest_cap(cli: Cli) -> int:
    """What ``aegis plan --json`` states."""
    plan = json.loads(cli.run(cli.command("plan", "--json", "--cap", "1GiB")).stdout)
    return int(plan["min_cap_nbytes"])


@pytest.mark.parametrize("above", [0, 6 * MIB, 48 * MIB])
def test_the_kernel_never_has_to_kill_and_hardly_to_reread(
    cli: Cli, smallest_cap: int, above: int
) -> None:
    cap = smallest_cap + above
    result = cgroup.run(cli.generate(cap), cap, env=cli.env)
    assert result.rc == 0, result.stderr
    assert result.oom_kills == 0
    assert result.faults_after_first_output <= FAULTS_AFTER_FIRST_TOKEN


@pytest.mark.parametrize("above", [0, 48 * MIB])
def test_the_peak_without_a_limit_is_below_the_cap(cli: Cli, smallest_cap: int, above: int) -> None:
    cap = smallest_cap + above
    result = cgroup.run(cli.generate(cap, "--json"), None, env=cli.env)
    assert result.rc == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["prompt_tokens"] == PROMPT_TOKENS
    assert report["generation_tokens"] == GENERATED
    assert result.peak_nbytes <= cap
    assert report["peak_nbytes"] <= cap


def test_sampling_among_all_tokens_stays_below_the_cap(cli: Cli, smallest_cap: int) -> None:
    drawn = ["--temp", "2", "--top-p", "0.999999", "--repeat-penalty", "1.1", "--seed", "1"]
    command = cli.generate(smallest_cap, "--json", "-n", "20", *drawn)
    result = cgroup.run(command, None, env=cli.env)
    assert result.rc == 0, result.stderr
    assert result.peak_nbytes <= smallest_cap


@pytest.mark.parametrize("nbytes", [100_000, 10_000_000])
def test_a_prompt_far_too_long_is_refused_inside_the_cap(
    cli: Cli, smallest_cap: int, nbytes: int
) -> None:
    command = cli.command("run", "--cap", f"{smallest_cap}B", "-q")
    text = "The quick brown fox jumps. "
    prompt = text * (nbytes // len(text))
    result = cgroup.run(command, smallest_cap, env=cli.env, stdin=prompt)
    assert (result.rc, result.oom_kills) == (2, 0), result.stderr


LONG = """
import sys
from aegis import Engine, generate
from aegis.errors import UsageError
text = "The quick brown fox jumps. " * 200_000
with Engine.open(cap=int(sys.argv[1]), context=1024) as engine:
    for prompt in (text, [{"role": "user", "content": text}]):
        try:
            generate(engine, engine.tokenizer, prompt)
        except UsageError as error:
            print("do not fit the context" in str(error))
"""


def test_a_prompt_far_too_long_is_refused_inside_the_cap_in_python_too(
    cli: Cli, smallest_cap: int
) -> None:
    # The text itself is the caller's, so it has to find room beside the cap.
    cap = smallest_cap + 8 * MIB
    command = [*cli.python.command, "-P", "-c", LONG, str(smallest_cap)]
    result = cgroup.run(command, cap, env=cli.env)
    assert (result.rc, result.oom_kills) == (0, 0), result.stderr
    assert result.stdout.split() == ["True", "True"]


def test_the_tokens_are_the_same_at_every_cap(cli: Cli, smallest_cap: int) -> None:
    runs = [
        json.loads(cli.run(cli.generate(smallest_cap + above, "--json")).stdout)
        for above in (0, 4 * MIB, 64 * MIB)
    ]
    assert runs[0]["token_ids"] == runs[1]["token_ids"] == runs[2]["token_ids"]


def test_comparing_two_models_stays_inside_the_cap_of_one(cli: Cli, smallest_cap: int) -> None:
    both = ["-n", "40", "--stride", "16", "-q", "--json", "--cap", f"{smallest_cap}B"]
    command = cli.command("eval", "--activations-b", "f32", *both)
    result = cgroup.run(command, smallest_cap, env=cli.env)
    assert (result.rc, result.oom_kills) == (0, 0), result.stderr
    free = cgroup.run(command, None, env=cli.env)
    assert free.rc == 0, free.stderr
    found = json.loads(free.stdout)
    assert found["kl"]["most"] == 0
    assert max(free.peak_nbytes, found["b"]["peak_nbytes"]) <= smallest_cap


def test_converting_on_first_use_stays_inside_the_cap(
    cli: Cli, smallest_cap: int, tmp_path: Path
) -> None:
    env = {**cli.env, "AEGIS_CACHE": str(tmp_path)}
    result = cgroup.run(cli.generate(smallest_cap, "-n", "4"), smallest_cap, env=env)
    assert result.rc == 0, result.stderr
    assert result.oom_kills == 0
    assert list(tmp_path.iterdir())


def test_one_byte_under_the_smallest_cap_is_refused_before_anything_is_read(
    cli: Cli, smallest_cap: int, tmp_path: Path
) -> None:
    env = {**cli.env, "AEGIS_CACHE": str(tmp_path / "cache")}
    command = cli.generate(smallest_cap - 1)
    refused = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert refused.returncode == 3
    assert f"{smallest_cap}B" in refused.stderr
    assert not (tmp_path / "cache").exists()


def test_the_embedded_model_opens_at_160_mib(cli: Cli) -> None:
    command = [*cli.python.command, "-P", "-m", "aegis", "run", "-c", "512", "--cap", "160MiB"]
    result = cgroup.run([*command, "-n", "32", "-q", "-p", "Hello"], 160 * MIB, env=cli.env)
    assert result.rc == 0, result.stderr
    assert result.oom_kills == 0


PEAK = """
import sys
from aegis import Engine, plan
from aegis.engine.memory import peak_nbytes

cap = plan(cap="4GiB", backend=sys.argv[1], context=128).min_cap_nbytes
with Engine.open(cap=cap, backend=sys.argv[1], context=128) as engine:
    list(engine.generate(range(100, 200), max_tokens=4, ignore_eos=True))
    engine.nll(range(100, 200))
print(peak_nbytes() - cap)
"""


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_every_backend_stays_below_its_smallest_cap(cli: Cli, backend: str) -> None:
    command = [*cli.python.command, "-P", "-c", PEAK, backend]
    done = cli.run(command)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 0
