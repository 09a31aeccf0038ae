"""Where a model's tokens are: tokenizer.json, or older files from which the same can be made."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aegis.checkpoint.plainfile import FileDamageError, read_object, regular_nbytes, shown
from aegis.errors import TokenizerError

Rule = Literal["tokenizers", "kimi", "gpt2", "qwen2", "qwen3_5"]
"""How text is cut into words: as tokenizer.json says, or as the makers of a family do it."""

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TIKTOKEN_MODEL = "tiktoken.model"
VOCAB_JSON, MERGES_TXT = "vocab.json", "merges.txt"
FILES = (TOKENIZER_JSON, TIKTOKEN_MODEL, VOCAB_JSON, MERGES_TXT)

_KIMI = "tokenization_kimi.TikTokenTokenizer"
_CLASSES: Mapping[str, Rule] = {
    "GPT2Tokenizer": "gpt2",
    "Qwen2Tokenizer": "qwen2",
    "Qwen3_5Tokenizer": "qwen3_5",
}
_OTHERS = (TIKTOKEN_MODEL, "tokenizer.model", "tekken.json", VOCAB_JSON, "vocab.txt")
"""What transformers makes a tokenizer.json of."""

_AS_JSON = {TOKENIZER_JSON: 1.0, TIKTOKEN_MODEL: 5.0, VOCAB_JSON: 3.0, MERGES_TXT: 3.0}
"""Bytes of tokenizer.json for each byte, by what either takes in memory."""

_MAX_NBYTES = 256 << 20


@dataclass(frozen=True)
class Vocabulary:
    """The files that hold a model's tokens, and the rule by which text is cut into words."""

    rule: Rule
    files: tuple[str, ...]

    @classmethod
    def among(
        cls, names: Collection[str], config: Mapping[str, Any], model_type: object
    ) -> Vocabulary | None:
        """That of a folder with these files and this tokenizer_config.json.

        None: there is no tokenizer.json, and none can be made.
        """
        if TOKENIZER_JSON in names:
            return cls("tokenizers", (TOKENIZER_JSON,))
        if TIKTOKEN_MODEL in names and _is_kimi(config):
            return cls("kimi", (TIKTOKEN_MODEL,))
        rule = _CLASSES.get(str(config.get("tokenizer_class")).removesuffix("Fast"))
        if rule is None or VOCAB_JSON not in names or MERGES_TXT not in names:
            return None
        if rule == "qwen2" and str(model_type).startswith("qwen3_5"):
            rule = "qwen3_5"  # Published with the class of the family before.
        return cls(rule, (VOCAB_JSON, MERGES_TXT))

    @classmethod
    def of(cls, folder: Path) -> Vocabulary:
        """That of a folder.

        Raises:
            TokenizerError: there is no tokenizer.json, and none can be made.
        """
        names = [name for name in (*FILES, *_OTHERS) if (folder / name).exists()]
        if TOKENIZER_JSON in names:
            return cls("tokenizers", (TOKENIZER_JSON,))
        config = read_json(folder / TOKENIZER_CONFIG)
        model_type = read_json(folder / "config.json").get("model_type")
        found = cls.among(names, config, model_type)
        if found is None:
            raise TokenizerError(_missing(folder, names, config))
        return found

    def nbytes(self, size: Callable[[str], int]) -> int:
        """The size of a tokenizer.json that takes the memory that these take, from their sizes."""
        return sum(math.ceil(_AS_JSON[name] * size(name)) for name in self.files)


def tokenizer_nbytes(folder: Path) -> int:
    """The size of a folder's tokenizer.json, from which follows what it takes in memory.

    Where it has to be made, the size of one that takes as much.

    Raises:
        TokenizerError: it is missing, no file, or implausibly large.
    """
    return Vocabulary.of(folder).nbytes(lambda name: vocabulary_nbytes(folder / name))


def vocabulary_nbytes(path: Path) -> int:
    """The size of a file of a vocabulary.

    Raises:
        TokenizerError: it is missing, no file, or implausibly large.
    """
    try:
        size = regular_nbytes(path)
    except FileNotFoundError:
        raise TokenizerError(f"{path} is missing; copy or download it into the folder") from None
    except FileDamageError as error:
        raise TokenizerError(error.about(path)) from error
    if size > _MAX_NBYTES:
        raise TokenizerError(
            f"{path} is implausibly large for a tokenizer ({size} bytes); download it again"
        )
    return size


def byte_letters() -> list[str]:
    """The character that stands for each byte in a vocabulary of bytes.

    Itself where it prints, else one from 256 on.
    """
    others = iter(range(256, 512))
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


def unmade(names: Collection[str], config: Mapping[str, Any]) -> str:
    """Why none is made from these files, in brackets; nothing where there are none for it."""
    named = config.get("tokenizer_class")
    said = f"{TOKENIZER_CONFIG} names {'none' if named is None else shown(named)}"
    if TIKTOKEN_MODEL in names:
        return f" (aegis makes it from {TIKTOKEN_MODEL} for {_KIMI} alone, and {said})"
    if VOCAB_JSON in names and MERGES_TXT in names:
        classes = " and ".join(_CLASSES)
        return f" (aegis makes it from {VOCAB_JSON} for {classes} alone, and {said})"
    if VOCAB_JSON in names:
        return f" ({MERGES_TXT}, without which aegis makes none from {VOCAB_JSON}, is missing too)"
    return ""


def _missing(folder: Path, names: Collection[str], config: Mapping[str, Any]) -> str:
    remedy = "copy or download it into the folder"
    if other := next((name for name in _OTHERS if name in names), None):
        remedy = (
            f"copy it there or write it from {other} with transformers:"
            f" AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    return (
        f"{folder / TOKENIZER_JSON} is missing; a model folder needs the tokenizer.json it was"
        f" published with{unmade(names, config)}, so {remedy}"
    )


def _is_kimi(config: Mapping[str, Any]) -> bool:
    """Whether the folder's own code is Kimi's, whose rule is known; it is never run."""
    classes = config.get("auto_map")
    named = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    names = named if isinstance(named, list) else [named]
    return any(isinstance(name, str) and name.endswith(_KIMI) for name in names)


def read_json(path: Path) -> dict[str, Any]:
    """The object in one of a tokenizer's files, {} where there is no such file.

    Raises:
        TokenizerError: it cannot be read as one.
    """
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except FileDamageError as error:
        raise TokenizerError(error.about(path)) from error
