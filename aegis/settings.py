"""What a user can set when opening a model, with the defaults and the declared runtime figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20

DEFAULT_CONTEXT = 4096
DEFAULT_CAP = 4 << 30
DEFAULT_GUESS_WIDTH = 6
DEFAULT_IO_THREADS = 2
PREFILL_STEPS = (512, 256, 128, 64, 32, 16)
"""Prefill steps the plan may choose from, largest first; the choice never changes results."""

EmbeddingMode = Literal["auto", "ram", "disk"]
ExpertBits = Literal["4bit", "3bit"]


@dataclass(frozen=True)
class Settings:
    """One request to open a model. Sizes in bytes; None means "choose for me"."""

    cap_nbytes: int
    backend: str = "auto"
    context: int | None = None
    experts: ExpertBits = "4bit"
    embedding: EmbeddingMode = "auto"
    policy: str = "lfu"
    guess: str = "cross-layer"
    guess_width: int = DEFAULT_GUESS_WIDTH
    io_threads: int = DEFAULT_IO_THREADS
    threads: int | None = None
    prefill_step: int | None = None
    max_slots: int | None = None
    """Upper bound on expert slots, for experiments and tests; None leaves it to the plan."""
