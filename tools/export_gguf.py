"""Write a store of the family qwen3_5_moe as a GGUF file: the same weights for other engines.

    python -P tools/export_gguf.py synthetic:qwen3.6-35b-a3b OUT.gguf [--type q4_k]

The first argument is the folder of a store in the layout of the C++ kernels, or synthetic:SHAPE,
whose store is written into the cache first. The architecture is ``qwen35moe``. 4-bit matrices are
written as blocks of the type named, or of ``q4_1`` where that cannot be: ``q4_k`` wants rows of a
multiple of 256 and biases of one sign (see gguf_blocks.py). Routers, norms and all else are written
as float32, exactly; ``--type f32`` writes everything so, to check places on a small model. There is
no tokenizer in it: ids go in and logits come out. The store is read expert by expert.
"""

from __future__ import annotations

import argparse
import math
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.fileio import UncachedReader, aligned_buffer, sync_folder
from aegis.checkpoint.layout import PARTS, ResidentTensor
from aegis.checkpoint.storage import free_nbytes
from aegis.checkpoint.store import Store
from aegis.cli.progress import ProgressBar
from aegis.errors import AegisError
from aegis.kernels.base import DeltaSpec, Format, Weight
from aegis.kernels.formats import MlxArrays, dequantize_mlx, to_f32, unpack
from aegis.kernels.sizes import LANES, block_inputs, block_nbytes
from aegis.models import family
from aegis.models.decoder import Description
from aegis.planner import format_size
from aegis.synthetic.names import is_synthetic

sys.path.append(str(Path(__file__).resolve().parent))

from gguf_blocks import BLOCK, BLOCK_SIZES, SUPER, Kind, blocks
from gguf_file import ALIGN, File, Tensor

U8 = NDArray[np.uint8]
ARCH = "qwen35moe"
FAMILY = "qwen3_5_moe"
_NUMBERS_AT_ONCE = 1 << 22
_DEFAULT_SECTIONS = (11, 11, 10)
"""How the rotated channels are divided among three positions, which text has alike."""
_STEPS = ("in_proj_a", "in_proj_b")
"""A row per head, whose biases can be of both signs: more than q4_k holds."""
_EXPERTS = dict(zip(PARTS, ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), strict=True))
_TOP = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}
_TOP["lm_head"] = "output.weight"
_OF_LAYER = {
    "input_layernorm": "attn_norm.weight",
    "post_attention_layernorm": "post_attention_norm.weight",
    "self_attn.q_proj": "attn_q.weight",
    "self_attn.k_proj": "attn_k.weight",
    "self_attn.v_proj": "attn_v.weight",
    "self_attn.o_proj": "attn_output.weight",
    "self_attn.q_norm": "attn_q_norm.weight",
    "self_attn.k_norm": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv": "attn_qkv.weight",
    "linear_attn.in_proj_z": "attn_gate.weight",
    "linear_attn.in_proj_a": "ssm_alpha.weight",
    "linear_attn.in_proj_b": "ssm_beta.weight",
    "linear_attn.out_proj": "ssm_out.weight",
    "linear_attn.conv1d": "ssm_conv1d.weight",
    "linear_attn.norm": "ssm_norm.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj": "ffn_down_shexp.weight",
}


@dataclass
class Exported:
    """What was written."""

    nbytes: int
    expert_nbytes: int
    """Bytes of one routed expert."""
    off: dict[str, float] = field(default_factory=dict)
    """For experts and for the other matrices: the farthest that a weight is from the store's, in
    steps from code to code."""


