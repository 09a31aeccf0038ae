"""config.json: read once, every key with its type, names normalised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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
    "tokenizer.model",
)
"""Files that the text side may read; a store holds a copy of those that exist."""

COPIED_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)

_ALIASES = {
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
}
_MAX_JSON_NBYTES = 64 << 20

# ModelConfig has methods named after these types, which would shadow them in annotations.
_Int: TypeAlias = int
_Float: TypeAlias = float
_Bool: TypeAlias = bool
_Str: TypeAlias = str


@dataclass(frozen=True)
class QuantSpec:
    """How one module's weight is quantised."""

    bits: int
    group_size: int


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
        """A whole number; a null counts as absent. Without a default the key is required."""
        value = self._required(key, default)
        if isinstance(value, _Bool) or not isinstance(value, _Int):
            raise self._mistyped(key, value, "a whole number")
        return value

    def float(self, key: _Str, default: _Float | None = None) -> _Float:
        """A number; a null counts as absent. Without a default the key is required."""
        value = self._required(key, default)
        if isinstance(value, _Bool) or not isinstance(value, (_Int, _Float)):
            raise self._mistyped(key, value, "a number")
        return _Float(value)

    def bool(self, key: _Str, default: _Bool | None = None) -> _Bool:
        """True or false; a null counts as absent. Without a default the key is required."""
        value = self._required(key, default)
        if not isinstance(value, _Bool):
            raise self._mistyped(key, value, "true or false")
        return value

    def str(self, key: _Str, default: _Str | None = None) -> _Str:
        """A string; a null counts as absent. Without a default the key is required."""
        value = self._required(key, default)
        if not isinstance(value, _Str):
            raise self._mistyped(key, value, "a string")
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

    def _mistyped(self, key: _Str, value: Any, expected: _Str) -> CheckpointError:
        return CheckpointError(f"{self.where} sets {key} to {value!r}; expected {expected}")

    @property
    def quantization(self) -> Quantization | None:
        """The checkpoint's quantisation entries, or None for an unquantised one.

        Raises:
            CheckpointError: for a kind of quantisation that cannot be read.
        """
        for key in ("quantization", "quantization_config"):
            entry = self._data.get(key)
            if entry is not None:
                return _quantization(entry, key, self.where)
        return None


def _top_string(raw: Mapping[str, Any], key: str, where: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str):
        raise CheckpointError(f"{where} lacks {key}, so the model family is unknown")
    return value


def _quantization(entry: Any, key: str, where: str) -> Quantization:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} sets {key} to {entry!r}; expected an object")
    method = entry.get("quant_method", entry.get("mode", "affine"))
    if method != "affine":
        raise CheckpointError(
            f"{where} says the weights are quantised as {method!r}; aegis reads affine"
            " quantisation with one scale and bias per group: convert the model to that first"
        )
    default = _quant_spec(entry, None, key, where)
    modules: dict[str, QuantSpec | None] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            modules[name] = _quant_spec(value, default, f"{key}.{name}", where)
        elif value is False:
            modules[name] = None
    return Quantization(default, modules)


def _quant_spec(
    entry: Mapping[str, Any], default: QuantSpec | None, key: str, where: str
) -> QuantSpec:
    if entry.get("mode", "affine") != "affine":
        raise CheckpointError(
            f"{where} sets {key}.mode to {entry['mode']!r}; only affine quantisation is supported"
        )
    values = []
    for field in ("bits", "group_size"):
        value = entry.get(field, getattr(default, field, None))
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{where} sets {key}.{field} to {value!r}; expected a number")
        values.append(value)
    return QuantSpec(*values)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, unreadable or holds something else.
    """
    try:
        if path.stat().st_size > _MAX_JSON_NBYTES:
            raise CheckpointError(f"{path} is implausibly large for a JSON file")
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a checkpoint folder needs it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__}; expected a JSON object")
    return data


def load_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder."""
    path = folder / "config.json"
    return ModelConfig(read_json(path), str(path))
