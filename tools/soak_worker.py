"""What tools/soak.py runs inside the memory group: models opened one after the other, prompts of
all kinds. One JSON object per line on stdout. Imports nothing that a user's process would not.

    python tools/soak_worker.py GROUP_FOLDER SEED SECONDS SEGMENT_SECONDS CONTEXT...
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aegis import Engine, plan
from aegis.engine.limits import memory_limits
from aegis.engine.memory import resident_nbytes
from aegis.heap import give_back

MIB = 1 << 20
ABOVE = (0, 2 * MIB, 8 * MIB, 24 * MIB)
"""Caps, above the smallest that opens."""
LEAST_MODELS = 4
BALLAST = 6 * MIB
"""Taken behind the engine's back now and then; more where slots can make room for it."""
_LIMITS = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max")


def work(group: Path, seed: int, seconds: float, segment_s: float, contexts: Sequence[int]) -> None:
    """Open, generate, close until the time is up; one model stays open for ``segment_s``."""
    rng, end = random.Random(seed), time.monotonic() + seconds
    models = 0
    while time.monotonic() < end or models < LEAST_MODELS:
        models += 1
        options: dict[str, Any] = {
            "context": rng.choice(contexts),
            "guess": rng.choice(("cross-layer", "previous", "none")),
            "policy": rng.choice(("lfu", "lru", "random")),
            "io_threads": rng.randint(1, 4),
            "threads": rng.randint(1, 2),
        }
        above = rng.choice(ABOVE)
        cap = plan(cap=1, **options).min_cap_nbytes + above
        limit(group, cap)
        with Engine.open(cap=cap, **options) as engine:
            segment_end, rounds = time.monotonic() + segment_s, 0
            while time.monotonic() < segment_end or not rounds:
                rounds += 1
                one = one_round(engine, rng, BALLAST + min(above, 8 * MIB))
                given = dataclasses.asdict(engine.stats.given_back)
                say({"kind": "round", "cap": cap, "given": given, **one}, group)
        del engine
        give_back()
        say({"kind": "closed"}, group)


def limit(group: Path, nbytes: int) -> None:
    """The group's limit follows the cap; version 1 wants both files changed in the right order."""
    for name in (*_LIMITS, *_LIMITS):
        if (group / name).exists():
            with contextlib.suppress(OSError):
                (group / name).write_text(str(nbytes))
    found = memory_limits().container_limit
    if found is None or abs(found - nbytes) > 4096:
        raise OSError(f"{group} did not take a limit of {nbytes} bytes; it is {found}")


def say(line: dict[str, Any], group: Path) -> None:
    """The line, with what the kernel says now."""
    stat = dict(pair.split() for pair in (group / "memory.stat").read_text().splitlines())
    line |= {
        "rss": resident_nbytes(),
        "charge": memory_limits().container_usage,
        # What cannot be dropped: page cache comes and goes as it likes.
        "anon": int(stat.get("total_rss", stat.get("anon", 0))),
        "faults": int(stat.get("total_pgmajfault", stat["pgmajfault"])),
    }
    print(json.dumps(line), flush=True)


def one_round(engine: Engine, rng: random.Random, most: int) -> dict[str, Any]:
    """One prompt with its answer, as everything that is needed to repeat it."""
    vocab, context = 49000, engine.context
    max_tokens = rng.randint(1, min(48, context // 2))
    length, low = rng.randint(1, context - max_tokens), rng.randrange(vocab)
    width = rng.choice((1, 40, vocab))
    ids = [(low + rng.randrange(width)) % vocab for _ in range(length)]
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    if rng.random() < 0.4:
        sampling |= {"temperature": 1.2, "top_p": 0.95, "seed": rng.randrange(1 << 30)}
    ballast = b"\1" * rng.randint(1, most) if rng.random() < 0.3 else b""
    tokens = list(engine.generate(ids, **sampling))
    del ballast
    if rng.random() < 0.2:
        engine.nll(ids)
    if rng.random() < 0.2:
        engine.score(ids, last=1)
    if rng.random() < 0.3 and len(ids) + len(tokens) + 8 < context:
        ids = [*ids, *tokens, *(rng.randrange(vocab) for _ in range(3))]
        sampling["max_tokens"] = 4
        tokens = list(engine.generate(ids, **sampling))
    return {"context": context, "ids": ids, "sampling": sampling, "tokens": tokens}


if __name__ == "__main__":
    group, seed, seconds, segment, *contexts = sys.argv[1:]
    work(Path(group), int(seed), float(seconds), float(segment), [int(n) for n in contexts])
