"""Writes tests/goldens/*/golden_3bit.npz: what checkpoints answer once their experts have 3 bits.

    python -P tools/make_three_bit_goldens.py [NAME ...]

From the repository root, with mlx-lm 0.32 (``pip install mlx-lm``, and ``mlx-cpu`` on Linux).
Nothing of aegis is imported: experts of 4 bits become 3-bit ones in plain numpy and are dequantised
again, everything else is dequantised once (``three_bit_weights.py``), and mlx-lm's model computes
with these float32 numbers. ``check_three_bit_goldens.py`` has transformers compute the same.

Before anything is written the same model has to give, with the experts as they are, the golden.npz
or golden.json that transformers computed: logits within 1e-4 of them, the same greedy tokens, the
same experts. mlx-lm's qwen2_moe ignores ``norm_topk_prob`` and ``tie_word_embeddings``, which the
embedded model sets; both are repaired here. Models without experts of 4 bits are left out.

The prompts are golden.npz's own, except that one with a near tie, or an end token, is drawn anew,
and that one of the embedded model loses tokens while the choice of an expert hangs on rounding.
golden_3bit.npz holds p0 to p3 as golden.npz does, with ``weights``, a SHA-256 of each MoE layer's
dequantised experts (float32; all of gate_proj, then up_proj, then down_proj).
On Linux mlx-cpu brings a slow BLAS: the embedded model takes minutes with an OpenBLAS in
``LD_PRELOAD``, an hour without.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen2_moe
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parent))

from three_bit_weights import (
    F32,
    GOLDENS,
    Ids,
    NoFourBitsError,
    dense,
    nll,
)

EMBEDDED, EMBEDDED_GOLDEN = Path("aegis/embedded"), GOLDENS / "smolmoe-135m"

STEPS = 24
CLEAR = 0.01
"""Of a logit: two that are closer than this are a near tie."""
AGREES, MARGIN_AGREES = 1e-4, 3e-4
"""Of a logit, and of a router's scores: how far mlx-lm may be from transformers."""
TIE = 5e-6
"""Of a router's score: which of two closer experts is chosen is a matter of rounding."""
SPECIAL_BELOW = 10
"""Smaller ids have a meaning of their own in the random checkpoints."""
PARTS = ("gate_proj", "up_proj", "down_proj")


class Spy(nn.Module):  # type: ignore[misc]
    """A module that keeps the arguments of its calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, ()

    def __call__(self, *arguments: mx.array) -> Any:
        """What the module itself answers."""
        self.seen = arguments
        return self.inner(*arguments)


class Pass(NamedTuple):
    """What one pass over a prompt gives; n positions, without a cache."""

    logits: F32  # [n, vocab]
    experts: NDArray[np.int16]  # [MoE layers, n, chosen], ascending
    margins: F32  # [MoE layers, n]


class Oracle:
    """mlx-lm's model of a checkpoint, in float32."""

    def __init__(self, folder: Path, weights: dict[str, F32]) -> None:
        config = json.loads((folder / "config.json").read_text())
        family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        if config.get("tie_word_embeddings") and family is qwen2_moe:
            weights = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
        self.model = family.Model(family.ModelArgs.from_dict(config))
        arrays = self.model.sanitize({name: mx.array(w) for name, w in weights.items()})
        self.model.load_weights(list(arrays.items()))
        self.spies = []
        for _, block in self.model.named_modules():
            if "switch_mlp" in block:
                parent, name = (block, "gate") if "gate" in block else (block.router, "layer")
                spies = Spy(parent[name]), Spy(block.switch_mlp)
                setattr(parent, name, spies[0])
                block.switch_mlp = spies[1]
                if family is qwen2_moe and config["norm_topk_prob"]:
                    spies[1].inner = _Normed(spies[1].inner, parent.gate)
                self.spies.append(spies)
        # named_modules() comes from the last layer to the first.
        self.spies.reverse()

    def run(self, ids: Ids) -> Pass:
        """One pass over ``ids``."""
        logits = np.array(self.model(mx.array([ids]))[0])
        routed = [self._routed(*spies) for spies in self.spies]
        experts, margins = (np.stack(arrays) for arrays in zip(*routed, strict=True))
        return Pass(logits, experts, margins)

    @staticmethod
    def _routed(gate: Spy, experts: Spy) -> tuple[NDArray[np.int16], F32]:
        chosen = np.array(experts.seen[1])
        chosen = np.sort(chosen.reshape(-1, chosen.shape[-1]), axis=-1).astype(np.int16)
        x = np.array(gate.seen[0])
        return chosen, margins(gate.inner, x.reshape(-1, x.shape[-1]), chosen.shape[-1])

    def greedy(self, ids: Ids, steps: int) -> list[int]:
        """A greedy continuation, with a cache."""
        cache, tokens, fed = make_prompt_cache(self.model), list[int](), list(ids)
        for _ in range(steps):
            tokens.append(int(mx.argmax(self.model(mx.array([fed]), cache=cache)[0, -1])))
            fed = tokens[-1:]
        return tokens


