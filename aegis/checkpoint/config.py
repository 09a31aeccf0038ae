"""config.json: read once, every key with its type, names normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from aegis.checkpoint.plainfile import (
    FileDamageError,
    read_object,
    shown,
    shown_name,
)
from aegis.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
    "tokenizer.model",
)
"""Files that the text side may read; a store holds a copy of those that exist."""

COPIED_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)

_ALIASES = {
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
}
_RANGES = {
    "hidden_size": (1, 1 << 20),
    "num_hidden_layers": (1, 1 << 10),
    "num_attention_heads": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 14),
    "head_dim": (1, 1 << 14),
    "num_experts": (1, 1 << 14),
    "num_experts_per_tok": (1, 1 << 14),
    "intermediate_size": (1, 1 << 20),
    "moe_intermediate_size": (1, 1 << 20),
    "shared_expert_intermediate_size": (0, 1 << 20),
    "linear_num_key_heads": (1, 1 << 14),
    "linear_num_value_heads": (1, 1 << 14),
    "linear_key_head_dim": (1, 1 << 14),
    "linear_value_head_dim": (1, 1 << 14),
    "linear_conv_kernel_dim": (1, 1 << 10),
    "full_attention_interval": (1, 1 << 10),
    "q_lora_rank": (0, 1 << 20),
    "kv_lora_rank": (1, 1 << 20),
    "qk_nope_head_dim": (1, 1 << 14),
    "qk_rope_head_dim": (1, 1 << 14),
    "v_head_dim": (1, 1 << 14),
    "sliding_window": (1, (1 << 31) - 1),
    "original_max_position_embeddings": (1, (1 << 31) - 1),
    "decoder_sparse_step": (1, 1 << 10),
    "first_k_dense_replace": (0, 1 << 10),
    "n_group": (1, 1 << 14),
    "topk_group": (1, 1 << 14),
    "n_shared_experts": (0, 1 << 10),
    "num_nextn_predict_layers": (0, 1 << 10),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, (1 << 31) - 1),
}
"""Whole numbers outside are damage. Far beyond any model, yet looping over them ends."""

_MULTIPLIER = (1e-9, 1e9)
_FLOAT_RANGES = {
    "rms_norm_eps": (0.0, 1.0),
    "rope_theta": (1.0, 1e30),
    "embedding_multiplier": _MULTIPLIER,
    "attention_multiplier": _MULTIPLIER,
    "residual_multiplier": _MULTIPLIER,
    "logits_scaling": _MULTIPLIER,
    "routed_scaling_factor": _MULTIPLIER,
    "swiglu_limit": _MULTIPLIER,
    "swiglu_alpha": _MULTIPLIER,
    "partial_rotary_factor": (1e-9, 1.0),
    "factor": (1e-9, 1e9),
    "beta_fast": (1e-9, 1e9),
    "beta_slow": (1e-9, 1e9),
    "mscale": (0.0, 1e9),
    "mscale_all_dim": (0.0, 1e9),
    "attention_factor": (1e-9, 1e9),
}
_ANY_INT = (-(1 << 63), (1 << 63) - 1)
_ANY_FLOAT = (-1.7976931348623157e308, 1.7976931348623157e308)
_QUANT_RANGES = {"bits": (1, 32), "group_size": (1, 1 << 20)}
_QUANT_WORDS = {"bits", "group_size", "mode", "quant_method"}
_MXFP4 = {"bits": 4, "group_size": 32, "mode": "mxfp4"}

# ModelConfig has methods named after these types, which would shadow them in annotations.
_Int: TypeAlias = int
_Float: TypeAlias = float
_Bool: TypeAlias = bool
_Str: TypeAlias = str


@dataclass(frozen=True)
class QuantSpec:
    """How one module's weight is quantised; see ``Format``."""

    bits: int
    group_size: int
    mode: Literal["affine", "mxfp4"] = "affine"


