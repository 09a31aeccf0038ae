"""Block-scaled FP8 checkpoints, as publishers ship them, against numbers made independently."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import check_same_store, memory_of_conversion, raw_tensors, rewrite
from strategies import write_checkpoint

from aegis.checkpoint.config import QuantSpec
from aegis.convert.convert import convert
from aegis.convert.fp8 import VALUES
from aegis.errors import CheckpointError
from aegis.kernels.base import Layout

CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
PLAIN = re.compile(r".*(embed_tokens|lm_head|mlp\.gate|norm|bias|embed_q|unembed_out).*")
"""What publishers leave as it is; the last two are no tensors of theirs."""


def e4m3(code: int) -> float:
    """The number of a code, from the definition of the format."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    if exponent == 0:
        return (-1.0) ** sign * (mantissa / 8) * 2.0**-6
    return (-1.0) ** sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


TABLE = np.array([e4m3(code) for code in range(256)])


def bf16_of(values: Any) -> Any:
    """Bits of float32 values rounded to bfloat16, halves to even; none here is a denormal."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    rounded = np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(np.float32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def in_fp8(source: Path, folder: Path, scale_dtype: str = "F32", **config: Any) -> Path:
    """Two checkpoints, ``fp8`` and ``plain``, of the same numbers: random codes and scales."""
    rng = np.random.default_rng(3)
    fp8, plain = raw_tensors(source), raw_tensors(source)
    for name, (_, raw) in list(plain.items()):
        if PLAIN.fullmatch(name) or raw.ndim < 2 or 1 in raw.shape[-2:]:
            continue
        *lead, rows, cols = raw.shape
        codes = rng.integers(0, 255, raw.shape, dtype=np.uint8)
        codes[codes & 127 == 127] = 3
        blocks = (*lead, -(-rows // 128), -(-cols // 128))
        scales = rng.uniform(0.5, 2.0, blocks).astype(np.float32) / 2048
        stored = scales.view(np.uint32)
        if scale_dtype == "BF16":
            stored = bf16_of(scales)
            scales = (stored.astype(np.uint32) << 16).view(np.float32)
        each = np.repeat(np.repeat(scales, 128, axis=-2), 128, axis=-1)[..., :rows, :cols]
        # A code has four digits: the product is that of float32, whatever it is computed in.
        values = (TABLE[codes] * each.astype(np.float64)).astype(np.float32)
        fp8[name] = ("F8_E4M3", codes)
        fp8[f"{name}_scale_inv"] = (scale_dtype, stored)
        plain[name] = ("BF16", bf16_of(values))
    folder.mkdir()
    rewrite(source, folder / "plain", plain)
    rewrite(source, folder / "fp8", fp8, quantization_config=CONFIG | config)
    return folder


def model(folder: Path, **choices: Any) -> Path:
    """Edges of 64 beside whole blocks, in rows and in columns."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 320, "num_experts": 3}
    return write_checkpoint(folder, 5, dense=True, **(sizes | choices))


def test_codes_are_the_numbers_of_the_definition() -> None:
    assert np.array_equal(VALUES.astype(np.float64), TABLE, equal_nan=True)
    assert np.nanmax(VALUES) == 448
    assert np.signbit(VALUES[128])


def test_codes_are_the_numbers_of_mlx() -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX, to compare with, is missing")
    theirs = mx.from_fp8(mx.array(np.arange(256, dtype=np.uint8)), dtype=mx.float32)
    assert np.array_equal(VALUES, np.array(theirs), equal_nan=True)


@pytest.mark.parametrize("layout", ["il16", "row"])
@pytest.mark.parametrize("quantize", [None, QuantSpec(4, 64)])
@pytest.mark.parametrize(
    "choices",
    [
        {"model_type": "qwen3_moe", "separate_experts": True},
        {"model_type": "qwen3_moe", "fused_experts": True},
        {"model_type": "deepseek_v3", "separate_experts": True, "dense_layers": (0,)},
        {"model_type": "qwen3_next", "separate_experts": True},
    ],
    ids=["separate", "fused", "latent", "linear"],
)
def test_a_checkpoint_in_fp8_gives_the_store_of_its_numbers(
    tmp_path: Path, layout: Layout, quantize: QuantSpec | None, choices: dict[str, Any]
) -> None:
    sources = in_fp8(model(tmp_path / "m", **choices), tmp_path / "c")
    options: dict[str, Any] = {"layout": layout, "quantize": quantize}
    # Pieces smaller than a block, and larger than a matrix.
    ours = convert(sources / "fp8", tmp_path / "s", piece_nbytes=1 << 13, **options)
    check_same_store(ours, convert(sources / "plain", tmp_path / "t", **options))


