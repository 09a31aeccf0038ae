"""Measure the mlx backend on a GPU.

    python tools/measure_mlx.py speed [--small]
    python tools/measure_mlx.py layers [--small]
    python tools/measure_mlx.py split [--small]
    python tools/measure_mlx.py identity

``speed`` makes a random checkpoint of four layers in the shape of a model with 35 billion
parameters (256 experts, hidden 2048, intermediate 512), and lets the engine and mlx-lm generate
from it by turns, each in a process of its own, with everything in the GPU's memory; it needs
mlx-lm. ``layers`` compares what a layer adds to a generated token (from tokens through half of the
layers) with its operations alone, for the embedded model and for that checkpoint. The others
compute with the embedded model: ``split`` says what the time of a token is made of, with all
experts in slots and with fewer slots; ``identity`` compares bits.
``--small``, a smaller checkpoint and fewer tokens, only tries the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from aegis import Engine

TOOLS = Path(__file__).resolve().parent
sys.path.append(str(TOOLS))

import mlx_token_times  # noqa: E402 - python -P leaves this folder out
from mlx_token_times import CAP, PROMPT, SKIPPED, heat  # noqa: E402

GOLDENS = TOOLS.parent / "tests/goldens"
ROUNDS, WARM_ROUNDS = 6, 2
TOKENS = 300
EXPERTS, CHOSEN, LAYERS = 256, 8, 4
WAYS: list[dict[str, Any]] = [
    {},
    {"max_slots": 8},
    {"max_slots": 60, "guess_width": 16},
    {"max_slots": 240, "guess": "none"},
    {"max_slots": 333, "policy": "random"},
]


def checkpoint(folder: Path, small: bool) -> Path:
    """Write the random checkpoint, in bfloat16 and 4 bits."""
    hidden, inner, vocab = (256, 64, 512) if small else (2048, 512, 32768)
    heads, kv_heads, width = (4, 2, 64) if small else (16, 2, 128)
    weights: dict[str, Any] = {}
    formats: dict[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}

    def matrix(name: str, *shape: int, bits: int = 4) -> None:
        values = mx.random.normal(shape) * shape[-1] ** -0.5
        parts = mx.quantize(values.astype(mx.bfloat16), group_size=64, bits=bits)
        mx.eval(parts)
        weights.update(
            zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), parts, strict=True)
        )
        if bits != 4:
            formats[name] = {"group_size": 64, "bits": bits}

    def vector(name: str, size: int, middle: float) -> None:
        weights[name] = (mx.random.normal((size,)) * 0.02 + middle).astype(mx.bfloat16)

    matrix("model.embed_tokens", vocab, hidden)
    matrix("lm_head", vocab, hidden)
    vector("model.norm.weight", hidden, 1.0)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        vector(at + "input_layernorm.weight", hidden, 1.0)
        vector(at + "post_attention_layernorm.weight", hidden, 1.0)
        for name, rows in (("q", heads * width), ("k", kv_heads * width), ("v", kv_heads * width)):
            matrix(f"{at}self_attn.{name}_proj", rows, hidden)
            vector(f"{at}self_attn.{name}_proj.bias", rows, 0.0)
        matrix(at + "self_attn.o_proj", hidden, heads * width)
        matrix(at + "mlp.gate", EXPERTS, hidden, bits=8)
        matrix(at + "mlp.shared_expert_gate", 1, hidden, bits=8)
        for name, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        ):
            matrix(f"{at}mlp.switch_mlp.{name}_proj", EXPERTS, *shape)
            matrix(f"{at}mlp.shared_expert.{name}_proj", *shape)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    golden = json.loads((GOLDENS / "qwen2_moe/config.json").read_text())
    config = golden | {
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        "max_position_embeddings": 4096,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "quantization": formats,
        "quantization_config": formats,
    }
    config.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((GOLDENS / "qwen2_moe" / name).read_bytes())
    weights.clear()
    mx.clear_cache()
    return folder


def tokens_per_s(generate: Callable[[int], Iterable[object]], count: int = TOKENS) -> float:
    """Decode speed, without the prompt and the first tokens."""
    stamps = [time.perf_counter() for _ in generate(count)]
    return (len(stamps) - SKIPPED - 1) / (stamps[-1] - stamps[SKIPPED])


def serve(generate: Callable[[int], Iterable[object]]) -> None:
    """A figure for every line that comes, the first when everything is ready."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(tokens_per_s(generate), flush=True)


def serve_ours(folder: Path) -> None:
    """With every expert in a slot, which takes some tokens."""
    with Engine.open(folder, cap=CAP, backend="mlx", context=1024) as engine:
        heat(engine)
        serve(lambda count: engine.generate(PROMPT, count, ignore_eos=True))


def serve_mlx_lm(folder: Path) -> None:
    """The same with mlx-lm."""
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, lazy=False)
    serve(lambda count: generate_step(mx.array(PROMPT), model, max_tokens=count))


def speed(small: bool) -> None:
    """Both by turns; the first rounds do not count."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name), small)
        figures: dict[str, list[float]] = {"aegis": [], "mlx-lm": []}
        running: dict[str, Any] = {}
        for who in figures:
            command = [sys.executable, "-P", __file__, "serve", "--who", who, "--folder", name]
            pipe = subprocess.PIPE
            running[who] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            assert running[who].stdout.readline() == "ready\n", f"{who} did not start"
        for _ in range(ROUNDS):
            for who, process in running.items():
                process.stdin.write("\n")
                process.stdin.flush()
                figures[who].append(float(process.stdout.readline()))
        for process in running.values():
            process.stdin.close()
            process.wait()
    medians = {who: statistics.median(found[WARM_ROUNDS:]) for who, found in figures.items()}
    for who, found in figures.items():
        rounds = " ".join(f"{figure:.0f}" for figure in found)
        print(f"{who}: median {medians[who]:.0f} tokens/s of rounds {rounds}")
    print(f"ratio {medians['aegis'] / medians['mlx-lm']:.2f}")


def layers(small: bool) -> None:
    """A layer in a token against its operations alone."""
    with tempfile.TemporaryDirectory() as name:
        mlx_token_times.layers([None, checkpoint(Path(name), small)], small)


def identity() -> None:
    """The embedded model's bits and tokens at several numbers of slots and ways to guess."""
    ids = [(i * 37 + i * i * 11) % 500 for i in range(290)]
    for numbers in ("f32", "bf16"):
        first = None
        for way in WAYS:
            options = {"backend": "mlx", "activations": numbers, "context": 512, **way}
            with Engine.open(cap="16GiB", **options) as engine:
                found = (engine.nll(ids).tobytes(), list(engine.generate(ids, 40, ignore_eos=True)))
            first = first or found
            print(f"{numbers} {way}: {'the same' if found == first else 'DIFFERENT'}")


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    sized = {"speed": speed, "layers": layers, "split": mlx_token_times.split}
    plain = {"identity": identity}
    parser.add_argument("what", choices=[*sized, *plain, "serve"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--who", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "serve":
        (serve_ours if options.who == "aegis" else serve_mlx_lm)(options.folder)
    elif options.what in sized:
        sized[options.what](options.small)
    else:
        plain[options.what]()


if __name__ == "__main__":
    main()
