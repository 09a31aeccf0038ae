"""What another library computes on the embedded model's weights (see tools/make_doctor_goldens)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOLDENS = Path(__file__).with_name("goldens.json")


@dataclass(frozen=True)
class Golden:
    """One prompt, its greedy continuation, and the 20 largest logits of the first steps."""

    name: str
    messages: list[dict[str, Any]]
    ids: list[int]
    greedy_ids: list[int]
    logit_std: list[float]
    top20_ids: list[list[int]]
    top20_logits: list[list[float]]


def load_goldens(path: Path = GOLDENS) -> list[Golden]:
    """Every prompt, the quickest to compute first."""
    goldens: Mapping[str, Any] = json.loads(path.read_text())
    return [Golden(**prompt) for prompt in goldens["prompts"]]
