"""Open small models in every way there is, and say how two results differ."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import Choices, write_choices

from aegis import Engine, plan
from aegis.checkpoint.store import Store
from aegis.convert.convert import convert
from aegis.kernels.base import Layout
from aegis.tiers import GUESS_KINDS, POLICIES

Ids = Sequence[int]


@contextmanager
def store_of(
    choices: Choices, seed: int, experts3bit: bool = False, layout: Layout = "il16"
) -> Iterator[Store]:
    """A converted random checkpoint, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="aegis-test-") as folder:
        source = write_choices(Path(folder) / "checkpoint", seed, choices)
        yield convert(source, Path(folder) / "store", layout=layout, experts3bit=experts3bit)


@dataclass(frozen=True)
class Way:
    """One way to run a model that must not change a bit of what it computes."""

    room: float = 1.0
    """Where the cap lies between the smallest that opens (0) and everything resident (1)."""
    odd_nbytes: int = 0
    """Bytes on top, so that caps are not only whole slots."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings that do not depend on the model."""
    token_slots_only: bool = False
    """No more slots than one token needs in one layer."""
    shuffle: int | None = None
    """Seed of the order in which slots are filled; None: as it comes."""
    before: tuple[str, ...] = ()
    """What runs first: "other" prompts, "prefix" (a part of this prompt), "turn" (this prompt, an
    answer and more), "score"."""
    isa: str | None = None

    def open(self, path: Path, top_k: int, **fixed: Any) -> Engine:
        """Open the model this way."""
        options = self.options | fixed
        if self.token_slots_only:
            options["max_slots"] = top_k
        low = plan(path, cap=1, **options).min_cap_nbytes
        everything = plan(path, cap="64GiB", **options).total_nbytes
        cap = low + int(self.room * max(0, everything - low)) + self.odd_nbytes
        engine = Engine.open(path, cap=cap, **options)
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(engine._opened.tiers.slots.free)
        return engine

    def warm_up(self, engine: Engine, ids: Ids) -> None:
        """Leave experts, cache and policy in some other state than after opening."""
        for step in self.before:
            if step == "other":
                list(engine.generate([(i * 7 + 5) % 500 for i in ids], 3, ignore_eos=True))
            elif step == "prefix":
                list(engine.generate(ids[: max(1, len(ids) // 2)], 2, ignore_eos=True))
            elif step == "turn":
                answer = list(engine.generate(ids, 3, ignore_eos=True))
                list(engine.generate([*ids, *answer, 9, 8], 2, ignore_eos=True))
            else:
                engine.score(ids[::-1], last=1)


@dataclass(frozen=True)
class Result:
    """Everything a model said about a prompt."""

    last: NDArray[np.float32]
    """Logits behind the prompt, computed with whatever the cache held."""
    tokens: list[int]
    scores: NDArray[np.float32]
    """Logits of the last ``rows`` positions of the prompt and the tokens, from nothing."""
    nll: NDArray[np.float32]
    """Likelihoods at every position."""


def result_of(engine: Engine, ids: Ids, max_tokens: int, rows: int | None = None) -> Result:
    """Run everything once; rows None: logits of every position."""
    last = engine.logits(engine.feed(ids))[0].copy()
    tokens = list(engine.generate(ids, max_tokens, ignore_eos=True))
    everything = [*ids, *tokens]
    return Result(last, tokens, engine.score(everything, last=rows), engine.nll(everything))


def difference(expected: Result, found: Result) -> str:
    """What differs, for a person to read; empty where every bit is the same."""
    parts = []
    if expected.tokens != found.tokens:
        parts.append(f"tokens {found.tokens} instead of {expected.tokens}")
    for name in ("last", "scores", "nll"):
        one, other = getattr(expected, name), getattr(found, name)
        one, other = one.reshape(len(one), -1), other.reshape(len(other), -1)
        if one.shape != other.shape:
            parts.append(f"{name}: shape {other.shape} instead of {one.shape}")
        elif one.tobytes() != other.tobytes():
            unequal = one.view(np.uint32) != other.view(np.uint32)
            rows = np.flatnonzero(unequal.any(axis=1))
            parts.append(
                f"{name}: {int(unequal.sum())} of {unequal.size} numbers differ, by up to "
                f"{float(np.abs(one - other).max()):g}, in rows {rows.tolist()}"
            )
    return "; ".join(parts)


def prompts(max_size: int, vocab_size: int = 512) -> st.SearchStrategy[list[int]]:
    """Token ids of a prompt; every length is as likely, where lists alone would be short."""
    token = st.integers(0, vocab_size - 1)
    return st.integers(1, max_size).flatmap(
        lambda size: st.lists(token, min_size=size, max_size=size)
    )


@st.composite
def ways(draw: st.DrawFn, isas: Sequence[str | None] = (None,), tied: bool = False) -> Way:
    """Any way to run a model."""
    options: dict[str, Any] = {
        "guess": draw(st.sampled_from(GUESS_KINDS)),
        "guess_width": draw(st.one_of(st.none(), st.integers(0, 16))),
        "policy": draw(st.sampled_from(sorted(POLICIES))),
        "io_threads": draw(st.integers(1, 8)),
        "threads": draw(st.integers(1, 2)),
        "prefill_step": draw(st.sampled_from([None, 1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 32])),
        "embedding": draw(st.sampled_from(["auto", "ram"] if tied else ["auto", "ram", "disk"])),
    }
    return Way(
        room=draw(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))),
        odd_nbytes=draw(st.integers(0, 8191)),
        options=options,
        token_slots_only=draw(st.booleans()),
        shuffle=draw(st.one_of(st.none(), st.integers(0, 1000))),
        before=tuple(
            draw(st.lists(st.sampled_from(["other", "prefix", "turn", "score"]), max_size=3))
        ),
        isa=draw(st.sampled_from(list(isas))),
    )
