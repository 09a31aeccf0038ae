"""aegis beside llama.cpp: the same weights, tokens, memory and threads, by turns.

    python -P tools/compare_llama.py STORE MODEL.gguf --llama CLONE [--cap 4GiB] [--rounds 3]

MODEL.gguf is what tools/export_gguf.py made of STORE; CLONE is llama.cpp's source folder with a
native build of libllama in CLONE/build. A seeded stream of tokens goes through both engines: first
a prompt, then one token after another. Each run has a process and a memory cgroup of its own, whose
limit is the cap (page cache included), and begins with the file of the other's weights and its own
out of the page cache. llama.cpp maps its file there and does not repack, since its defaults take
the whole model's size and are killed; the disk's read-ahead is set for that meanwhile. "resident"
is without a limit and with everything in memory. Printed are medians of the rounds, their ratios,
and how many of the experts chosen are the same. Needs root, for cgroup and read-ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.store import Store
from aegis.engine.forced import token_stream
from aegis.planner import format_size, parse_size

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

import cgroup  # noqa: E402 - it lies among the tests

Ids = NDArray[np.int32]
WARM_UP = 8
"""Decoded tokens that are not counted."""
DRIVER = ROOT / "tools" / "llama_driver.cpp"
WORKER = ROOT / "tools" / "compare_worker.py"


@dataclass
class Case:
    """What is run: the sizes of one comparison."""

    store: Path
    gguf: Path
    driver: Path
    ids: Path
    prompt: int
    tokens: int
    threads: int
    context: int


@dataclass
class Run:
    """What one process said."""

    prompt_tps: float
    decode_tps: float
    said: dict[str, Any]
    charged_nbytes: int


@dataclass
class Runs:
    """The rounds of one engine at one setting."""

    name: str
    runs: list[Run] = field(default_factory=list)
    failure: str = ""

    def prompt(self) -> float:
        """Tokens per second of the prompt, median."""
        return median(run.prompt_tps for run in self.runs)

    def decode(self) -> float:
        """The same of decoded tokens."""
        return median(run.decode_tps for run in self.runs)

    def line(self) -> str:
        """For the table."""
        if not self.runs:
            return f"{self.name:36} {self.failure}"
        charged = format_size(max(run.charged_nbytes for run in self.runs))
        each = " ".join(f"{run.decode_tps:.2f}" for run in self.runs)
        prompts = " ".join(f"{run.prompt_tps:.1f}" for run in self.runs)
        return (
            f"{self.name:36} {self.decode():8.2f} {self.prompt():10.1f} {charged:>12}"
            f"   decode {each}; prompt {prompts}"
        )


def build(llama: Path, folder: Path) -> Path:
    """The driver, linked to libllama of a clone."""
    libraries = sorted((llama / "build").rglob("libllama.so"))
    if not libraries:
        raise SystemExit(
            f"error: {llama / 'build'} has no libllama.so; give a clone with a native build"
        )
    where = libraries[0].parent
    includes = [f"-I{llama / place}" for place in ("include", "ggml/include")]
    libs = [f"-L{where}", f"-Wl,-rpath,{where}", "-lllama", "-lggml", "-lggml-base"]
    target = folder / "llama_driver"
    command = ["g++", "-O2", "-std=c++17", *includes, str(DRIVER), "-o", str(target), *libs]
    subprocess.run(command, check=True)
    return target


def forget(*places: Path) -> None:
    """Take files out of the page cache."""
    for place in places:
        for path in [place] if place.is_file() else place.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


def queue_of(path: Path) -> Path:
    """Where the kernel keeps the read-ahead of the disk that a file lies on."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    places = (folder / "queue/read_ahead_kb" for folder in (device, device.parent))
    return next((place for place in places if place.exists()), Path("/nowhere"))


@contextlib.contextmanager
def read_ahead(path: Path, kib: int) -> Iterator[None]:
    """With so much read ahead of a file's disk; 0 leaves it. As it was afterwards."""
    place = queue_of(path)
    if not kib:
        yield
        return
    if not os.access(place, os.W_OK):
        raise SystemExit(f"error: {place} cannot be written; run as root, or with --read-ahead 0")
    before = place.read_text()
    place.write_text(str(kib))
    try:
        yield
    finally:
        place.write_text(before)


def measured(case: Case, command: Sequence[str], limit: int | None) -> Run | str:
    """One process in a group of its own; or how it failed."""
    forget(case.gguf, case.store)
    done = cgroup.run(command, limit, cold=False)
    if done.rc:
        killed = done.oom_kills or done.rc in (-9, 137)
        return "killed for memory" if killed else f"failed: {done.stderr.strip()[-300:]}"
    said = json.loads(done.stdout.splitlines()[-1])
    counted = said["token_s"][min(WARM_UP, len(said["token_s"]) - 1) :]
    prompt = case.prompt / said["prompt_s"] if case.prompt else 0.0
    return Run(prompt, len(counted) / sum(counted), said, done.peak_nbytes)


def aegis_command(case: Case, cap: int, *files: Path) -> list[str]:
    """What runs aegis."""
    given = [case.store, case.ids, case.prompt, cap, case.context, case.threads, *files]
    return [sys.executable, "-P", str(WORKER), *map(str, given)]