class _Normed(nn.Module):  # type: ignore[misc]
    """The experts of a qwen2_moe layer whose weights shall have the sum 1."""

    def __init__(self, experts: nn.Module, gate: Spy) -> None:
        super().__init__()
        self.experts = experts
        self._gate = [gate]

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        scores = mx.softmax(self._gate[0].inner(x), axis=-1, precise=True)
        total = mx.take_along_axis(scores, chosen, axis=-1).sum(axis=-1)
        return self.experts(x, chosen) / total[..., None, None]


def margins(gate: nn.Module, x: F32, count: int) -> F32:
    """How far the last chosen expert is from the first that was not, for each row of ``x``."""
    scores = x.astype(np.float64) @ np.array(gate.weight).astype(np.float64).T
    margin = np.full(len(x), np.inf)
    if "e_score_correction_bias" in gate:
        scores = 1 / (1 + np.exp(-scores)) + np.array(gate.e_score_correction_bias)
        if gate.n_group > 1:
            groups = scores.reshape(len(x), gate.n_group, -1)
            totals = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
            ordered = np.sort(totals, axis=-1)
            last, first_out = ordered[:, -gate.topk_group], ordered[:, -gate.topk_group - 1]
            margin = last - first_out
            dropped = totals < last[:, None]
            scores = np.where(dropped[..., None], -np.inf, groups).reshape(len(x), -1)
    ordered = np.sort(scores, axis=-1)
    return np.minimum(margin, ordered[:, -count] - ordered[:, -count - 1]).astype(np.float32)


def gap(logits: F32, place: int) -> F32:
    """How far the logit of that place from the top is above the next one."""
    ordered = np.sort(logits, axis=-1)
    return ordered[..., -place] - ordered[..., -place - 1]


def check_agreement(name: str, oracle: Oracle, golden: Any) -> None:
    """Fail unless the model gives what transformers did."""
    worst = 0.0
    for p in range(4):
        ids = golden[f"p{p}_ids"].tolist()
        found = oracle.run(ids)
        margin = golden[f"p{p}_router_margin"]
        worst = max(worst, float(np.abs(found.logits[-1] - golden[f"p{p}_logits"]).max()))
        clear = margin > MARGIN_AGREES
        assert np.abs(found.margins - margin).max() < MARGIN_AGREES, name
        assert (found.experts == golden[f"p{p}_experts"])[clear].all(), name
        assert oracle.greedy(ids, STEPS) == golden[f"p{p}_greedy"].tolist(), name
    print(f"{name}: with 4-bit experts {worst:.1e} from transformers", flush=True)
    assert worst < AGREES, name


def prompt(oracle: Oracle, ids: Ids) -> dict[str, NDArray[Any]] | None:
    """The golden of a prompt; None where some token of it is a near tie, or ends the text."""
    tokens = oracle.greedy(ids, STEPS)
    whole = oracle.run([*ids, *tokens[:-1]]).logits[-STEPS:]
    if min(tokens) < SPECIAL_BELOW or gap(whole, 1).min() < CLEAR or gap(whole[0], 20) < CLEAR:
        return None
    assert whole.argmax(axis=-1).tolist() == tokens
    found = oracle.run(ids)
    return {
        "ids": np.array(ids, np.int32),
        "greedy": np.array(tokens, np.int32),
        "logits": found.logits[-1],
        "nll": nll(found.logits, ids),
        "experts": found.experts,
        "router_margin": found.margins,
    }


def digests(weights: dict[str, F32]) -> NDArray[np.uint8]:
    """Of each MoE layer's experts, uint8 [MoE layers, 32]."""
    names = [name.rpartition(f".{PARTS[0]}.")[0] for name in weights if ".switch_mlp.gate" in name]
    names.sort(key=lambda name: int(name.split(".layers.")[1].split(".")[0]))
    parts = [[weights[f"{name}.{part}.weight"] for part in PARTS] for name in names]
    found = [hashlib.sha256(b"".join(p.astype("<f4").tobytes() for p in layer)) for layer in parts]
    return np.array([list(digest.digest()) for digest in found], np.uint8)