@dataclass(frozen=True)
class Quantization:
    """The quantisation entries of a config: a default and exceptions by module path."""

    default: QuantSpec
    modules: Mapping[str, QuantSpec | None]
    """Exceptions; None: stated to be unquantised."""

    def of(self, module: str) -> QuantSpec | None:
        """The entry for a module path as the checkpoint spells it."""
        return self.modules.get(module, self.default)


class ModelConfig:
    """A model's config with typed access. Errors name the key.

    Keys of a nested ``text_config`` take precedence over those around it, and a few other
    spellings are renamed (``num_local_experts`` to ``num_experts``).
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        """The file's content as it was read."""
        self.where = where
        nested = raw.get("text_config")
        merged = {**raw, **nested} if isinstance(nested, dict) else dict(raw)
        self._data = {**merged, **{_ALIASES[k]: v for k, v in merged.items() if k in _ALIASES}}
        self.model_type = _top_string(raw, "model_type", where)

    def get(self, key: _Str, default: Any = None) -> Any:
        """The value as it stands, or ``default`` where the key is absent."""
        return self._data.get(key, default)

    def int(self, key: _Str, default: _Int | None = None) -> _Int:
        """A whole number in its range; a null counts as absent. No default: it is required."""
        value, (least, most) = self._required(key, default), _RANGES.get(key, _ANY_INT)
        if isinstance(value, _Bool) or not isinstance(value, _Int) or not least <= value <= most:
            raise self.mistyped(key, value, f"a whole number from {least} to {most}")
        return value

    def float(self, key: _Str, default: _Float | None = None) -> _Float:
        """A finite number in its range; a null counts as absent. No default: it is required."""
        value, (least, most) = self._required(key, default), _FLOAT_RANGES.get(key, _ANY_FLOAT)
        number = not isinstance(value, _Bool) and isinstance(value, (_Int, _Float))
        if not number or not least <= value <= most:
            bounds = f" from {least:g} to {most:g}" if key in _FLOAT_RANGES else ""
            raise self.mistyped(key, value, f"a number{bounds}")
        return _Float(value)

    def bool(self, key: _Str, default: _Bool | None = None) -> _Bool:
        """True or false; a null counts as absent. Without a default the key is required."""
        value = self._required(key, default)
        if not isinstance(value, _Bool):
            raise self.mistyped(key, value, "true or false")
        return value

    def str(self, key: _Str, default: _Str | None = None) -> _Str:
        """A string; a null counts as absent. Without a default the key is required."""
        value = self._required(key, default)
        if not isinstance(value, _Str):
            raise self.mistyped(key, value, "a string")
        return value

    def _required(self, key: _Str, default: Any) -> Any:
        value = self._data.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(
                f"{self.where} lacks {key}, which a {self.model_type} model needs;"
                " use a complete checkpoint"
            )
        return value

    def mistyped(self, key: _Str, value: Any, expected: _Str) -> CheckpointError:
        """The error for a value that cannot be used."""
        return CheckpointError(f"{self.where} sets {key} to {shown(value)}; expected {expected}")

    def section(self, key: _Str) -> ModelConfig | None:
        """The object under a key with the same access; None where it is absent or null."""
        value = self._data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.mistyped(key, value, "an object")
        return ModelConfig({**value, "model_type": self.model_type}, f"{self.where} in {key}")

    @property
    def quantization(self) -> Quantization | None:
        """The checkpoint's quantisation entries, or None for one without codes of affine groups.

        Raises:
            CheckpointError: for a kind of quantisation that cannot be read.
        """
        key, entry = self._quantization_entry()
        if entry is None or _is_fp8(entry):
            return None
        return _quantization(entry, key, self.where)

    @property
    def fp8(self) -> frozenset[_Str] | None:
        """The modules that a checkpoint in block-scaled FP8 has as plain numbers; None: it is no
        such checkpoint.

        Raises:
            CheckpointError: for an FP8 of another kind.
        """
        key, entry = self._quantization_entry()
        return _fp8_exceptions(entry, key, self.where) if _is_fp8(entry) else None

    def _quantization_entry(self) -> tuple[_Str, Any]:
        for key in ("quantization", "quantization_config"):
            if (entry := self._data.get(key)) is not None:
                return key, entry
        return "", None


