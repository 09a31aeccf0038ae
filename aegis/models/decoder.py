"""The decoder that many families are: softmax attention, then routed experts or one MLP.

A family file describes what sets it apart as a ``Description``; names, shapes and blocks follow
from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aegis.checkpoint.tensor_map import ExpertNames, QuantizeRules, ResidentName, TensorMap
from aegis.errors import CheckpointError
from aegis.kernels.base import (
    AttentionSpec,
    ExpertsSpec,
    HeadSpec,
    MlpSpec,
    QKNorm,
    RouterSpec,
    Scoring,
    SwigluClamp,
)
from aegis.models.base import Decoder, DecoderLayer, ModelShape, MoeBlocks, Parts
from aegis.models.delta import delta_names, delta_weights
from aegis.models.latent import latent_names, latent_weights
from aegis.models.layers import (
    attention_weights,
    mlp_weights,
    moe_layers,
    refuse_inconsistent,
    router_weights,
    shared_expert_weights,
)
from aegis.models.rotary import Rotary, rotary_frequencies

if TYPE_CHECKING:
    from aegis.checkpoint.config import ModelConfig
    from aegis.kernels.base import (
        AttentionBlock,
        Backend,
        LatentAttentionSpec,
        LatentSizes,
        RouterBlock,
        Weight,
    )


SIGMOID_ROUTER = frozenset(
    {
        "scoring_func",
        "topk_method",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
    }
)
"""Keys that ``with_sigmoid_router`` reads, and the one for its weights."""


@dataclass(frozen=True)
class MoeNames:
    """What a layer calls its router and experts; see ``ExpertNames`` for the last four."""

    gate: str = "mlp.gate"
    shared: str = "mlp.shared_expert"
    stacked: str = "mlp.switch_mlp.{part}"
    separate: str = "mlp.experts.{expert}.{part}"
    separate_parts: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[str, str] | None = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    blocks: tuple[str, str] | None = None


@dataclass(frozen=True)
class Description:
    """Sizes of a model, and what of its maths is not the same in every family."""

    shape: ModelShape
    rms_norm_eps: float
    norm_topk_prob: bool
    rope_theta: float = 10000.0
    latent: LatentAttentionSpec | None = None
    """In place of all that is said here of attention."""
    scoring: Scoring = "softmax"
    """Sigmoid scores have corrections in the checkpoint."""
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    shared_expert_gate: bool = True
    """Whether a shared expert, where there is one, has a gate."""
    rotary_dim: int | None = None
    """Channels of a head that are rotated; None: all."""
    rotary: Rotary | None = None
    """In place of what the two say."""
    windows: tuple[int | None, ...] = ()
    """How many positions each layer's attention sees, None: all; empty: all in every layer."""
    sinks: bool = False
    """Every head has a score without a position."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm = "none"
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    moe_bias: bool = False
    """Routers and experts have biases."""
    clamp: SwigluClamp | None = None
    """Of the experts' SwiGLU."""
    names: MoeNames = MoeNames()
    quantize: QuantizeRules = field(default_factory=QuantizeRules)
    fused_delta: bool = False
    """Gated DeltaNet's projections as ``delta_names`` unfuses them."""
    zero_centred: bool = False
    """Published norms are less by 1."""
    prefixes: tuple[str, ...] = TensorMap.prefixes
    ignored: tuple[str, ...] = ()
    """More of ``TensorMap.ignored``."""
    vision: tuple[str, ...] = ()
    """As in ``TensorMap``."""