def test_the_matrix_that_latents_are_expanded_by_may_be_in_fp8(tmp_path: Path) -> None:
    source = model(tmp_path / "m", model_type="deepseek_v3", separate_experts=True)
    tensors = raw_tensors(source)
    for name in [name for name in tensors if name.endswith("embed_q.weight")]:
        keys = tensors.pop(name)[1].swapaxes(1, 2)
        values = tensors.pop(name.replace("embed_q", "unembed_out"))[1]
        both = np.concatenate([keys, values], axis=1).reshape(-1, keys.shape[-1])
        tensors[name.replace("embed_q", "kv_b_proj")] = ("BF16", both)
    sources = in_fp8(rewrite(source, tmp_path / "j", tensors), tmp_path / "c")
    stores = [
        convert(sources / n, tmp_path / n, quantize=QuantSpec(4, 64)) for n in ("fp8", "plain")
    ]
    check_same_store(*stores)


def test_scales_may_be_in_bfloat16(tmp_path: Path) -> None:
    sources = in_fp8(model(tmp_path / "m"), tmp_path / "c", "BF16", scale_fmt="ue8m0")
    check_same_store(*(convert(sources / n, tmp_path / n) for n in ("fp8", "plain")))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"weight_block_size": [64, 128]}, r"weight_block_size to \[64, 128\]"),
        ({"weight_block_size": None}, "weight_block_size to None"),
        ({"fmt": "e5m2"}, "fmt to 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme to 'static'"),
        ({"modules_to_not_convert": "lm_head"}, "expected a list of names"),
        (
            {"modules_to_not_convert": ["model.layers.1.self_attn.q_proj"]},
            r"q_proj\.weight is in FP8, but config.json says that it is not",
        ),
        ({"quant_method": "gptq"}, "'gptq'"),
    ],
)
def test_another_fp8_is_refused_by_name(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    sources = in_fp8(model(tmp_path / "m"), tmp_path / "c", **config)
    with pytest.raises(CheckpointError, match=words):
        convert(sources / "fp8", tmp_path / "s")


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def no_scales(tensors: dict[str, Any]) -> None:
    del tensors[f"{Q_PROJ}_scale_inv"]


def other_blocks(tensors: dict[str, Any]) -> None:
    dtype, scales = tensors[f"{Q_PROJ}_scale_inv"]
    tensors[f"{Q_PROJ}_scale_inv"] = (dtype, scales[:, :1])


def scales_of_plain(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight_scale_inv"] = tensors[f"{Q_PROJ}_scale_inv"]


def not_a_number(tensors: dict[str, Any]) -> None:
    tensors[Q_PROJ][1][3, 5] = 0xFF


def too_large(tensors: dict[str, Any]) -> None:
    tensors[f"{Q_PROJ}_scale_inv"][1][0, 0] = 0x7F7FFFFF


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_scales, rf"lacks the tensor .*{Q_PROJ.removeprefix('model.')}_scale_inv"),
        (other_blocks, r"q_proj\.weight_scale_inv has the shape \[1, 1\].* \[1, 2\]"),
        (scales_of_plain, r"holds lm_head\.weight_scale_inv, which"),
        (not_a_number, r"q_proj\.weight in .* not finite"),
        (too_large, r"q_proj\.weight in .* not finite"),
    ],
)
@pytest.mark.parametrize("quantize", [None, QuantSpec(4, 64)])
def test_damage_is_refused_by_name(
    tmp_path: Path,
    damage: Callable[[dict[str, Any]], None],
    words: str,
    quantize: QuantSpec | None,
) -> None:
    sources = in_fp8(model(tmp_path / "m"), tmp_path / "c")
    tensors = raw_tensors(sources / "fp8")
    damage(tensors)
    damaged = rewrite(sources / "fp8", tmp_path / "d", tensors)
    with pytest.raises(CheckpointError, match=words):
        convert(damaged, tmp_path / "s", quantize=quantize)


def test_codes_that_the_config_does_not_speak_of_are_refused(tmp_path: Path) -> None:
    sources = in_fp8(model(tmp_path / "m"), tmp_path / "c")
    silent = rewrite(
        sources / "fp8", tmp_path / "d", raw_tensors(sources / "fp8"), quantization_config=None
    )
    with pytest.raises(CheckpointError, match=r"is in FP8, but config\.json does not say so"):
        convert(silent, tmp_path / "s")


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints; a projection of the second has 16 MiB of codes, and 64 as float32."""
    folder = tmp_path_factory.mktemp("growing")
    shape = {"hidden_size": 1024, "num_attention_heads": 256, "head_dim": 64}
    small = in_fp8(model(folder / "m"), folder / "c")
    big = in_fp8(model(folder / "b", num_hidden_layers=1, **shape), folder / "d")
    return small / "fp8", big / "fp8"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("layout", ["il16", "row"])
def test_memory_does_not_grow_with_a_matrix(
    growing: tuple[Path, Path], tmp_path: Path, layout: str
) -> None:
    grown, peak = memory_of_conversion(*growing, tmp_path, layout)
    assert grown < 24 << 20
    assert peak < 300 << 20
