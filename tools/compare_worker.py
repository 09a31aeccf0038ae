"""What compare_llama.py runs of aegis: given token ids through a model; prints what it took.

Arguments: the store, a file of int32 ids, how many of them are the prompt, the cap in bytes, the
context, the threads, and optionally a file for the experts of each decoded token (int32 [decoded
tokens, layers, chosen], ascending) and one for logits (float32 [decoded tokens, vocabulary]).
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from aegis import Engine
from aegis.engine.memory import peak_nbytes


def main() -> None:
    """Feed the ids and print one object."""
    store, ids_file, prompt, cap, context, threads, *files = sys.argv[1:]
    ids = np.fromfile(ids_file, np.int32).tolist()
    count = int(prompt)
    options: dict[str, Any] = {"context": int(context), "threads": int(threads)}
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine.open(store, cap=int(cap), backend="native", **options))
        load_s = time.perf_counter() - begin
        begin = time.perf_counter()
        if count:
            engine.logits(engine.feed(ids[:count]))
        prompt_s = time.perf_counter() - begin
        tracing = stack.enter_context(engine.tracing()) if files else None
        token_s, rows = [], []
        for token in ids[count:]:
            begin = time.perf_counter()
            logits = engine.logits(engine.feed_token(token))
            token_s.append(time.perf_counter() - begin)
            if len(files) > 1:
                rows.append(logits[0].copy())
        if tracing is not None:
            chosen = tracing.recorder.trace(engine.name, ids[count:]).chosen
            chosen.astype(np.int32).tofile(files[0])
        if rows:
            np.stack(rows).tofile(Path(files[1]))
        decode = engine.stats.totals("decode")
        found = {
            "load_s": load_s,
            "prompt_s": prompt_s,
            "token_s": token_s,
            "hit_rate": engine.stats.hit_rate,
            "decode_read_nbytes": decode.read_nbytes,
            "slots": engine.plan.slots,
            "peak_nbytes": peak_nbytes(),
            "prefill_step": engine.plan.prefill_step,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
