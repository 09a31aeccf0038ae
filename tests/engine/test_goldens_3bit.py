"""3-bit experts that a conversion derives: outputs of mlx-lm in float32 on weights that
tools/make_three_bit_goldens.py dequantised, requantised and dequantised again by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_tools import (
    BACKENDS,
    GOLDENS,
    LOGITS_WITHIN,
    NLL_WITHIN,
    RANDOM,
    THOROUGH,
    check_experts,
    check_logits,
    check_step,
)
from stores import expert_values

from aegis import Engine
from aegis.checkpoint.layout import ExpertBits
from aegis.checkpoint.store import Store
from aegis.convert.convert import convert
from aegis.convert.identity import embedded_path
from aegis.engine.planning import backend_layout
from aegis.errors import StoreError

WITHOUT = ("gpt_oss",)
"""Experts in MXFP4, from which none of 3 bits are derived."""
DERIVED = [name for name in RANDOM if name not in WITHOUT]
PROMPTS = range(4)
SMOLMOE: dict[str, Any] = json.loads((GOLDENS / "smolmoe-135m" / "golden_3bit.json").read_text())
CASES = {case["name"]: case for case in SMOLMOE["prompts"]}

QUICKEST = "native" if "native" in BACKENDS else "reference"
CAPS = {"native": "400MiB", "mlx": "8GiB"}
Model = tuple[Store, Mapping[str, Any], Engine]


def golden_of(name: str) -> Mapping[str, Any]:
    """The arrays of a family's golden_3bit.npz."""
    with np.load(GOLDENS / name / "golden_3bit.npz") as arrays:
        return dict(arrays)


def opened(store: Store, backend: str, experts: ExpertBits = "3bit") -> Engine:
    """A store whose every expert fits."""
    cap = CAPS.get(backend, "400MiB")
    return Engine.open(store.path, cap=cap, backend=backend, activations="f32", experts=experts)


