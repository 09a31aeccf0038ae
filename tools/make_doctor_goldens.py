"""Writes aegis/doctor/goldens.json, which ``aegis doctor --selftest`` compares with.

It is a part of tests/goldens/smolmoe-135m/golden.json (transformers in float32 on the embedded
model's weights), never of this project's own output: python tools/make_doctor_goldens.py from the
repository root.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SOURCE = Path("tests/goldens/smolmoe-135m/golden.json")
TARGET = Path("aegis/doctor/goldens.json")

PROMPTS = ("system_and_user", "short_question", "code", "multi_turn_unicode")
"""Shortest first: slow kernels and backends compute only the first of them."""
STEPS = 24
DIGITS = 6
"""Of a logit behind the point: 1e-6 is far below what is tolerated."""


def cut(golden: dict[str, Any]) -> dict[str, Any]:
    """The part that ships."""
    cases = {case["name"]: case for case in golden["prompts"]}
    return {
        "format": 1,
        "model": golden["model"],
        "oracle": golden["oracle"],
        "prompts": [_prompt(cases[name]) for name in PROMPTS],
    }


def _prompt(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": case["name"],
        "messages": case["messages"],
        "ids": case["ids"],
        "greedy_ids": case["greedy_ids"][:STEPS],
        "logit_std": [round(std, DIGITS) for std in case["logit_std"]],
        "top20_ids": case["step_top20_ids"],
        "top20_logits": [
            [round(value, DIGITS) for value in values] for values in case["step_top20_logits"]
        ],
    }


def encode(goldens: dict[str, Any]) -> str:
    """One prompt per line, so that a change can be read."""
    lines = ",\n".join(json.dumps(prompt, ensure_ascii=True) for prompt in goldens["prompts"])
    head = json.dumps({**goldens, "prompts": []}, ensure_ascii=True)
    return f"{head.removesuffix(']}')}\n{lines}\n]}}\n"


def main() -> None:
    """Cut and write."""
    TARGET.write_text(encode(cut(json.loads(SOURCE.read_text()))))


if __name__ == "__main__":
    main()