def make_random(folder: Path) -> None:
    """The golden of a small random checkpoint."""
    weights = dense(folder, three=True)
    golden = np.load(folder / "golden.npz")
    check_agreement(folder.name, Oracle(folder, dense(folder, three=False)), golden)
    oracle = Oracle(folder, weights)
    random, drawn = np.random.default_rng(3), 0
    arrays = {"weights": digests(weights)}
    for p in range(4):
        ids = golden[f"p{p}_ids"].tolist()
        while (found := prompt(oracle, ids)) is None:
            drawn += 1
            ids = random.integers(SPECIAL_BELOW, golden["p0_logits"].size, len(ids)).tolist()
        arrays |= {f"p{p}_{key}": value for key, value in found.items()}
    np.savez_compressed(folder / "golden_3bit.npz", **arrays)
    print(f"{folder.name}: written, prompts were drawn {drawn} times", flush=True)


def check_embedded(oracle: Oracle, golden: dict[str, Any]) -> None:
    """Fail unless the embedded model gives what transformers did."""
    worst = 0.0
    for case in golden["prompts"]:
        found = oracle.run([*case["ids"], *case["greedy_ids"][:-1]])
        logits = found.logits[-len(case["greedy_ids"]) :]
        top = np.take_along_axis(logits[:8], np.array(case["step_top20_ids"]), axis=-1)
        worst = max(worst, float(np.abs(top - case["step_top20_logits"]).max()))
        if found.margins.min() >= TIE:
            assert logits.argmax(axis=-1).tolist() == case["greedy_ids"], case["name"]
    print(f"embedded: with 4-bit experts {worst:.1e} from transformers", flush=True)
    assert worst < AGREES
    assert abs(mean_nll(oracle, golden) - golden["perplexity"]["mean_nll"]) < AGREES


def mean_nll(oracle: Oracle, golden: dict[str, Any]) -> float:
    """Of the text that comes along."""
    ids = golden["perplexity"]["ids"]
    return float(nll(oracle.run(ids).logits, ids).mean(dtype=np.float64))


def answer(oracle: Oracle, case: dict[str, Any]) -> dict[str, Any]:
    """A greedy answer of the embedded model, and the most likely tokens of its first steps.

    The prompt loses its first tokens until no expert is a matter of rounding.
    """
    for start in range(len(case["ids"])):
        ids = case["ids"][start:]
        if oracle.run(ids).margins.min() < TIE:
            continue
        tokens = oracle.greedy(ids, len(case["greedy_ids"]))
        found = oracle.run([*ids, *tokens[:-1]])
        if found.margins.min() >= TIE:
            break
    print(f"{case['name']}: from token {start}, margins from {found.margins.min():.1e}", flush=True)
    logits = found.logits[-len(tokens) :]
    assert logits.argmax(axis=-1).tolist() == tokens
    top = np.argsort(-logits[:8], axis=-1, kind="stable")[:, :20]
    highest = np.take_along_axis(logits[:8], top, axis=-1)
    return {
        "name": case["name"],
        "ids": ids,
        "greedy_ids": tokens,
        "greedy_gap": rounded(gap(logits, 1)),
        "logit_std": rounded(logits[:8].std(axis=-1)),
        "step_top20_ids": top.tolist(),
        "step_top20_logits": rounded(highest),
    }


def rounded(values: F32) -> Any:
    """As numbers of a JSON file, to 1e-5."""
    return values.astype(np.float64).round(5).tolist()


def make_embedded() -> None:
    """The golden of the embedded model."""
    golden = json.loads((EMBEDDED_GOLDEN / "golden.json").read_text())
    check_embedded(Oracle(EMBEDDED, dense(EMBEDDED, three=False)), golden)
    weights = dense(EMBEDDED, three=True)
    oracle = Oracle(EMBEDDED, weights)
    made = {
        "prompts": [answer(oracle, case) for case in golden["prompts"]],
        "mean_nll": mean_nll(oracle, golden),
        "weights": [bytes(layer).hex() for layer in digests(weights)],
    }
    (EMBEDDED_GOLDEN / "golden_3bit.json").write_text(json.dumps(made) + "\n")
    print("embedded: written", flush=True)


def main() -> None:
    """Make those named, or all."""
    names = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*names, EMBEDDED_GOLDEN.name])
    mx.set_default_device(mx.cpu)
    for name in parser.parse_args().names:
        try:
            make_embedded() if name == EMBEDDED_GOLDEN.name else make_random(GOLDENS / name)
        except NoFourBitsError as error:
            print(f"{error}: none of 3 bits are derived", flush=True)


if __name__ == "__main__":
    main()
