"""Outputs of other people's libraries (transformers in float32) on the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aegis import Engine
from aegis.kernels import registry

GOLDENS = Path(__file__).parents[1] / "goldens"
SMOLMOE: dict[str, Any] = json.loads((GOLDENS / "smolmoe-135m" / "golden.json").read_text())
QWEN2: dict[str, Any] = json.loads((GOLDENS / "qwen2_moe" / "golden.json").read_text())
CASES = {case["name"]: case for case in SMOLMOE["prompts"]}

LOGITS_WITHIN = 2e-3
"""Of the logits' standard deviation."""
NLL_WITHIN = 1e-3

BACKENDS = [name for name, reason in registry.available() if reason is None]
THOROUGH = [name for name in BACKENDS if name != "mlx" or registry.why_not_auto("mlx") is None]
"""MLX on a CPU is too slow for all prompts; test_mlx.py has it compute a few steps."""

native_only = pytest.mark.skipif("native" not in BACKENDS, reason="the extension is not built")


@pytest.fixture(scope="module", params=THOROUGH)
def smolmoe(request: pytest.FixtureRequest, cache: Path) -> Iterator[Engine]:
    """The embedded model: experts stream at the native backend's cap."""
    cap = {"native": "300MiB", "mlx": "16GiB"}.get(request.param, "3GiB")
    options = {"backend": request.param, "activations": "f32"}
    with Engine.open(cap=cap, context=2048, **options) as engine:
        yield engine


@pytest.fixture(scope="module", params=BACKENDS)
def qwen2_moe(request: pytest.FixtureRequest, cache: Path) -> Iterator[Engine]:
    """The small random checkpoint: untied, norm_topk_prob false."""
    cap = {"mlx": "8GiB"}.get(request.param, "400MiB")
    options = {"backend": request.param, "activations": "f32"}
    with Engine.open(GOLDENS / "qwen2_moe", cap=cap, **options) as engine:
        yield engine


def check_step(
    logits: np.ndarray[Any, Any], std: float, ids: list[int], values: list[float]
) -> None:
    """Top-20 20/20, and their logits within tolerance."""
    assert set(np.argsort(-logits, kind="stable")[:20].tolist()) == set(ids)
    assert np.abs(logits[ids] - values).max() <= LOGITS_WITHIN * std


@pytest.mark.parametrize("name", CASES)
def test_chat_template_and_tokenizer_give_the_golden_ids(smolmoe: Engine, name: str) -> None:
    case = CASES[name]
    assert smolmoe.tokenizer.encode_chat(case["messages"]) == case["ids"]


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_the_golden_ones(smolmoe: Engine, name: str) -> None:
    case = CASES[name]
    if smolmoe.backend == "native":
        tokens = list(smolmoe.generate(case["ids"], max_tokens=64, ignore_eos=True))
    else:
        # One pass over prompt and continuation: each position's arg max is the next golden token.
        forced = case["ids"] + case["greedy_ids"][:-1]
        tokens = smolmoe.score(forced, last=64).argmax(axis=-1).tolist()
    assert tokens == case["greedy_ids"]


@pytest.mark.parametrize("name", CASES)
def test_logits_of_the_first_steps_are_the_golden_ones(smolmoe: Engine, name: str) -> None:
    case = CASES[name]
    logits = smolmoe.score(case["ids"] + case["greedy_ids"][:7], last=8)
    expected = zip(
        logits, case["logit_std"], case["step_top20_ids"], case["step_top20_logits"], strict=True
    )
    for row, std, ids, values in expected:
        check_step(row, std, ids, values)


@native_only
@pytest.mark.parametrize("smolmoe", ["native"], indirect=True)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["eos_at"]])
def test_the_text_ends_where_the_golden_one_does(smolmoe: Engine, name: str) -> None:
    case = CASES[name]
    tokens = list(smolmoe.generate(case["ids"], max_tokens=64))
    assert len(tokens) == case["eos_at"] - 1
    assert smolmoe.tokenizer.decode(tokens) == case["text"]


def test_the_mean_nll_is_the_golden_one(smolmoe: Engine) -> None:
    golden = SMOLMOE["perplexity"]
    nll = smolmoe.nll(golden["ids"])
    assert len(nll) == golden["n_predicted"]
    assert abs(float(nll.mean(dtype=np.float64)) - golden["mean_nll"]) <= NLL_WITHIN


@pytest.mark.parametrize("index", range(len(QWEN2["prompts"])))
def test_a_random_checkpoint_gives_its_goldens(qwen2_moe: Engine, index: int) -> None:
    case = QWEN2["prompts"][index]
    arrays = np.load(GOLDENS / "qwen2_moe" / "golden.npz")
    expected = arrays[f"p{index}_logits"]
    logits = qwen2_moe.score(case["ids"])[0]
    check_step(logits, float(expected.std()), case["top20_ids"], case["top20_logits"])
    assert np.abs(logits - expected).max() <= LOGITS_WITHIN * expected.std()
    tokens = list(qwen2_moe.generate(case["ids"], max_tokens=24, ignore_eos=True))
    assert tokens == case["greedy_ids"]
    if case["mean_nll"] is not None:
        assert abs(float(qwen2_moe.nll(case["ids"]).mean()) - case["mean_nll"]) <= NLL_WITHIN