def llama_command(case: Case, repack: bool, **more: object) -> list[str]:
    """What runs llama.cpp: mapped, with its tensors repacked or not."""
    keys: dict[str, object] = {"prompt": case.prompt, "context": case.context}
    keys["threads"] = case.threads
    keys |= {"mmap": 1, "repack": int(repack), **more}
    given = [f"{key}={value}" for key, value in keys.items()]
    return [str(case.driver), str(case.gguf), str(case.ids), *given]


def take_turns(case: Case, limit: int | None, commands: dict[str, list[str]], rounds: int) -> None:
    """Run every command once a round, and print a table; then ratios to the first."""
    found = {name: Runs(name) for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            if found[name].failure:
                continue
            run = measured(case, command, limit)
            if isinstance(run, str):
                found[name].failure = run
            else:
                found[name].runs.append(run)
                _tell(name, run)
    print(f"{'':36} {'decode/s':>8} {'prompt/s':>10} {'charged':>12}")
    for runs in found.values():
        print(runs.line(), flush=True)
    ours, *others = found.values()
    for other in others:
        if ours.runs and other.runs:
            decode, prompt = ours.decode() / other.decode(), ours.prompt() / other.prompt()
            print(f"aegis / {other.name}: decode {decode:.2f}, prompt {prompt:.2f}", flush=True)


def _tell(name: str, run: Run) -> None:
    rate = run.said.get("hit_rate")
    hits = "" if rate is None else f", hits {rate:.1%}, {run.said['slots']} slots"
    print(
        f"  {name}: decode {run.decode_tps:.2f}/s, prompt {run.prompt_tps:.1f}/s{hits}",
        file=sys.stderr,
        flush=True,
    )


def shared(a: Ids, b: Ids) -> NDArray[np.float64]:
    """Of what a token chose in a layer by one, how much it chose by the other: [tokens, layers]."""
    found: NDArray[np.float64] = (a[..., :, None] == b[..., None, :]).any(axis=-1).mean(axis=-1)
    return found


def agreement(case: Case, folder: Path, cap: int) -> None:
    """Print how many of the experts that both engines chose are the same, and how far logits are
    apart; of every decoded token."""
    ours, theirs = folder / "ours", folder / "theirs"
    logits = folder / "our_logits", folder / "their_logits"
    subprocess.run(aegis_command(case, cap, ours, logits[0]), check=True, stdout=subprocess.DEVNULL)
    more = {"experts": theirs, "logits": logits[1]}
    subprocess.run(llama_command(case, False, **more), check=True, stdout=subprocess.DEVNULL)
    layout = Store.open(case.store).layout
    chosen = int(layout.config.int("num_experts_per_tok"))
    shape = (case.tokens, len(layout.moe_layers), chosen)
    a, b = (np.fromfile(path, np.int32).reshape(shape) for path in (ours, theirs))
    same = shared(a, b)
    x, y = (np.fromfile(path, np.float32).reshape(case.tokens, -1) for path in logits)
    greedy = (x.argmax(axis=1) == y.argmax(axis=1)).mean()
    apart = float(np.sqrt(((x - y) ** 2).mean() / x.var()))
    print(
        f"experts: {same.mean():.1%} of those chosen are the same"
        f" ({same[:, 0].mean():.1%} in the first layer, {same[:, -1].mean():.1%} in the last),"
        f" of {case.tokens} tokens, {shape[1]} layers, {chosen} each; most likely token the same:"
        f" {greedy:.1%}; logits {apart:.3g} of their deviation apart",
        flush=True,
    )


def _end(number: int, frame: object) -> None:
    """What is ended puts the read-ahead back and removes its group, as after Ctrl-C."""
    del frame
    raise SystemExit(128 + number)


def main() -> int:
    """Compare at the cap and with everything in memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--cap", type=parse_size, default=parse_size("4GiB"))
    parser.add_argument("--resident-cap", type=parse_size, default=parse_size("20GiB"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--read-ahead", type=int, default=128, help="KiB; 0 leaves it as it is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["agreement", "capped", "resident"])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="aegis-compare-") as name:
        folder = Path(name)
        case = Case(
            options.store,
            options.gguf,
            build(options.llama, folder),
            folder / "ids",
            options.prompt,
            options.tokens,
            options.threads,
            options.context,
        )
        vocabulary = Store.open(case.store).layout.config.int("vocab_size")
        stream = token_stream(options.seed, vocabulary)
        ids = list(islice(stream, case.prompt + case.tokens))
        np.array(ids, np.int32).tofile(case.ids)
        wanted = [options.only] if options.only else ["agreement", "capped", "resident"]
        if "agreement" in wanted:
            agreement(case, folder, options.cap)
        if "capped" in wanted:
            print(f"at {format_size(options.cap)}, {case.threads} threads:", flush=True)
            commands = {
                "aegis": aegis_command(case, options.cap),
                "llama.cpp, mmap, no repack": llama_command(case, False),
                "llama.cpp, defaults": llama_command(case, True),
            }
            with read_ahead(case.gguf, options.read_ahead):
                take_turns(case, options.cap, commands, options.rounds)
        if "resident" in wanted:
            print(f"all resident, {case.threads} threads:", flush=True)
            commands = {
                "aegis": aegis_command(case, options.resident_cap),
                "llama.cpp, mmap, no repack": llama_command(case, False),
                "llama.cpp, defaults": llama_command(case, True),
            }
            take_turns(case, None, commands, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
