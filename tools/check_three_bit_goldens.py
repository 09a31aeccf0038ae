"""Has transformers compute what tests/goldens/*/golden_3bit.npz says, which mlx-lm computed.

    python -P tools/check_three_bit_goldens.py [NAME ...]

From the repository root, with ``pip install torch transformers`` (2.13 and 5.24). Both get the same
float32 weights, from ``three_bit_weights.py``. It prints how far the logits at a prompt's last
position and the likelihoods are from the goldens (at most 3.8e-5 and 3.2e-5 with these versions on
an x86-64 CPU), and fails unless they are within 1e-4 and all greedy tokens equal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parent))

from three_bit_weights import F32, GOLDENS, dense, nll

AGREES = 1e-4
LESS_ONE = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm")
"""Norms whose weights the MLX files of Qwen3-Next and Qwen3.5 hold with 1 added."""


def named_for_transformers(family: str, weights: dict[str, F32]) -> dict[str, torch.Tensor]:
    """Weights of an MLX file under transformers' names, and in its shapes."""
    old = {name.removeprefix("language_model."): values for name, values in weights.items()}
    new = {}
    for name, values in old.items():
        module = name.removesuffix(".weight")
        parent, _, last = module.rpartition(".")
        if ".switch_mlp." in name or last == "unembed_out":
            if last == "gate_proj":
                up = old[f"{parent}.up_proj.weight"]
                block = parent.removesuffix("switch_mlp") + "experts."
                new[block + "gate_up_proj"] = np.concatenate([values, up], axis=1)
                new[block + "down_proj"] = old[f"{parent}.down_proj.weight"]
        elif last == "embed_q":
            both = [values.swapaxes(1, 2), old[f"{parent}.unembed_out.weight"]]
            joined = np.concatenate(both, axis=1)
            new[f"{parent}.kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
        elif last == "conv1d":
            new[name] = values.transpose(0, 2, 1)
        elif family in ("qwen3_next", "qwen3_5_moe") and module.endswith(LESS_ONE):
            new[name] = values - 1
        else:
            new[name.replace("router.layer", "router")] = values
    if family == "mixtral":
        new = {name.replace("block_sparse_moe", "mlp"): values for name, values in new.items()}
    return {name: torch.tensor(np.array(values)) for name, values in new.items()}


def model_of(folder: Path) -> Any:
    """transformers' model of a checkpoint with 3-bit experts, in float32."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    config = {key: value for key, value in config.items() if "quantization" not in key}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager"
    )
    model.load_state_dict(named_for_transformers(folder.name, dense(folder, three=True)))
    return model.eval()


def check(folder: Path) -> None:
    """Compare a family's four prompts."""
    model, golden, far = model_of(folder), np.load(folder / "golden_3bit.npz"), np.zeros(2)
    for p in range(4):
        ids, tokens = golden[f"p{p}_ids"].tolist(), golden[f"p{p}_greedy"].tolist()
        with torch.no_grad():
            answer = model(torch.tensor([ids + tokens[:-1]]), use_cache=False)
        logits = answer.logits[0].numpy()
        assert logits[-len(tokens) :].argmax(axis=-1).tolist() == tokens, folder.name
        last = np.abs(logits[len(ids) - 1] - golden[f"p{p}_logits"]).max()
        likelihoods = np.abs(nll(logits[: len(ids)], ids) - golden[f"p{p}_nll"])
        far = np.maximum(far, [last, likelihoods.max(initial=0)])
    print(f"{folder.name}: logits {far[0]:.1e}, likelihoods {far[1]:.1e}", flush=True)
    assert far.max() < AGREES, folder.name


if __name__ == "__main__":
    every = sorted(path.parent.name for path in GOLDENS.glob("*/golden_3bit.npz"))
    for name in sys.argv[1:] or every:
        check(GOLDENS / name)