def read_shape(
    config: ModelConfig,
    moe_intermediate_size: int,
    shared_expert_intermediate_size: int = 0,
    latent: LatentSizes | None = None,
) -> ModelShape:
    """Sizes for planning; families name those of experts differently.

    Raises:
        CheckpointError: a size is missing, mistyped or contradicts another.
    """
    heads, hidden = config.int("num_attention_heads"), config.int("hidden_size")
    layers, sparse = config.int("num_hidden_layers"), moe_layers(config)
    sizes = ModelShape(
        hidden_size=hidden,
        vocab_size=config.int("vocab_size"),
        num_hidden_layers=layers,
        moe_layers=sparse,
        num_experts=config.int("num_experts"),
        num_experts_per_tok=config.int("num_experts_per_tok"),
        moe_intermediate_size=moe_intermediate_size,
        shared_expert_intermediate_size=shared_expert_intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=1 if latent else config.int("num_key_value_heads", heads),
        head_dim=latent.key_dim if latent else config.int("head_dim", hidden // heads),
        max_position_embeddings=config.int("max_position_embeddings"),
        tie_word_embeddings=config.bool("tie_word_embeddings", False),
        intermediate_size=config.int("intermediate_size") if len(sparse) < layers else 0,
        latent=latent,
    )
    refuse_inconsistent(config, sizes)
    return sizes


def with_sigmoid_router(model: Description, config: ModelConfig) -> Description:
    """The same with DeepSeek-V3's router, whose layers for predicting further tokens are ignored.

    Raises:
        CheckpointError: a key of it is mistyped, or contradicts another.
    """
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key, value) != value:
            raise config.mistyped(key, config.get(key), value)
    layers, further = model.shape.num_hidden_layers, config.int("num_nextn_predict_layers", 0)
    found = replace(
        model,
        scoring="sigmoid",
        n_group=config.int("n_group", 1),
        topk_group=config.int("topk_group", 1),
        routed_scaling_factor=config.float("routed_scaling_factor", 1.0),
        shared_expert_gate=False,
        names=replace(model.names, shared="mlp.shared_experts"),
        quantize=QuantizeRules(plain=("mlp.gate",), own_type=("e_score_correction_bias",)),
        ignored=tuple(rf"layers\.{layer}\..*" for layer in range(layers, layers + further)),
    )
    _refuse_uneven_groups(config, found)
    return found


def _refuse_uneven_groups(config: ModelConfig, model: Description) -> None:
    sizes, groups = model.shape, model.n_group
    if groups == 1 == model.topk_group:
        return
    each, uneven = divmod(sizes.num_experts, groups)
    kept = model.topk_group * each
    if uneven or each < 2 or model.topk_group > groups or kept < sizes.num_experts_per_tok:
        raise CheckpointError(
            f"{config.where} sets n_group to {groups} and topk_group to {model.topk_group}, which"
            f" does not fit {sizes.num_experts} experts, {sizes.num_experts_per_tok} of them per"
            " token; use the config.json of this checkpoint"
        )


def tensor_map(model: Description) -> TensorMap:
    """Names and shapes of every tensor of the checkpoint."""
    sizes, names = model.shape, model.names
    hidden, width = sizes.hidden_size, sizes.moe_intermediate_size
    resident = [ResidentName("embed_tokens", (sizes.vocab_size, hidden))]
    for layer in range(sizes.num_hidden_layers):
        resident += _layer_names(layer, model)
    resident.append(ResidentName("norm", (hidden,), zero_centred=model.zero_centred))
    if not sizes.tie_word_embeddings:
        resident.append(ResidentName("lm_head", (sizes.vocab_size, hidden)))
    tied = (r"lm_head\..*",) if sizes.tie_word_embeddings else ()
    prefix = "layers.{layer}."
    fused, blocks = (
        (prefix + both[0], prefix + both[1]) if both else None
        for both in (names.fused, names.blocks)
    )
    experts = ExpertNames(
        layers=sizes.moe_layers,
        num_experts=sizes.num_experts,
        shapes=_expert_shapes(hidden, width, model.moe_bias),
        stacked=prefix + names.stacked,
        separate=prefix + names.separate,
        separate_parts=names.separate_parts,
        fused=fused,
        blocks=blocks,
    )
    ignored = (*TensorMap.ignored, *tied, *model.ignored)
    return TensorMap(
        tuple(resident), experts, model.prefixes, ignored, model.vision, model.quantize
    )


def _expert_shapes(hidden: int, width: int, bias: bool) -> dict[str, tuple[int, ...]]:
    rows = {"gate_proj": width, "up_proj": width, "down_proj": hidden}
    shapes: dict[str, tuple[int, ...]] = {
        part: (count, hidden + width - count) for part, count in rows.items()
    }
    return shapes | ({f"{part}.bias": (count,) for part, count in rows.items()} if bias else {})


