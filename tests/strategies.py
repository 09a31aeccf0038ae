"""Random small checkpoints of every family in the format of mlx-lm, and strategies for them.

``write_checkpoint(path, seed, **choices)`` is deterministic: the same arguments give the same
bytes. Every module draws from a generator of its own, so changing how one is stored leaves all
others as they were; ``expert_bits=3`` and ``expert_bits=4, expert_code_bits=3`` are the same model.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from families import FAMILIES
from hypothesis import strategies as st

from aegis.checkpoint.config import ModelConfig
from aegis.checkpoint.tensor_map import ExpertNames
from aegis.kernels import formats
from aegis.kernels.sizes import CODE_BITS
from aegis.models import family

TOKENIZER = Path(__file__).parent / "goldens" / "qwen2_moe"

Tensor = tuple[str, np.ndarray[Any, np.dtype[Any]]]
"""A safetensors type name and raw numbers."""


@dataclass(frozen=True)
class Choices:
    """A small model's shape and how it is stored; a family heeds what it has a word for."""

    model_type: str = "qwen2_moe"
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 6
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64
    """0: no shared expert."""
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 2
    sliding_window: int = 16
    """Positions that a layer sees, where the family has layers that do not see all."""
    dense_layers: tuple[int, ...] = ()
    """Layers without experts; where only the first can be, as many of those."""
    n_group: int = 1
    topk_group: int = 1
    vocab_size: int = 512
    """At least 512, the size of the tokenizer that is written too."""
    tie_word_embeddings: bool = False
    norm_topk_prob: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False
    """Where the family leaves it open."""
    bits: tuple[int, ...] = (4,)
    """The default width, then others that modules draw from."""
    group_size: int = 64
    """Of every module."""
    expert_bits: int | None = None
    """The width of every expert matrix; None: drawn per matrix."""
    expert_code_bits: int | None = None
    """Expert codes are below 2 ** this, whatever width they are stored at; None: all codes."""
    mxfp4: bool = False
    """Experts are quantised as this, unless ``expert_bits`` says otherwise; nothing else is."""
    dense_router: bool = False
    dense: bool = False
    """Nothing is quantised, as in a plain bfloat16 checkpoint."""
    separate_experts: bool = False
    """``experts.N.*`` rather than stacked ``switch_mlp``."""
    fused_experts: bool = False
    """Gate and up projections in one tensor, where the family has such a spelling."""
    blocks: bool = False
    """Experts of mxfp4, or plain ones, as their publisher writes them, where the family has such a
    spelling."""
    shards: int = 1
    """Above 1: that many files and an index."""


def write_checkpoint(path: str | Path, seed: int = 0, **choices: Any) -> Path:
    """Write a checkpoint folder; ``choices`` are fields of ``Choices``."""
    return write_choices(path, seed, Choices(**choices))


