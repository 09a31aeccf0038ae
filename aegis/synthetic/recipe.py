"""``synthetic:SHAPE``: which model of random weights is meant, and what its store would be."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from aegis.checkpoint.config import ModelConfig, QuantSpec, read_json
from aegis.checkpoint.layout import StoreLayout
from aegis.checkpoint.source import Checkpoint
from aegis.convert.cache import cache_folder, store_name
from aegis.convert.layout import layout_of
from aegis.convert.names import ExpertSource, Resolved, SourceWeight
from aegis.convert.targets import quantised
from aegis.errors import UsageError, shown
from aegis.kernels.base import Format, Layout
from aegis.models import family
from aegis.models.decoder import Description
from aegis.synthetic.names import PREFIX
from aegis.synthetic.shapes import SHAPES
from aegis.synthetic.tokenizer import control_ids, tokenizer_config_json, tokenizer_json

VERSION = 1
"""Of what is written: another version writes other bytes for the same shape and seed."""

_SEED = re.compile(r"(.*)@(\d{1,18})", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """A shape and a seed, from which every byte of a store follows."""

    name: str
    """As it was asked for, without a seed of 0."""
    raw: Mapping[str, Any]
    """config.json."""
    seed: int

    @cached_property
    def config(self) -> ModelConfig:
        """The config of the store."""
        return ModelConfig(self.raw, self.name)

    @cached_property
    def description(self) -> Description:
        """Sizes, and what of the maths is the family's own."""
        return family(self.config.model_type).describe(self.config)

    def __fspath__(self) -> str:
        return self.name

    def files(self) -> dict[str, Iterable[bytes]]:
        """The small files of the store by name, in pieces."""
        return {
            "config.json": [json.dumps(self.raw, indent=2).encode()],
            "tokenizer.json": tokenizer_json(self.description.shape.vocab_size),
            "tokenizer_config.json": [tokenizer_config_json()],
        }

    @cached_property
    def tokenizer_nbytes(self) -> int:
        """The size of tokenizer.json."""
        return sum(map(len, tokenizer_json(self.description.shape.vocab_size)))

    @cached_property
    def identity(self) -> str:
        """A hex digest of all that the bytes follow from, but for the layout."""
        said = json.dumps([VERSION, self.seed, self.raw], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    def layout(self, layout: Layout) -> StoreLayout:
        """Sizes and places of everything in the store; the family's rules say what is 8 bits.

        Raises:
            CheckpointError: the config is damaged or not supported.
        """
        tensors = family(self.config.model_type).tensor_map(self.config)
        experts = tensors.experts

        def plain(name: str, shape: tuple[int, ...]) -> SourceWeight:
            return SourceWeight(name, shape, Format("dense", "bf16"), ())

        resident = {
            entry.name: plain(entry.name, entry.shape)
            for entry in tensors.resident
            if not entry.optional
        }
        of_layer = {}
        for part, (rows, *inner) in experts.shapes.items():
            all_of_them = plain(part, (experts.num_experts * rows, *inner))
            of_layer[part] = ExpertSource((all_of_them,), rows)
        checkpoint = Checkpoint(Path(self.name), self.config, {}, ())
        resolved = Resolved(resident, dict.fromkeys(experts.layers, of_layer))
        spec = self.config.quantization
        assert spec is not None
        resolved = quantised(checkpoint, resolved, tensors.quantize, spec.default)
        return layout_of(checkpoint, resolved, layout)


def recipe(path: str | os.PathLike[str]) -> Recipe:
    """What ``synthetic:SHAPE[@SEED]`` means; SHAPE is a known one or the path of a config.json.

    Raises:
        UsageError: there is no such shape.
        CheckpointError: the config is damaged or not supported.
    """
    if isinstance(path, Recipe):
        return path
    name = os.fspath(path)
    found = _SEED.fullmatch(name)
    name, seed = (found[1], int(found[2])) if found else (name, 0)
    shape = name.removeprefix(PREFIX)
    name += f"@{seed}" if seed else ""
    raw = SHAPES.get(shape) or _read(shape)
    made = Recipe(name, _completed(raw, name), seed)
    made.description  # noqa: B018  Refused now rather than by whoever looks at it first.
    return made


def cached_path(recipe: Recipe, layout: Layout) -> Path:
    """Where in the cache its store lies or will lie."""
    name = recipe.name.replace(":", "-")
    return cache_folder() / store_name(name, layout, recipe.identity)


def _read(shape: str) -> dict[str, Any]:
    path = Path(os.path.expanduser(shape))
    if os.path.isdir(path):
        path = path / "config.json"
    if path.suffix != ".json" or not os.path.lexists(path):
        raise UsageError(
            f"there is no shape {shown(shape)}; choose one of {', '.join(SHAPES)} or give the path"
            " of a config.json"
        )
    return read_json(path)


def _completed(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """With the tokenizer's end tokens, and 4 bits in groups of 64 unless it is quantised already
    in a way that random codes can have."""
    config: dict[str, Any] = json.loads(json.dumps(raw))
    config.pop("quantization_config", None)
    spec = QuantSpec(4, 64)
    if isinstance(config.get("quantization"), dict):
        found = ModelConfig(config, where).quantization
        spec = found.default if found else spec
    config["quantization"] = {"group_size": spec.group_size, "bits": spec.bits}
    ids = control_ids(ModelConfig(config, where).int("vocab_size"))
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            section |= ends | {"bos_token_id": None}
    return config