class Export:
    """The tensors and the description of one store."""

    def __init__(self, store: Store, kind: Kind) -> None:
        layout = store.layout
        if layout.model_type != FAMILY or layout.layout != "il16":
            raise AegisError(
                f"{store.path} holds a {layout.model_type} in layout {layout.layout}; only"
                f" {FAMILY} in layout il16 is exported, as --backend native converts it"
            )
        self._store, self._kind, self._layout = store, kind, layout
        self.model: Description = family(layout.model_type).describe(layout.config)
        delta = self.model.shape.delta
        assert delta is not None
        self._delta: DeltaSpec = delta
        self.off = {"experts": 0.0, "other matrices": 0.0}

    def tensors(self) -> list[Tensor]:
        """All of them, in the order of the file."""
        found = [self._resident(name) for name in self._layout.resident]
        for index, layer in enumerate(self._layout.moe_layers):
            found += [self._experts(index, layer, part) for part in PARTS]
        return found

    def expert_nbytes(self) -> int:
        """Bytes of one routed expert in the file."""
        parts = (self._layout.experts.segments[part] for part in PARTS)
        return sum(
            math.prod(part.shape) // weights * nbytes
            for part in parts
            for weights, nbytes in (BLOCK_SIZES[self._kind_of(part.shape, part.format)],)
        )

    def _kind_of(self, shape: tuple[int, ...], fmt: Format, name: str = "") -> str:
        if self._kind == "f32" or fmt.kind != "affine" or fmt.bits != 4 or len(shape) != 2:
            return "f32"
        return "q4_1" if shape[1] % SUPER or name.endswith(_STEPS) else self._kind

    def _resident(self, name: str) -> Tensor:
        entry = self._layout.resident[name]
        called = _called(name)
        if len(entry.shape) == 1:
            values = self._vector(name)
            return Tensor(called, values.shape, "f32", lambda: iter([_bytes(values)]))
        shape = entry.shape[1:] if entry.shape[0] == 1 else entry.shape
        kind = self._kind_of(entry.shape, entry.format, name)
        return Tensor(called, shape, kind, lambda: self._matrix(name, entry, kind))

    def _vector(self, name: str) -> NDArray[np.float32]:
        entry = self._layout.resident[name]
        values = to_f32(self._arrays(entry, 0, entry.shape[0]).weight, entry.format)
        heads = self._order(1)
        if name.endswith("A_log"):
            return -np.exp(values[heads])
        if name.endswith("dt_bias"):
            return values[heads]
        if name.endswith("conv1d"):
            taps = values.reshape(self._delta.conv_kernel_dim, self._delta.conv_dim).T
            return np.ascontiguousarray(taps[self._channels()])
        return values

    def _order(self, width: int) -> NDArray[np.intp]:
        """Where value heads of a width come from: here the heads of a key head are neighbours, in
        the file the first of every key head come first."""
        keys = self._delta.num_key_heads
        heads = np.arange(self._delta.num_value_heads * width)
        return heads.reshape(keys, -1, width).transpose(1, 0, 2).reshape(-1)

    def _channels(self) -> NDArray[np.intp]:
        """Queries and keys as they are, then the values' heads in order."""
        before = 2 * self._delta.key_dim
        values = before + self._order(self._delta.value_head_dim)
        return np.concatenate([np.arange(before), values])

    def _rows(self, name: str) -> NDArray[np.intp] | None:
        if name.endswith("in_proj_qkv"):
            return self._channels()
        if name.endswith("in_proj_z"):
            return self._order(self._delta.value_head_dim)
        return self._order(1) if name.endswith(("in_proj_a", "in_proj_b")) else None

    def _matrix(self, name: str, entry: ResidentTensor, kind: str) -> Iterator[U8]:
        rows, cols = entry.shape
        order = self._rows(name)
        inputs = self._order(self._delta.value_head_dim) if name.endswith("out_proj") else None
        step = rows if order is not None else max(LANES, _NUMBERS_AT_ONCE // cols // LANES * LANES)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            arrays = self._arrays(entry, first, count)
            if order is not None:
                arrays = _of_rows(arrays, order)
            yield self._encoded(arrays, entry.format, kind, "other matrices", inputs)

    def _experts(self, index: int, layer: int, part: str) -> Tensor:
        segment = self._layout.experts.segments[part]
        kind = self._kind_of(segment.shape, segment.format)
        path, stride = self._store.expert_paths()[index], self._layout.experts.stride

        def pieces() -> Iterator[U8]:
            data = aligned_buffer(segment.nbytes)
            with UncachedReader(path) as reader:
                for expert in range(self._layout.num_experts):
                    reader.read_into(expert * stride + segment.offset, data)
                    arrays = unpack(Weight(segment.shape, segment.format, "il16", data))
                    yield self._encoded(arrays, segment.format, kind, "experts")

        shape = (self._layout.num_experts, *segment.shape)
        return Tensor(f"blk.{layer}.{_EXPERTS[part]}.weight", shape, kind, pieces)

    def _encoded(
        self,
        arrays: MlxArrays,
        fmt: Format,
        kind: str,
        what: str,
        inputs: NDArray[np.intp] | None = None,
    ) -> U8:
        if kind == "f32":
            values = dequantize_mlx(arrays, fmt)
            return _bytes(values if inputs is None else values[:, inputs])
        assert arrays.scales is not None
        assert arrays.biases is not None
        pairs = np.ascontiguousarray(arrays.weight).view(np.uint8)
        each = fmt.group_size // BLOCK
        scales, biases = (
            np.repeat(to_f32(raw, fmt), each, axis=1) for raw in (arrays.scales, arrays.biases)
        )
        if inputs is not None:
            of = inputs[::BLOCK] // BLOCK
            pairs = pairs.reshape(len(pairs), -1, BLOCK // 2)[:, of]
            scales, biases = scales[:, of], biases[:, of]
        found, off = blocks("q4_1" if kind == "q4_1" else "q4_k", pairs, scales, biases)
        self.off[what] = max(self.off[what], off)
        return found

    def _arrays(self, entry: ResidentTensor, first: int, count: int) -> MlxArrays:
        """Rows of a resident tensor; the first one a multiple of 16."""
        shape, fmt, start, size = entry.shape, entry.format, entry.offset, entry.nbytes
        if len(shape) == 2:
            each = shape[1] // block_inputs(fmt) * block_nbytes(fmt)
            start += first // LANES * each
            size = -(-count // LANES) * each
            shape = (count, shape[1])
        data = aligned_buffer(size)
        with UncachedReader(self._store.resident_path) as reader:
            reader.read_into(start, data)
        return unpack(Weight(shape, fmt, "il16", data))

    def description(self) -> dict[str, Any]:
        """The keys and values of the file; ints are uint32."""
        model, shape, delta = self.model, self.model.shape, self._delta
        rope = self._layout.config.get("rope_parameters") or {}
        sections = [*rope.get("mrope_section", _DEFAULT_SECTIONS), 0, 0, 0, 0][:4]
        full = [layer not in shape.delta_layers for layer in range(shape.num_hidden_layers)]
        own = {
            "context_length": shape.max_position_embeddings,
            "embedding_length": shape.hidden_size,
            "block_count": shape.num_hidden_layers,
            "vocab_size": shape.vocab_size,
            "attention.head_count": shape.num_attention_heads,
            "attention.head_count_kv": shape.num_key_value_heads,
            "attention.key_length": shape.head_dim,
            "attention.value_length": shape.head_dim,
            "attention.layer_norm_rms_epsilon": model.rms_norm_eps,
            "attention.recurrent_layers": [not f for f in full],
            "expert_count": shape.num_experts,
            "expert_used_count": shape.num_experts_per_tok,
            "expert_feed_forward_length": shape.moe_intermediate_size,
            "expert_shared_feed_forward_length": shape.shared_expert_intermediate_size,
            "rope.freq_base": model.rope_theta,
            "rope.dimension_count": model.rotary_dim or shape.head_dim,
            "rope.dimension_sections": sections,
            "ssm.conv_kernel": delta.conv_kernel_dim,
            "ssm.state_size": delta.key_head_dim,
            "ssm.group_count": delta.num_key_heads,
            "ssm.time_step_rank": delta.num_value_heads,
            "ssm.inner_size": delta.value_dim,
            "full_attention_interval": full.index(True) + 1 if any(full) else len(full) + 1,
        }
        return {
            "general.architecture": ARCH,
            "general.name": self._store.path.name,
            "general.alignment": ALIGN,
            "general.quantization_version": 2,
            "tokenizer.ggml.model": "none",
        } | {f"{ARCH}.{key}": value for key, value in own.items()}


def _of_rows(arrays: MlxArrays, rows: NDArray[np.intp]) -> MlxArrays:
    weight, scales, biases = arrays
    return MlxArrays(
        weight[rows],
        None if scales is None else scales[rows],
        None if biases is None else biases[rows],
    )


def _called(name: str) -> str:
    """A resident tensor's name in the file."""
    if name in _TOP:
        return _TOP[name]
    _, layer, inner = name.split(".", 2)
    return f"blk.{layer}.{_OF_LAYER[inner]}"


def _bytes(values: NDArray[np.float32]) -> U8:
    return np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8)


def export(store: Store, target: Path, kind: Kind, quiet: bool = False) -> Exported:
    """Write the file: beside its place first, so that it is whole or not there.

    Raises:
        AegisError: the store is of another family or layout, or there is no room.
        OSError: it cannot be written.
    """
    made = Export(store, kind)
    file = File(made.description(), made.tensors())
    free = free_nbytes(target.absolute().parent)
    if free is not None and free < file.nbytes:
        raise AegisError(
            f"{target} takes {format_size(file.nbytes)}, but {format_size(free)} are free there;"
            " name a place with more room"
        )
    bar = ProgressBar("exporting", quiet)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        file.write(beside, bar)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(target.absolute().parent)
    return Exported(file.nbytes, made.expert_nbytes(), made.off)


def opened(model: str) -> Store:
    """The store of a folder, or of random weights, which is written first if it is not there."""
    if not is_synthetic(model):
        return Store.open(model)
    from aegis.synthetic.recipe import cached_path, recipe
    from aegis.synthetic.write import make

    made = recipe(model)
    path = cached_path(made, "il16")
    path.parent.mkdir(parents=True, exist_ok=True)
    return make(made, path, "il16", progress=ProgressBar("writing"))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store", help="the folder of a store, or synthetic:SHAPE")
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=list(get_args(Kind)), default="q4_k")
    options = parser.parse_args()
    try:
        done = export(opened(options.store), options.target, options.type)
    except (AegisError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: {done.nbytes / 1e9:.2f} GB, {options.type}")
    print(f"an expert takes {done.expert_nbytes} bytes")
    for what, off in done.off.items():
        exact = "exactly the store's" if off == 0 else f"within {off:.3g} of a step between codes"
        print(f"{what}: {exact}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