def write_choices(path: str | Path, seed: int, choices: Choices) -> Path:
    """Write the checkpoint folder that ``choices`` and ``seed`` describe."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    builder = _Builder(seed, choices)
    builder.build()
    write_config(folder, config_of(choices, builder.entries))
    _write_files(folder, builder.tensors, choices.shards)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def config_of(choices: Choices, entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """config.json; ``entries`` are the modules that are not quantised as the default says."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts_per_tok",
        "vocab_size",
        "tie_word_embeddings",
        "model_type",
    )
    config: dict[str, Any] = {name: getattr(choices, name) for name in names}
    config |= FAMILIES[choices.model_type](choices)
    config |= {
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    if not choices.dense:
        default = {"group_size": choices.group_size, "bits": choices.bits[0], "mode": "affine"}
        config["quantization"] = config["quantization_config"] = default | entries
    elif choices.mxfp4:
        method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        config["quantization_config"] = method
    return config


class _Builder:
    """Draws every tensor of a checkpoint."""

    def __init__(self, seed: int, choices: Choices) -> None:
        self._seed, self._choices = seed, choices
        self.tensors: dict[str, Tensor] = {}
        self.entries: dict[str, dict[str, Any]] = {}

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode())])

    def build(self) -> None:
        """Draw everything that the family's own description names."""
        config = ModelConfig(config_of(self._choices, {}))
        wanted = family(self._choices.model_type).tensor_map(config)
        for entry in wanted.resident:
            source = entry.source or entry.name
            name = source if source.startswith("lm_head") else f"model.{source}"
            if len(entry.shape) == 2:
                stack, cols = max(entry.stack, 1), entry.shape[1]
                rows = entry.source_rows or entry.shape[0] // stack
                self._resident(entry.name, name, (rows, cols), entry.stack)
            elif entry.taps:
                self._convolution(f"{name}.weight", entry.shape[0] // entry.taps, entry.taps)
            elif name.endswith(("_bias", ".bias")):
                self._vector(name, entry.shape[0], 0.0)
            elif name.endswith((".A_log", ".sinks")):
                self._vector(name, entry.shape[0], -2.0 if name.endswith(".A_log") else 1.0)
            else:
                self._vector(f"{name}.weight", entry.shape[0], 1.0)
        for layer in wanted.experts.layers:
            self._experts(wanted.experts, layer)

    def _resident(self, kind: str, name: str, shape: tuple[int, int], stack: int) -> None:
        gate = kind.endswith(".mlp.gate")
        gain = 3.0 if gate else {"embed_tokens": 8.0, "lm_head": 2.0}.get(kind, 1.0)
        bits = 0 if gate and self._choices.dense_router else self._draw_bits(name)
        self._add(name, self._weight(name, shape, bits, bits, gain, stack), bits)

    def _experts(self, names: ExpertNames, layer: int) -> None:
        c = self._choices
        parts: dict[str, tuple[int, dict[str, Tensor]]] = {}
        for part, shape in names.shapes.items():
            name = "model." + names.stacked.format(layer=layer, part=part)
            if len(shape) == 1:
                parts[part] = 0, {"": self._numbers(name, (c.num_experts, *shape), 0.0)}
                continue
            rows, cols = shape
            if c.mxfp4 and not c.expert_bits:
                parts[part] = 4, self._mxfp4(name, (c.num_experts, rows, cols))
                continue
            # One tensor has one width, also where it holds two matrices.
            drawn = name.replace("up_proj", "gate_proj") if c.fused_experts else name
            bits = c.expert_bits or self._draw_bits(drawn)
            code_bits = c.expert_code_bits or bits
            matrices = self._weight(name, (rows, cols), bits, code_bits, stack=c.num_experts)
            parts[part] = bits, matrices
        spelled = c.blocks and names.blocks is not None
        if spelled and (c.dense or (c.mxfp4 and not c.expert_bits)):
            assert names.blocks is not None
            self._blocks(*(f"model.{name.format(layer=layer)}" for name in names.blocks), parts)
            return
        if c.fused_experts and names.fused is not None:
            both, down = (f"model.{name.format(layer=layer)}" for name in names.fused)
            (bits, gate), (_, up) = parts["gate_proj"], parts["up_proj"]
            self._add(both, _behind(gate, up), bits)
            self._add(down, parts["down_proj"][1], parts["down_proj"][0])
            return
        for part, (bits, stacked) in parts.items():
            if c.separate_experts:
                self._separate(names, layer, part, bits, stacked)
            else:
                self._add("model." + names.stacked.format(layer=layer, part=part), stacked, bits)

    def _separate(
        self, names: ExpertNames, layer: int, part: str, bits: int, stacked: Mapping[str, Tensor]
    ) -> None:
        word = names.separate_parts.get(part, part)
        for expert in range(names.num_experts):
            one = {suffix: (dtype, data[expert]) for suffix, (dtype, data) in stacked.items()}
            name = names.separate.format(layer=layer, part=word, expert=expert)
            self._add(f"model.{name}", one, bits)

    def _draw_bits(self, name: str) -> int:
        return int(self._rng(name + ".bits").choice(self._choices.bits))

    def _add(self, name: str, parts: Mapping[str, Tensor], bits: int) -> None:
        for suffix, tensor in parts.items():
            self.tensors[f"{name}.{suffix}" if suffix else name] = tensor
        if "scales" in parts and "biases" not in parts:
            self.entries[name] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        elif "scales" in parts and bits != self._choices.bits[0]:
            self.entries[name] = {"group_size": self._choices.group_size, "bits": bits}

    def _blocks(
        self, both: str, down: str, parts: Mapping[str, tuple[int, Mapping[str, Tensor]]]
    ) -> None:
        """Rows of gate and up projections in turn; codes by the byte, 16 to a scale. Plain matrices
        are transposed."""
        for name, sources in ((both, ("gate_proj", "up_proj")), (down, ("down_proj",))):
            for suffix, ours in (("_blocks", "weight"), ("_scales", "scales"), ("_bias", "")):
                owners = [source if ours else f"{source}.bias" for source in sources]
                found = [
                    parts[owner][1][ours]
                    for owner in owners
                    if owner in parts and ours in parts[owner][1]
                ]
                if not found:
                    continue
                data = np.stack([array for _, array in found], axis=2)
                data = data.reshape(len(data), -1, *data.shape[3:])
                if ours == "weight" and found[0][0] != "U32":
                    self.tensors[name] = found[0][0], np.swapaxes(data, 1, 2)
                    continue
                if ours == "weight":
                    data = data.view(np.uint8).reshape(*data.shape[:2], -1, 16)
                kind = "U8" if ours else found[0][0]
                self.tensors[name + suffix] = kind, np.ascontiguousarray(data)

    def _weight(
        self,
        name: str,
        shape: tuple[int, int],
        bits: int,
        code_bits: int,
        gain: float = 1.0,
        stack: int = 0,
    ) -> dict[str, Tensor]:
        """Values are about uniform with unit variance per input, times ``gain``."""
        rng = self._rng(name)
        full = (stack, *shape) if stack else shape
        width = gain * math.sqrt(12 / shape[1])
        if self._choices.dense or not bits:
            values = rng.uniform(-width / 2, width / 2, full).astype(np.float32)
            return {"weight": ("BF16", formats.f32_to_bf16(values))}
        codes = rng.integers(0, 1 << code_bits, full, dtype=np.uint8)
        groups = (*full[:-1], shape[1] // self._choices.group_size)
        scale = width / ((1 << code_bits) - 1) * np.exp(rng.normal(0, 0.2, groups))
        scales = np.where(rng.random(groups) < 0.5, scale, -scale)
        biases = scales * -((1 << code_bits) - 1) / 2
        return {
            "weight": ("U32", formats.pack_codes(codes, bits)),
            "scales": ("BF16", formats.f32_to_bf16(scales.astype(np.float32))),
            "biases": ("BF16", formats.f32_to_bf16(biases.astype(np.float32))),
        }

    def _mxfp4(self, name: str, shape: tuple[int, int, int]) -> dict[str, Tensor]:
        """Any codes, whose squares are 8.56 in the mean, so that values have about unit variance
        per input."""
        rng = self._rng(name)
        codes = rng.integers(0, 16, shape, dtype=np.uint8)
        usual = 127 - round(math.log2(math.sqrt(8.56 * shape[2])))
        groups = (*shape[:2], shape[2] // 32)
        scales = rng.integers(usual - 1, usual + 1, groups, dtype=np.uint8, endpoint=True)
        return {"weight": ("U32", formats.pack_codes(codes, 4)), "scales": ("U8", scales)}

    def _vector(self, name: str, size: int, mean: float) -> None:
        self.tensors[name] = self._numbers(name, (size,), mean)

    def _numbers(self, name: str, shape: tuple[int, ...], mean: float) -> Tensor:
        values = self._rng(name).normal(mean, 0.1, shape).astype(np.float32)
        return "BF16", formats.f32_to_bf16(values)

    def _convolution(self, name: str, channels: int, taps: int) -> None:
        """As MLX has it; every tap counts."""
        values = self._rng(name).normal(0.5, 0.3, (channels, taps, 1)).astype(np.float32)
        self.tensors[name] = ("BF16", formats.f32_to_bf16(values))


def _behind(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Two stacked weights as one: each expert's rows of the second behind those of the first."""
    return {
        suffix: (dtype, np.concatenate([data, second[suffix][1]], axis=1))
        for suffix, (dtype, data) in first.items()
    }


def _write_files(folder: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        # Taking every n-th tensor splits weights from their scales, as real shards do.
        part = {name: tensors[name] for name in names[shard::shards]}
        write_safetensors(folder / file, part)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, (dtype, data) in tensors.items():
        span = [offset, offset + data.nbytes]
        header[name] = {"dtype": dtype, "shape": list(data.shape), "data_offsets": span}
        offset += data.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, data in tensors.values():
            file.write(np.ascontiguousarray(data).tobytes())


@st.composite
def checkpoint_choices(draw: st.DrawFn, /, **fixed: Any) -> Choices:
    """Any small model that native and reference can run; ``fixed`` pins fields."""
    kv_heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([32, 64]))
    heads = kv_heads * draw(st.sampled_from([2, 4] if head_dim == 32 else [1, 2, 3]))
    experts = fixed.get("num_experts") or draw(st.integers(2, 12))
    chosen = fixed.get("num_experts_per_tok") or draw(st.integers(1, min(experts, 8)))
    layers = fixed.get("num_hidden_layers") or draw(st.integers(1, 3))
    groups = draw(st.sampled_from([n for n in (1, 2, 3) if experts % n == 0 and experts >= 2 * n]))
    kept = draw(st.integers(-(-chosen * groups // experts), groups))
    key_heads, value_dim = draw(st.integers(1, 2)), draw(st.sampled_from([16, 32, 64]))
    choices = Choices(
        model_type=draw(st.sampled_from(sorted(FAMILIES))),
        hidden_size=64 * draw(st.integers(1, 3)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=64 * draw(st.integers(1, 2)),
        shared_expert_intermediate_size=64 * draw(st.integers(0, 2)),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * draw(st.integers(1, 2)) * (64 // value_dim),
        linear_key_head_dim=draw(st.sampled_from([16, 48])),
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=draw(st.sampled_from([1, 2, 4])),
        full_attention_interval=draw(st.integers(1, 4)),
        sliding_window=draw(st.sampled_from([1, 3, 16, 33, 300])),
        dense_layers=tuple(draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))),
        n_group=groups,
        topk_group=kept,
        vocab_size=draw(st.sampled_from([512, 519, 528])),
        tie_word_embeddings=draw(st.booleans()),
        norm_topk_prob=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        bits=draw(st.permutations(CODE_BITS).flatmap(_prefixes)),
        group_size=draw(st.sampled_from([64, 32])),
        dense_router=draw(st.booleans()),
        separate_experts=draw(st.booleans()),
        fused_experts=draw(st.booleans()),
        mxfp4=draw(st.booleans()),
        blocks=draw(st.booleans()),
        shards=draw(st.integers(1, 3)),
    )
    return replace(choices, **fixed)


def _prefixes(widths: list[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.integers(1, len(widths)).map(lambda n: tuple(widths[:n]))


seeds = st.integers(0, 2**32 - 1)
"""Seeds of ``write_checkpoint``."""
