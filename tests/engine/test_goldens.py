"""Outputs of other people's libraries (transformers in float32) on the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_tools import (
    BACKENDS,
    GOLDENS,
    NLL_WITHIN,
    RANDOM,
    THOROUGH,
    check_experts,
    check_logits,
    check_step,
)

from aegis import Engine
from aegis.models import supported

SMOLMOE: dict[str, Any] = json.loads((GOLDENS / "smolmoe-135m" / "golden.json").read_text())
PLAIN = ("qwen3_5_moe/hf_bf16", "qwen3_moe/hf_bf16")
"""The same before they were quantised, as their libraries wrote them."""
CASES = {case["name"]: case for case in SMOLMOE["prompts"]}

native_only = pytest.mark.skipif("native" not in BACKENDS, reason="the extension is not built")


@pytest.fixture(scope="module", params=THOROUGH)
def smolmoe(request: pytest.FixtureRequest, cache: Path) -> Iterator[Engine]:
    """The embedded model: experts stream at the native backend's cap."""
    cap = {"native": "300MiB", "mlx": "16GiB"}.get(request.param, "3GiB")
    options = {"backend": request.param, "activations": "f32"}
    with Engine.open(cap=cap, context=2048, **options) as engine:
        yield engine


@pytest.fixture(
    scope="module",
    params=[(name, backend) for name in (*RANDOM, *PLAIN) for backend in BACKENDS],
    ids=lambda param: "-".join(param),
)
def random_model(request: pytest.FixtureRequest, cache: Path) -> Iterator[tuple[str, Engine]]:
    """A family and its small random checkpoint."""
    name, backend = request.param
    cap = {"mlx": "8GiB"}.get(backend, "400MiB")
    options = {"cap": cap, "backend": backend, "activations": "f32"}
    if name in PLAIN:  # The golden is of its own numbers.
        options["bits"] = "none"
    with Engine.open(GOLDENS / name, **options) as engine:
        yield name, engine


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


def test_every_family_has_goldens() -> None:
    assert sorted(RANDOM) == supported()


@pytest.mark.parametrize("index", range(4))
def test_a_random_checkpoint_gives_its_goldens(
    random_model: tuple[str, Engine], index: int
) -> None:
    name, engine = random_model
    case = json.loads((GOLDENS / name / "golden.json").read_text())["prompts"][index]
    expected = np.load(GOLDENS / name / "golden.npz")[f"p{index}_logits"]
    logits = engine.score(case["ids"])[0]
    check_step(logits, float(expected.std()), case["top20_ids"], case["top20_logits"])
    check_logits(logits, expected)
    tokens = list(engine.generate(case["ids"], max_tokens=24, ignore_eos=True))
    assert tokens == case["greedy_ids"]
    if case["mean_nll"] is not None:
        assert abs(float(engine.nll(case["ids"]).mean()) - case["mean_nll"]) <= NLL_WITHIN


@pytest.mark.parametrize("index", range(4))
def test_a_random_checkpoint_chooses_the_golden_experts(
    random_model: tuple[str, Engine], index: int
) -> None:
    name, engine = random_model
    arrays = np.load(GOLDENS / name / "golden.npz")
    ids: list[int] = arrays[f"p{index}_ids"].tolist()
    check_experts(engine, ids, arrays[f"p{index}_experts"], arrays[f"p{index}_router_margin"])