@pytest.fixture(
    scope="module",
    params=[(name, backend) for name in DERIVED for backend in BACKENDS],
    ids=lambda param: "-".join(param),
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """A family's small random checkpoint, its golden, and the engine with 3-bit experts."""
    name, backend = request.param
    target = tmp_path_factory.mktemp("three") / name
    store = convert(GOLDENS / name, target, layout=backend_layout(backend), experts3bit=True)
    with opened(store, backend) as engine:
        yield store, golden_of(name), engine


def test_every_family_has_goldens_or_is_refused() -> None:
    found = {path.parent.name for path in GOLDENS.glob("*/golden_3bit.npz")}
    assert found == set(DERIVED)


def test_the_experts_are_the_oracles_to_the_last_bit(model: Model) -> None:
    store, golden, _ = model
    check_weights(store, [bytes(digest) for digest in golden["weights"]])


def check_weights(store: Store, digests: list[bytes]) -> None:
    """The experts of each layer, dequantised, have this digest."""
    values = expert_values(store, "3bit")
    for layer, digest in zip(store.layout.moe_layers, digests, strict=True):
        found = hashlib.sha256()
        for part in ("gate_proj", "up_proj", "down_proj"):
            for expert in range(store.layout.num_experts):
                found.update(values[layer, expert, part].astype("<f4").tobytes())
        assert found.digest() == digest, layer


@pytest.mark.parametrize("index", PROMPTS)
def test_a_random_checkpoint_with_3bit_experts_gives_its_goldens(model: Model, index: int) -> None:
    _, golden, engine = model
    ids, expected = golden[f"p{index}_ids"].tolist(), golden[f"p{index}_logits"]
    logits = engine.score(ids)[0]
    top = np.argsort(-expected, kind="stable")[:20]
    check_step(logits, float(expected.std()), top.tolist(), expected[top])
    check_logits(logits, expected)
    tokens = list(engine.generate(ids, max_tokens=24, ignore_eos=True))
    assert tokens == golden[f"p{index}_greedy"].tolist()
    nll = golden[f"p{index}_nll"]
    assert len(nll) == len(ids) - 1
    if len(nll):
        assert np.abs(engine.nll(ids) - nll).max() <= NLL_WITHIN


@pytest.mark.parametrize("index", PROMPTS)
def test_a_random_checkpoint_with_3bit_experts_chooses_the_golden_ones(
    model: Model, index: int
) -> None:
    _, golden, engine = model
    ids = golden[f"p{index}_ids"].tolist()
    check_experts(engine, ids, golden[f"p{index}_experts"], golden[f"p{index}_router_margin"])


@pytest.mark.parametrize("model", [(name, QUICKEST) for name in DERIVED], indirect=True)
def test_the_goldens_tell_3bit_experts_from_4bit_ones(model: Model) -> None:
    store, golden, engine = model
    with opened(store, engine.backend, "4bit") as other:
        for index in PROMPTS:
            expected = golden[f"p{index}_logits"]
            difference = other.score(golden[f"p{index}_ids"].tolist())[0] - expected
            assert np.abs(difference).max() > 10 * LOGITS_WITHIN * expected.std()


@pytest.mark.parametrize("name", WITHOUT)
def test_experts_in_mxfp4_are_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no 4-bit experts to derive 3-bit ones from"):
        convert(GOLDENS / name, tmp_path / "s", experts3bit=True)
    assert not (tmp_path / "s").exists()


@pytest.fixture(scope="module", params=THOROUGH)
def smolmoe(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Store, Engine]]:
    """The embedded model with 3-bit experts, which stream at the native backend's cap."""
    backend, folder = request.param, tmp_path_factory.mktemp("three")
    layout = backend_layout(backend)
    store = convert(embedded_path(), folder / "smolmoe", layout=layout, experts3bit=True)
    cap = {"native": "300MiB", "mlx": "16GiB"}.get(backend, "3GiB")
    options = {"cap": cap, "backend": backend, "activations": "f32", "experts": "3bit"}
    with Engine.open(store.path, context=2048, **options) as engine:
        yield store, engine


def test_the_embedded_models_3bit_experts_are_the_oracles_to_the_last_bit(
    smolmoe: tuple[Store, Engine],
) -> None:
    check_weights(smolmoe[0], [bytes.fromhex(digest) for digest in SMOLMOE["weights"]])


@pytest.mark.parametrize("name", CASES)
def test_the_embedded_model_with_3bit_experts_gives_its_goldens(
    smolmoe: tuple[Store, Engine], name: str
) -> None:
    engine, case = smolmoe[1], CASES[name]
    # One pass over prompt and continuation: each position's arg max is the next golden token.
    logits = engine.score(case["ids"] + case["greedy_ids"][:-1], last=len(case["greedy_ids"]))
    assert logits.argmax(axis=-1).tolist() == case["greedy_ids"]
    steps = zip(
        logits[:8],
        case["logit_std"],
        case["step_top20_ids"],
        case["step_top20_logits"],
        strict=True,
    )
    for row, std, ids, values in steps:
        check_step(row, std, ids, values)
    if engine.backend == "native":
        tokens = list(engine.generate(case["ids"], max_tokens=64, ignore_eos=True))
        assert tokens == case["greedy_ids"]


@pytest.mark.parametrize(
    "smolmoe", [name for name in THOROUGH if name != "reference"], indirect=True
)
def test_the_embedded_models_mean_nll_with_3bit_experts_is_the_golden_one(
    smolmoe: tuple[Store, Engine],
) -> None:
    text = json.loads((GOLDENS / "smolmoe-135m" / "golden.json").read_text())["perplexity"]["ids"]
    nll = smolmoe[1].nll(text)
    assert len(nll) == len(text) - 1
    assert abs(float(nll.mean(dtype=np.float64)) - SMOLMOE["mean_nll"]) <= NLL_WITHIN