def _top_string(raw: Mapping[str, Any], key: str, where: str) -> str:
    value = raw.get(key)
    if value is None:
        raise CheckpointError(f"{where} lacks {key}, so the model family is unknown")
    if not isinstance(value, str):
        raise CheckpointError(f"{where} sets {key} to {shown(value)}; expected a string")
    return value


def _is_fp8(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("quant_method") == "fp8"


FP8_BLOCK = 128
"""Rows, and columns, of a weight in FP8 that share a scale; at its edges fewer."""

_FP8_WORDS = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("float", "ue8m0", None),
}
"""What these keys may say. The last two are about activations and about what values scales have."""


def _fp8_exceptions(entry: Mapping[str, Any], key: str, where: str) -> frozenset[str]:
    for word, known in _FP8_WORDS.items():
        if entry.get(word) not in known:
            raise CheckpointError(
                f"{where} sets {key}.{word} to {shown(entry.get(word))}; of FP8 only e4m3 codes"
                " with a scale for each block of [128, 128] are read"
            )
    exceptions = entry.get("modules_to_not_convert") or entry.get("ignored_layers") or []
    if not isinstance(exceptions, list) or not all(isinstance(name, str) for name in exceptions):
        raise CheckpointError(
            f"{where} sets {key}.modules_to_not_convert to {shown(exceptions)}; expected a list of"
            " names"
        )
    return frozenset(exceptions)


def _quantization(entry: Any, key: str, where: str) -> Quantization:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} sets {key} to {shown(entry)}; expected an object")
    method = entry.get("quant_method", entry.get("mode", "affine"))
    if method not in ("affine", "mxfp4"):
        raise CheckpointError(
            f"{where} says the weights are quantised as {shown(method)}; aegis reads affine"
            " quantisation with one scale and bias per group, and mxfp4: convert the model to that"
            " first"
        )
    if entry.get("quant_method") == "mxfp4":
        # As publishers write it; which tensors are quantised, these say themselves.
        return Quantization(_quant_spec(_MXFP4, None, key, where), {})
    default = _quant_spec(entry, None, key, where)
    modules: dict[str, QuantSpec | None] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            modules[name] = _quant_spec(value, default, f"{key}.{shown_name(name)}", where)
        elif value is False:
            modules[name] = None
        elif name not in _QUANT_WORDS and value is not True:
            raise CheckpointError(
                f"{where} sets {key}.{shown_name(name)} to {shown(value)}, which aegis does not"
                " know; use a checkpoint without it"
            )
    return Quantization(default, modules)


def _quant_spec(
    entry: Mapping[str, Any], default: QuantSpec | None, key: str, where: str
) -> QuantSpec:
    mode = entry.get("mode", "affine")
    if mode not in ("affine", "mxfp4"):
        raise CheckpointError(
            f"{where} sets {key}.mode to {shown(mode)}; only affine quantisation and mxfp4 are"
            " supported"
        )
    values = []
    for field, (least, most) in _QUANT_RANGES.items():
        value = entry.get(field, getattr(default, field, None))
        if value is None:
            raise CheckpointError(f"{where}: {key} lacks {field}; use a complete config.json")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise CheckpointError(
                f"{where} sets {key}.{field} to {shown(value)}; expected a whole number from"
                f" {least} to {most}"
            )
        values.append(value)
    bits, group_size = values
    return QuantSpec(bits, group_size, mode)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, unreadable or holds something else.
    """
    try:
        return read_object(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a checkpoint folder needs it") from None
    except FileDamageError as error:
        raise CheckpointError(error.about(path)) from error


def load_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder."""
    path = folder / "config.json"
    return ModelConfig(read_json(path), str(path))
