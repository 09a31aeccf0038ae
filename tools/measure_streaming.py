"""Measure the mlx backend on a GPU with experts that stream, and beside mlx-lm.

    python -P tools/measure_streaming.py bench STORE --cap 6GiB,10GiB,16GiB
    python -P tools/measure_streaming.py beside STORE [--whole 40GiB]

STORE is a converted store in layout row, as `aegis convert synthetic:qwen3.6-35b-a3b STORE --layout
row` writes it. ``bench`` runs `aegis bench` at every cap and says what a token's time went into:
handing calls to the GPU, waiting for it, waiting for reads, Python; and how much of the reading was
waited for. ``beside`` gives aegis memory for every expert and mlx-lm all of the same weights (which
takes the family qwen3_5_moe, and mlx-lm installed): both generate by turns, each in a process of
its own, and the GPU alone computes a token. ``--tokens``, ``--prompt`` and ``--rounds`` say how
much. Either prints a table, and writes what it found into --out FILE, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path.append(str(TOOLS))
MIB, GIB = 1 << 20, 1 << 30
WARM_ROUNDS = 2
WHO = ("aegis", "mlx-lm")


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """What `aegis bench` says, one line for each cap."""
    command = [sys.executable, "-P", "-m", "aegis", "bench", options.store, "--backend", "mlx"]
    command += ["--cap", options.cap, "-p", str(options.prompt), "-n", str(options.tokens)]
    command += ["-r", str(options.rounds), "--json", "-q"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise SystemExit(f"aegis bench ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    told = False
    for row in found["rows"]:
        if row["feasible"] and not told:
            told = True
            print(row["description"].partition(" · ")[0])
        print(_line(row) if row["feasible"] else f"{_cap(row)} does not fit: {row['reason']}")
    return found


def _cap(row: dict[str, Any]) -> str:
    return f"{row['cap_nbytes'] / GIB:6.2f} GiB"


def _line(row: dict[str, Any]) -> str:
    """A row in words."""
    split = {name: 1e3 * (value or 0) for name, value in row["split_s"].items()}
    whole, disk = 1e3 * row["s_per_token"], row["disk"]
    busy = disk["busy"] * whole
    hidden = f", {1 - split['wait'] / busy:5.1%} of it hidden" if busy else ""
    limit = disk["limit_nbytes_per_s"]
    of = f" of {limit * 1e-9:.2f}" if limit else ""
    return (
        f"{_cap(row)} {row['slots']}+{row['borrowed_slots']} slots {row['test']:>6}:"
        f" {row['tps']:7.2f} tokens/s; {whole:8.2f} ms = {split['device']:7.2f} for the GPU"
        f" + {split['wait']:7.2f} for reads + {split['queue']:6.2f} queueing"
        f" + {split['other']:6.2f} Python; hits {row['hit_rate']:.1%},"
        f" {row['read_nbytes_per_token'] / MIB:.1f} MiB read a token, reading {busy:.2f}"
        f" ms{hidden}; {disk['nbytes_per_s'] * 1e-9:.2f}{of} GB/s;"
        f" peak {row['peak_nbytes'] / GIB:.2f} GiB"
    )


def beside(options: argparse.Namespace) -> dict[str, Any]:
    """Both by turns; the first rounds do not count."""
    running: dict[str, Any] = {}
    figures: dict[str, list[float]] = {who: [] for who in WHO}
    said: dict[str, Any] = {}
    for who in WHO:
        command = [sys.executable, "-P", __file__, "serve", options.store, "--who", who]
        command += ["--whole", options.whole, "--tokens", str(options.tokens)]
        command += ["--prompt", str(options.prompt)]
        pipe = subprocess.PIPE
        running[who] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        said[who] = _answer(who, running[who])
        print(f"{who}: {said[who]}", flush=True)
    for _ in range(options.rounds + WARM_ROUNDS):
        for who, process in running.items():
            process.stdin.write("\n")
            process.stdin.flush()
            figures[who].append(float(_answer(who, process)))
    for process in running.values():
        process.stdin.close()
        process.wait()
    counted = {who: found[WARM_ROUNDS:] for who, found in figures.items()}
    medians = {who: statistics.median(found) for who, found in counted.items()}
    for who, found in figures.items():
        rounds = " ".join(f"{figure:.1f}" for figure in found)
        print(f"{who}: median {medians[who]:.1f} tokens/s of rounds {rounds}")
    pairs = [ours / theirs for ours, theirs in zip(*counted.values(), strict=True)]
    ratio = medians["aegis"] / medians["mlx-lm"]
    print(f"aegis / mlx-lm: {ratio:.3f} of medians; rounds {min(pairs):.3f} to {max(pairs):.3f}")
    return {"said": said, "tokens_per_s": figures, "ratio": ratio, "ratios": pairs}


def _answer(who: str, process: Any) -> Any:
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{who} ended early, with {process.wait()}")
    return json.loads(line)


def _serve(said: Any, generate: Callable[[int], Iterable[object]], count: int) -> None:
    """Say what is to be said when everything is ready, then a figure for every line that comes."""
    from measure_mlx import tokens_per_s
    from mlx_token_times import SKIPPED

    print(json.dumps(said), flush=True)
    for _ in sys.stdin:
        print(tokens_per_s(generate, SKIPPED + count), flush=True)


def _prompt(options: argparse.Namespace) -> list[int]:
    return [100 + 7 * place % 400 for place in range(options.prompt)]


def serve_ours(options: argparse.Namespace) -> None:
    """With every expert in a slot."""
    from mlx_token_times import device_us, heat, token_parts

    from aegis import Engine

    ids = _prompt(options)
    context = options.prompt + options.tokens + 128
    with Engine.open(options.store, cap=options.whole, backend="mlx", context=context) as engine:
        heat(engine)
        said = {
            "engine": engine.describe(),
            "slots": f"{engine.plan.total_slots} slots",
            "token": token_parts(engine, options.tokens),
            "gpu_alone_us": device_us(engine),
            "first": next(iter(engine.generate(ids, 1, ignore_eos=True))),
        }
        _serve(said, lambda n: engine.generate(ids, n, ignore_eos=True), options.tokens)


def serve_mlx_lm(options: argparse.Namespace) -> None:
    """The same weights in mlx-lm."""
    import mlx.core as mx
    from mlx_lm import __version__
    from mlx_lm.generate import generate_step
    from store_in_mlx_lm import load

    from aegis.checkpoint.store import Store

    model, ids = load(Store.open(Path(options.store))), mx.array(_prompt(options))

    def generate(count: int) -> Iterable[object]:
        return generate_step(ids, model, max_tokens=count)

    first, _ = next(iter(generate(1)))
    said = {"mlx-lm": __version__, "memory_gib": mx.get_active_memory() / GIB, "first": int(first)}
    _serve(said, generate, options.tokens)


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["bench", "beside", "serve"])
    parser.add_argument("store")
    parser.add_argument("--cap", default="6GiB,10GiB,16GiB")
    parser.add_argument("--whole", default="40GiB")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--who", choices=WHO, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "serve":
        (serve_ours if options.who == "aegis" else serve_mlx_lm)(options)
        return
    found = (bench if options.what == "bench" else beside)(options)
    if options.out is not None:
        options.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
