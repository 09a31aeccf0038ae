"""Measure what the plan declares: the runtime figure of a backend and of a tokenizer.

    python tools/calibrate_runtime.py [MODEL ...] [--backend native] [--context 512]

Each model (the embedded one by default) is opened and run in a process of its own. Printed per
model: memory of the process once libraries and tokenizer are loaded, and at the end of a chat of
two turns without the arena; the peak while loading; and what aegis.settings declares for it.
``slack`` is what the declared runtime and the reserve leave.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

MIB = 1 << 20

PROBE = """
import json, sys
from aegis import Engine, stream_generate
from aegis.engine.memory import peak_nbytes, resident_nbytes

path, backend, context = sys.argv[1] or None, sys.argv[2], int(sys.argv[3])
import click
with Engine.open(path, cap="64GiB", backend=backend, context=context) as engine:
    runtime = {row.item: row for row in engine.ledger()}["runtime"]
    loading = peak_nbytes() - engine.arena_nbytes
    turns = [{"role": "user", "content": "Tell me about the sea."}]
    for _ in range(2):
        chat = engine.tokenizer.chat_templates
        prompt = turns if chat else "\\n".join(turn["content"] for turn in turns)
        answer = "".join(
            step.text for step in stream_generate(engine, engine.tokenizer, prompt, 64)
        )
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    items = dict(engine.plan.items)
    print(json.dumps({
        "model": engine.name,
        "loaded": runtime.measured_nbytes,
        "loading": loading,
        "running": resident_nbytes() - engine.arena_nbytes,
        "declared": items["runtime"],
        "reserve": items["runtime_reserve"],
    }))
"""


def probe(path: str, backend: str, context: int) -> dict[str, int]:
    """The figures of one model, from a fresh process."""
    command = [sys.executable, "-P", "-c", PROBE, path, backend, str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    figures: dict[str, int] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Print a table, MiB."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[""])
    parser.add_argument("--backend", default="native")
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    columns = ("loaded", "loading", "running", "declared", "reserve")
    print("model".ljust(20), *(name.rjust(10) for name in columns), "slack".rjust(10))
    for path in options.models:
        figures = probe(path, options.backend, options.context)
        slack = figures["declared"] + figures["reserve"] - figures["running"]
        cells = [figures[name] / MIB for name in columns] + [slack / MIB]
        print(str(figures["model"]).ljust(20), *(f"{cell:10.1f}" for cell in cells))


if __name__ == "__main__":
    main()
