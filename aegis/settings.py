"""What a user can set when opening a model, with the defaults and the declared runtime figures."""

from __future__ import annotations

import contextlib
import operator
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from aegis.errors import shown

MIB = 1 << 20

DEFAULT_CONTEXT = 4096
DEFAULT_CAP = 4 << 30
DEFAULT_IO_THREADS = 2
PREFILL_STEPS = (512, 256, 128, 64, 32, 16)
"""Prefill steps the plan may choose from, largest first; the choice never changes results."""

LOGIT_ROWS = 4
"""Rows of logits computed at once."""

READ_NBYTES = 2 * MIB
"""What one reader brings at once at most, or one expert where that is more."""

IO_NBYTES = 1 * MIB
"""Bounce buffers for reading resident weights and headers."""

ALIGNMENT_NBYTES = 64 << 10
"""Padding between the regions of the arena."""

RESERVE_NBYTES = 8 * MIB
"""Set aside for what cannot be sized ahead: heap growth, page tables."""

SAMPLING_NBYTES_PER_LOGIT = 44
"""What drawing one token takes at most, per token of the vocabulary: a ranking of all of it."""

PROMPT_NBYTES_PER_TOKEN = 512
"""What a prompt's text, its encoding and the lists of its ids take for a moment, per token."""

THREAD_NBYTES = 64 << 10
"""Stacks, the kernel's among them, of one more thread than the reserve covers."""

RESERVED_THREADS = 4


@dataclass(frozen=True)
class RuntimeFigures:
    """What interpreter, libraries and tokenizer take; the same in ``plan`` and in ``run``."""

    steady_nbytes: int
    """After loading."""
    load_peak_nbytes: int
    """While loading, before anything else of the plan exists."""


_RUNTIME_MIB = {"native": 46, "reference": 50, "mlx-cpu": 72, "mlx-metal": 120, "mlx-cuda": 1344}
"""Interpreter and libraries, measured with tools/calibrate_runtime.py and rounded up."""

DEVICE_RUNTIME_NBYTES = 840 * MIB
"""What the driver, its libraries and compiled kernels take in the memory of a GPU (CUDA)."""


def runtime_figures(backend: str, tokenizer_nbytes: int) -> RuntimeFigures:
    """The declared figures for a backend and a tokenizer file of ``tokenizer_nbytes``.

    A vocabulary's tables take about 4 times its JSON once loaded and 6 times while loading
    (tools/calibrate_runtime.py); both are rounded up to 1 MiB.
    """
    base = _RUNTIME_MIB[backend] * MIB
    steady = base + 4 * tokenizer_nbytes
    peak = base + 6 * tokenizer_nbytes
    return RuntimeFigures(-(-steady // MIB) * MIB, -(-peak // MIB) * MIB)


EmbeddingMode = Literal["auto", "ram", "disk"]
ExpertBits = Literal["4bit", "3bit"]
Activations = Literal["auto", "f32", "bf16", "f16"]
Bits = Literal["auto", "none"] | int

BACKENDS = ("auto", "mlx", "native", "reference")


def default_backend() -> str:
    """$AEGIS_BACKEND, or ``auto``: what computes where nobody says what should.

    Raises:
        ValueError: there is no such backend; one sentence.
    """
    named = os.environ.get("AEGIS_BACKEND")
    if named and named not in BACKENDS:
        raise ValueError(
            f"AEGIS_BACKEND is {shown(named)}; set it to one of {', '.join(BACKENDS)}, or unset it"
        )
    return named or "auto"


_WORDS = {
    "experts": get_args(ExpertBits),
    "embedding": get_args(EmbeddingMode),
    "policy": ("lfu", "lru", "random"),
    "guess": ("cross-layer", "previous", "none"),
    "activations": ("auto", "f32", "bf16", "f16"),
}
_LEAST = {
    "cap_nbytes": 1,
    "context": 1,
    "guess_width": 0,
    "io_threads": 1,
    "threads": 1,
    "prefill_step": 1,
    "max_slots": 1,
    "device_cap_nbytes": 1,
}
_OPTIONAL = (
    "context",
    "threads",
    "prefill_step",
    "max_slots",
    "device_cap_nbytes",
    "guess_width",
)
_MOST = {"guess_width": 16, "io_threads": 64}
_ANY = 1 << 63
"""No number of anything is larger: beyond it sizes could not even be shown."""


@dataclass(frozen=True)
class Settings:
    """One request to open a model. Sizes in bytes; None means "choose for me"."""

    cap_nbytes: int
    backend: str = field(default_factory=default_backend)
    context: int | None = None
    experts: ExpertBits = "4bit"
    bits: Bits = "auto"
    """What a plain checkpoint is quantised to while it is converted; ``none`` keeps its numbers.
    auto: what was made of it last, or else 4."""
    group_size: int = 64
    """Numbers that share a scale and a bias then."""
    embedding: EmbeddingMode = "auto"
    policy: str = "lfu"
    guess: str = "cross-layer"
    guess_width: int | None = None
    """Experts to read ahead per layer; None: as many as turn out to be worth it."""
    io_threads: int = DEFAULT_IO_THREADS
    threads: int | None = None
    prefill_step: int | None = None
    activations: Activations = "auto"
    """Numbers to compute in; auto: float32 on a CPU, the model's own on a GPU."""
    max_slots: int | None = None
    """Upper bound on expert slots, for experiments and tests; None leaves it to the plan."""
    device_cap_nbytes: int | None = None
    """What may lie in the memory of a GPU that has its own; the cap is then for the host. None: the
    cap is for both together."""

    def __post_init__(self) -> None:
        """Refuse what no model could be opened with: ValueError, one sentence."""
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in words:
                raise ValueError(f"{name} is {shown(value)}; choose one of {', '.join(words)}")
        if not isinstance(self.backend, str):
            raise ValueError(f"backend is {shown(self.backend)}; give its name, or auto")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                # Plain ints from here on: numpy's would overflow where sizes are computed.
                object.__setattr__(self, name, _whole(name, value, least))


def _whole(name: str, value: Any, least: int) -> int:
    most = _MOST.get(name)
    with contextlib.suppress(TypeError):
        found = operator.index(value)
        if not isinstance(value, bool) and least <= found <= (most or _ANY):
            return found
    bound = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} is {shown(value)}; it must be a whole number {bound}")
