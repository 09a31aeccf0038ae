"""Names, shapes and spec of multi-head latent attention, for the families that have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aegis.checkpoint.tensor_map import HeadPart, ResidentName
from aegis.kernels.base import LatentAttentionSpec, LatentSizes
from aegis.models.base import submodule
from aegis.models.rotary import read_rotary, score_scale

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.kernels.base import Weight


def read_latent_attention(config: ModelConfig) -> LatentAttentionSpec:
    """The attention that a config describes.

    Raises:
        CheckpointError: a key is missing, mistyped or not implemented.
    """
    if not config.bool("rope_interleave", True):
        raise config.mistyped("rope_interleave", False, "true")
    sizes = LatentSizes(
        q_lora_rank=config.int("q_lora_rank", 0),
        kv_lora_rank=config.int("kv_lora_rank"),
        qk_nope_head_dim=config.int("qk_nope_head_dim"),
        qk_rope_head_dim=config.int("qk_rope_head_dim"),
        v_head_dim=config.int("v_head_dim"),
    )
    if sizes.qk_rope_head_dim % 2:
        raise config.mistyped("qk_rope_head_dim", sizes.qk_rope_head_dim, "an even number")
    rotary = read_rotary(config, sizes.qk_rope_head_dim)
    return LatentAttentionSpec(
        hidden_size=config.int("hidden_size"),
        num_attention_heads=config.int("num_attention_heads"),
        sizes=sizes,
        rms_norm_eps=config.float("rms_norm_eps"),
        inv_freq=rotary.inv_freq,
        scale=score_scale(rotary, sizes.query_dim),
        rotary_scale=rotary.scale,
    )


def latent_names(spec: LatentAttentionSpec, prefix: str) -> dict[str, ResidentName]:
    """The attention's tensors in a layer by their names there, in the order they are used.

    ``prefix``: the layer's. Publishers and older conversions have keys and values of a head, in
    terms of the latents, one behind the other in one matrix.
    """
    sizes, heads, hidden = spec.sizes, spec.num_attention_heads, spec.hidden_size
    queries, keys, values = heads * sizes.query_dim, sizes.qk_nope_head_dim, sizes.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (queries, hidden)}
    if sizes.q_lora_rank:
        shapes = {
            "q_a_proj": (sizes.q_lora_rank, hidden),
            "q_a_layernorm": (sizes.q_lora_rank,),
            "q_b_proj": (queries, sizes.q_lora_rank),
        }
    shapes |= {
        "kv_a_proj_with_mqa": (sizes.key_dim, hidden),
        "kv_a_layernorm": (sizes.kv_lora_rank,),
        "embed_q": (heads * sizes.kv_lora_rank, keys),
        "unembed_out": (heads * values, sizes.kv_lora_rank),
        "o_proj": (hidden, heads * values),
    }
    both = prefix + "self_attn.kv_b_proj"
    parts = {
        "embed_q": HeadPart(both, keys + values, 0, keys, transposed=True),
        "unembed_out": HeadPart(both, keys + values, keys, values, transposed=False),
    }
    entries = (
        ResidentName(
            f"self_attn.{name}", shape, stack=heads if name in parts else 0, part=parts.get(name)
        )
        for name, shape in shapes.items()
    )
    return {entry.name: entry for entry in entries}


def latent_weights(weights: Mapping[str, Weight], layer: int) -> dict[str, Weight]:
    """Norms and projections of a layer's attention."""
    names = {
        "norm": "input_layernorm",
        "q_a_norm": "self_attn.q_a_layernorm",
        "kv_a_proj": "self_attn.kv_a_proj_with_mqa",
        "kv_a_norm": "self_attn.kv_a_layernorm",
        "embed_q": "self_attn.embed_q",
        "unembed_out": "self_attn.unembed_out",
    }
    names |= {f"{p}_proj": f"self_attn.{p}_proj" for p in ("q", "q_a", "q_b", "o")}
    return submodule(weights, f"layers.{layer}.", names)
