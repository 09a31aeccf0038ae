"""Which block gets which weights, where not every layer has experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from families import FAMILIES
from strategies import Choices, config_of

from aegis.checkpoint.config import ModelConfig
from aegis.models import family
from aegis.models.base import Decoder, MoeBlocks, Parts

Names = Mapping[str, str]
"""In place of weights: what a store calls them."""


class Blocks:
    """A backend whose blocks are what they were made of."""

    def attention(self, spec: Any, weights: Names) -> tuple[Any, Names]:
        return spec, weights

    delta = latent_attention = mlp = experts = attention

    def router(
        self, spec: Any, weights: Names, next_spec: Any, next_weights: Names | None
    ) -> tuple[Names, Names | None]:
        assert (next_spec is None) == (next_weights is None)
        return weights, next_weights

    def embedding(self, *given: Any) -> str:
        return "embedding"

    def head(self, spec: Any, weights: Names) -> str:
        return "head"


def decoder(model_type: str, dense_layers: tuple[int, ...], layers: int = 5) -> Decoder:
    choices = Choices(
        model_type=model_type, dense_layers=dense_layers, num_hidden_layers=layers, qkv_bias=False
    )
    config = ModelConfig(config_of(choices, {}))
    names: Any = {
        entry.name: entry.name for entry in family(model_type).tensor_map(config).resident
    }
    backend: Any = Blocks()
    caches: Any = [f"cache {layer}" for layer in range(layers)]
    parts = Parts(backend, names, None, ((1, 1), None, "il16"), caches, {}, "il16")
    return family(model_type).build(config, parts)


@pytest.mark.parametrize(
    ("model_type", "dense_layers", "sparse"),
    [
        ("qwen2_moe", (), [0, 1, 2, 3, 4]),
        ("qwen2_moe", (0, 2, 3), [1, 4]),
        ("qwen3_moe", (1, 4), [0, 2, 3]),
        ("glm4_moe", (0, 1), [2, 3, 4]),
        ("deepseek_v3", (0,), [1, 2, 3, 4]),
        ("qwen3_next", (1, 2), [0, 3, 4]),
    ],
)
def test_a_router_guesses_for_the_next_layer_with_experts(
    model_type: str, dense_layers: tuple[int, ...], sparse: list[int]
) -> None:
    built = decoder(model_type, dense_layers)
    assert [moe.index for moe in built.moe] == list(range(len(sparse)))
    gates = [f"layers.{layer}.mlp.gate" for layer in sparse]
    for moe, own, following in zip(built.moe, gates, [*gates[1:], None], strict=True):
        router: Any = moe.router
        assert router[0]["gate"] == own
        assert (router[1] and router[1]["gate"]) == following


@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next"]
)
def test_every_layer_has_its_own_weights_and_cache(model_type: str) -> None:
    built = decoder(model_type, (0,))
    for number, layer in enumerate(built.layers):
        prefix = f"layers.{number}."
        attention: Any = layer.attention
        assert attention[1]["norm"] == f"{prefix}input_layernorm"
        assert layer.cache == f"cache {number}"
        mlp: Any = layer.mlp
        if number:
            router, experts = mlp.router, mlp.experts
            assert router[0]["norm"] == f"{prefix}post_attention_layernorm"
            assert all(n.startswith(prefix) for n in experts[1].values())
        else:
            assert mlp[1] == {
                "norm": "layers.0.post_attention_layernorm",
                "gate_proj": "layers.0.mlp.gate_proj",
                "up_proj": "layers.0.mlp.up_proj",
                "down_proj": "layers.0.mlp.down_proj",
            }


def test_only_some_layers_of_gpt_oss_have_a_window() -> None:
    built: list[Any] = list(decoder("gpt_oss", ()).layers)
    specs = [layer.attention[0] for layer in built]
    assert [spec.window for spec in specs] == [16, None, 16, None, 16]
    assert all(spec.rotary_scale > 1 for spec in specs)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_resident_tensor_is_used(model_type: str) -> None:
    built = decoder(model_type, ())
    used = {"embed_tokens", "norm", "lm_head"}
    for layer in built.layers:
        blocks: list[Any] = [layer.attention, layer.mlp]
        if isinstance(layer.mlp, MoeBlocks):
            router: Any = layer.mlp.router
            blocks = [layer.attention, router[::-1], layer.mlp.experts]
        for _, weights in blocks:
            used |= set(weights.values())
    config = ModelConfig(
        config_of(Choices(model_type=model_type, num_hidden_layers=5, qkv_bias=False), {})
    )
    assert {entry.name for entry in family(model_type).tensor_map(config).resident} == used