def _layer_names(layer: int, model: Description) -> list[ResidentName]:
    """Resident tensors of one layer, in the order they are used."""
    sizes, prefix = model.shape, f"layers.{layer}."
    norm = (sizes.hidden_size,)
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm": norm}
    own: dict[str, ResidentName] = {}
    if sizes.delta is not None and layer in sizes.delta_layers:
        own = delta_names(sizes.delta, model.fused_delta)
    elif model.latent is not None:
        own = latent_names(model.latent, prefix)
    shapes |= {name: entry.shape for name, entry in own.items()} or _attention_shapes(model)
    shapes["post_attention_layernorm"] = norm
    if layer in sizes.moe_layers:
        shapes |= _moe_shapes(model)
    else:
        shapes |= _mlp_shapes("mlp", sizes.hidden_size, sizes.intermediate_size)
    entries = (own.get(name) or _entry(name, shape, model) for name, shape in shapes.items())
    return [
        replace(entry, name=prefix + entry.name, source=entry.source and prefix + entry.source)
        for entry in entries
    ]


def _entry(name: str, shape: tuple[int, ...], model: Description) -> ResidentName:
    """A tensor by its name in the layer."""
    return ResidentName(
        name,
        shape,
        _source(name, model.names),
        zero_centred=model.zero_centred and name.endswith(_ZERO_CENTRED),
    )


def _source(name: str, names: MoeNames) -> str:
    """What the checkpoint calls a tensor of a layer; empty where it calls it the same."""
    for own, theirs in (("mlp.gate", names.gate), ("mlp.shared_expert", names.shared)):
        if own != theirs and (name == own or name.startswith(own + ".")):
            return theirs + name.removeprefix(own)
    return ""


_ZERO_CENTRED = ("layernorm", ".q_norm", ".k_norm")


def _moe_shapes(model: Description) -> dict[str, tuple[int, ...]]:
    sizes = model.shape
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (sizes.num_experts, sizes.hidden_size)}
    if model.moe_bias:
        shapes["mlp.gate.bias"] = (sizes.num_experts,)
    if model.scoring == "sigmoid":
        shapes["mlp.gate.e_score_correction_bias"] = (sizes.num_experts,)
    if sizes.shared_expert_intermediate_size:
        shared = sizes.shared_expert_intermediate_size
        shapes |= _mlp_shapes("mlp.shared_expert", sizes.hidden_size, shared)
        if model.shared_expert_gate:
            shapes["mlp.shared_expert_gate"] = (1, sizes.hidden_size)
    return shapes


def _mlp_shapes(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj": (inner, hidden),
        f"{name}.up_proj": (inner, hidden),
        f"{name}.down_proj": (hidden, inner),
    }


def _attention_shapes(model: Description) -> dict[str, tuple[int, ...]]:
    sizes, shapes = model.shape, dict[str, tuple[int, ...]]()
    heads = {"q": sizes.num_attention_heads}
    heads["k"] = heads["v"] = sizes.num_key_value_heads
    for p, count in heads.items():
        rows = count * sizes.head_dim * (2 if p == "q" and sizes.output_gate else 1)
        shapes[f"self_attn.{p}_proj"] = (rows, sizes.hidden_size)
        if model.qkv_bias:
            shapes[f"self_attn.{p}_proj.bias"] = (rows,)
        if model.qk_norm != "none" and p != "v":
            channels = rows if model.qk_norm == "all" else sizes.head_dim
            shapes[f"self_attn.{p}_norm"] = (channels,)
    shapes["self_attn.o_proj"] = (sizes.hidden_size, heads["q"] * sizes.head_dim)
    if model.o_bias:
        shapes["self_attn.o_proj.bias"] = (sizes.hidden_size,)
    if model.sinks:
        shapes["self_attn.sinks"] = (sizes.num_attention_heads,)
    return shapes


