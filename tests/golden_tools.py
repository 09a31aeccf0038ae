"""What tests of golden outputs share: where they lie, how close is close enough, which experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aegis import Engine
from aegis.kernels import registry
from aegis.kernels.base import Array, RouterBlock, Routing
from aegis.models.base import MoeBlocks

GOLDENS = Path(__file__).parent / "goldens"
RANDOM = (
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
)
"""Small random checkpoints, one for each family."""

LOGITS_WITHIN = 2e-3
"""Of the logits' standard deviation."""
NLL_WITHIN = 1e-3
MARGIN_ABOVE = 3e-4
"""Two experts whose scores are closer than this may rightly be chosen either way."""

BACKENDS = [name for name, reason in registry.available() if reason is None]
THOROUGH = [name for name in BACKENDS if name != "mlx" or registry.why_not_auto("mlx") is None]
"""MLX on a CPU is too slow for all prompts; test_mlx.py has it compute a few steps."""


def check_step(
    logits: np.ndarray[Any, Any], std: float, ids: list[int], values: list[float]
) -> None:
    """Top-20 20/20, and their logits within tolerance."""
    assert set(np.argsort(-logits, kind="stable")[:20].tolist()) == set(ids)
    assert np.abs(logits[ids] - values).max() <= LOGITS_WITHIN * std


def check_logits(logits: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """All of them within tolerance, and far closer in the mean."""
    difference = logits - expected
    assert np.abs(difference).max() <= LOGITS_WITHIN * expected.std()
    assert np.sqrt(np.mean(difference**2)) <= LOGITS_WITHIN / 4 * expected.std()


def check_experts(
    engine: Engine,
    ids: list[int],
    experts: np.ndarray[Any, Any],
    margins: np.ndarray[Any, Any],
) -> None:
    """Each layer chooses these in one pass over the prompt, wherever the margin is clear."""
    with spied(engine) as spies:
        # A token behind the prompt: it makes a chunk of rows of a single one, and changes none.
        engine.score([*ids, 9])
    for spy, expected, margin in zip(spies, experts, margins, strict=True):
        found = np.concatenate(spy.chosen)[: len(ids)]
        assert found.shape == expected.shape
        assert (found == expected).all(axis=1)[margin > MARGIN_ABOVE].all()


class Spy:
    """A router block that remembers what was chosen, int32 [rows, K] per call."""

    def __init__(self, router: RouterBlock) -> None:
        self.router, self.chosen = router, list[Any]()

    def __call__(self, x: Array, candidates: int) -> Routing:
        routing = self.router(x, candidates)
        self.chosen.append(routing.experts.copy())
        return routing


@contextmanager
def spied(engine: Engine) -> Iterator[list[Spy]]:
    """A spy in every layer of the decoder that has a router, for as long as the block runs."""
    layers: Any = engine._opened.decoder.layers
    before, spies = list(layers), list[Spy]()
    for number, layer in enumerate(before):
        if isinstance(layer.mlp, MoeBlocks):
            spies.append(Spy(layer.mlp.router))
            layers[number] = replace(layer, mlp=replace(layer.mlp, router=spies[-1]))
    try:
        yield spies
    finally:
        layers[:] = before
