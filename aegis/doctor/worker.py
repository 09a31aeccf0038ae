"""A process of its own for one run of the selftest: what it takes and how it dies is its own.

``python -m aegis.doctor.worker REQUEST``, a JSON object; prints another one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.child import die_with_parent
from aegis.doctor.goldens import Golden, load_goldens
from aegis.errors import AegisError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aegis.engine.engine import Engine


def compute(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the first ``prompts`` goldens for ``steps`` tokens each.

    decode: token by token as in a run, else all steps of a prompt in one pass.
    """
    from aegis.engine.engine import Engine
    from aegis.engine.memory import peak_nbytes

    goldens = load_goldens(Path(request["goldens"]))[: request["prompts"]]
    options = {name: request[name] for name in ("backend", "context", "activations")}
    with Engine.open(request["store"], cap=request["cap_nbytes"], **options) as engine:
        rows = _decoded if request["decode"] else _scored
        cases = [
            _case(engine, golden, rows(engine, golden, request["steps"])) for golden in goldens
        ]
        return {"cases": cases, "peak_nbytes": peak_nbytes(), "description": engine.describe()}


def convert_into(folder: str, layout: str) -> None:
    """Convert the embedded model."""
    from aegis.convert.convert import convert
    from aegis.convert.identity import embedded_path

    convert(embedded_path(), folder, layout="row" if layout == "row" else "il16")


def _decoded(engine: Engine, golden: Golden, steps: int) -> Iterator[NDArray[np.float32]]:
    """Logits of each step; the golden token follows whatever came, so that errors don't add up."""
    hidden = engine.feed(golden.ids)
    for token in golden.greedy_ids[: steps - 1]:
        yield engine.logits(hidden)[0]
        hidden = engine.feed_token(token)
    yield engine.logits(hidden)[0]


def _scored(engine: Engine, golden: Golden, steps: int) -> Iterator[NDArray[np.float32]]:
    yield from engine.score([*golden.ids, *golden.greedy_ids[: steps - 1]], last=steps)


def _case(engine: Engine, golden: Golden, rows: Iterator[NDArray[np.float32]]) -> dict[str, Any]:
    return {
        "ids": engine.tokenizer.encode_chat(golden.messages),
        "rows": [_row(logits, golden.top20_ids[i : i + 1]) for i, logits in enumerate(rows)],
    }


def _row(logits: NDArray[np.float32], wanted: Sequence[Sequence[int]]) -> dict[str, Any]:
    row = {
        "token": int(logits.argmax()),
        "bits": hashlib.sha256(logits.tobytes()).hexdigest()[:16],
    }
    for ids in wanted:
        row["top20_ids"] = (-logits).argsort(kind="stable")[: len(ids)].tolist()
        row["logits"] = [float(logits[i]) for i in ids]
    return row


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What to print: the result, or the sentence with which it failed."""
    try:
        if "convert" in request:
            convert_into(request["convert"], request["layout"])
            return {}
        return compute(request)
    except (AegisError, OSError, ValueError, RuntimeError, MemoryError) as error:
        return {"error": str(error) or type(error).__name__}


def main() -> int:
    """Answer the request of the command line."""
    die_with_parent()
    try:
        sys.stdout.write(json.dumps(answer(json.loads(sys.argv[1]))))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