def build(model: Description, parts: Parts) -> Decoder:
    """The decoder over loaded weights."""
    sizes, weights, backend = model.shape, parts.weights, parts.backend
    table = weights["embed_tokens"] if sizes.tie_word_embeddings else weights["lm_head"]
    head = HeadSpec(sizes.hidden_size, sizes.vocab_size, model.rms_norm_eps, model.logits_scaling)
    return Decoder(
        embedding=backend.embedding(
            *parts.embedding_source, parts.embedding, model.embedding_multiplier
        ),
        layers=_layers(model, parts),
        head=backend.head(head, {"norm": weights["norm"], "lm_head": table}),
    )


def _layers(model: Description, parts: Parts) -> list[DecoderLayer]:
    sizes, backend, mlp = model.shape, parts.backend, _mlp(model)
    layers = []
    for layer in range(sizes.num_hidden_layers):
        sparse = layer in sizes.moe_layers
        layers.append(
            DecoderLayer(
                attention=_attention(model, parts, layer),
                cache=parts.caches[layer],
                mlp=_moe(model, parts, sizes.moe_layers.index(layer))
                if sparse
                else backend.mlp(mlp, mlp_weights(parts.weights, layer)),
            )
        )
    return layers


def _moe(model: Description, parts: Parts, index: int) -> MoeBlocks:
    """The experts of the MoE layer that has this index among them."""
    shared = shared_expert_weights(parts.weights, model.shape.moe_layers[index])
    return MoeBlocks(
        router=router_block(model, parts.backend, parts.weights, index),
        experts=parts.backend.experts(_experts(model, parts), shared),
        index=index,
    )


def router_block(
    model: Description, backend: Backend, weights: Mapping[str, Weight], index: int, ahead: int = 1
) -> RouterBlock:
    """The router of an MoE layer, which guesses for the one ``ahead`` of it, if there is one."""
    layers, router = model.shape.moe_layers, _router(model)
    own, place = router_weights(weights, layers[index]), index + ahead
    if place >= len(layers):
        return backend.router(router, own, None, None)
    return backend.router(router, own, router, router_weights(weights, layers[place]))


def _attention(model: Description, parts: Parts, layer: int) -> AttentionBlock:
    """Attention, or what takes its place in this layer."""
    sizes, weights, backend = model.shape, parts.weights, parts.backend
    if sizes.delta is not None and layer in sizes.delta_layers:
        return backend.delta(sizes.delta, delta_weights(weights, layer))
    if model.latent is not None:
        return backend.latent_attention(model.latent, latent_weights(weights, layer))
    rotary = model.rotary or Rotary(
        rotary_frequencies(model.rope_theta, model.rotary_dim or sizes.head_dim)
    )
    spec = AttentionSpec(
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        inv_freq=rotary.inv_freq,
        qk_norm=model.qk_norm,
        scale=model.attention_scale,
        residual_multiplier=model.residual_multiplier,
        output_gate=sizes.output_gate,
        rotary_scale=rotary.scale,
        window=model.windows[layer] if model.windows else None,
    )
    return backend.attention(spec, attention_weights(weights, layer))


def _router(model: Description) -> RouterSpec:
    sizes = model.shape
    return RouterSpec(
        hidden_size=sizes.hidden_size,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_experts_per_tok,
        norm_topk_prob=model.norm_topk_prob,
        rms_norm_eps=model.rms_norm_eps,
        scoring=model.scoring,
        n_group=model.n_group,
        topk_group=model.topk_group,
        routed_scaling_factor=model.routed_scaling_factor,
    )


def _mlp(model: Description) -> MlpSpec:
    sizes = model.shape
    return MlpSpec(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        rms_norm_eps=model.rms_norm_eps,
        residual_multiplier=model.residual_multiplier,
    )


def _experts(model: Description, parts: Parts) -> ExpertsSpec:
    sizes = model.shape
    return ExpertsSpec(
        hidden_size=sizes.hidden_size,
        moe_intermediate_size=sizes.moe_intermediate_size,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_experts_per_tok,
        shared_expert_intermediate_size=sizes.shared_expert_intermediate_size,
        layout=parts.layout,
        segments=parts.segments,
        residual_multiplier=model.residual_multiplier,
        clamp=model.clamp,
    )
