"""What a model folder says about tokens outside tokenizer.json: names, flags, end tokens.

As transformers 5 reads them: added_tokens_decoder in tokenizer_config.json has the last word on
the flags of the tokens it lists. Where there is none the older files count too:
special_tokens_map.json names tokens (over tokenizer_config.json) and added_tokens.json adds some.
Whether a BOS is put before a text is for tokenizer.json to say; where there is none, add_bos_token
is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.checkpoint.plainfile import shown, shown_name
from aegis.checkpoint.vocabulary import read_json
from aegis.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True)
class _Spec:
    """A token by its spelling; flags are those given, None where only the spelling was."""

    content: str
    flags: Mapping[str, bool] | None = None


@dataclass
class TokenFiles:
    """The tokens that the files beside tokenizer.json declare."""

    config: dict[str, Any]
    """tokenizer_config.json, with the names of special_tokens_map.json."""
    names: dict[str, str] = field(default_factory=dict)
    """Spellings by name: bos_token and so on, and names only this model has (image_token)."""
    listed: dict[int, _Spec] = field(default_factory=dict)
    named: list[_Spec] = field(default_factory=list)
    extra: list[_Spec] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> TokenFiles:
        """Read them; missing files declare nothing."""
        config = _given(read_json(folder / "tokenizer_config.json"))
        older = "added_tokens_decoder" not in config
        if older:
            named = _given(read_json(folder / "special_tokens_map.json"))
            by_name = isinstance(config.get("extra_special_tokens"), dict)
            if not by_name and any(key in config for key in _EXTRA):
                named.pop("additional_special_tokens", None)
            config.update(named)
        files = cls(config)
        try:
            files._collect(read_json(folder / "added_tokens.json") if older else {})
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'} lists added tokens that cannot be read "
                f"({type(error).__name__}: {shown_name(str(error))}); download it again"
            ) from error
        return files

    def _collect(self, added: Mapping[str, Any]) -> None:
        extras = [self.config[key] for key in _EXTRA if key in self.config]
        named = {key: value for key, value in self.config.items() if _is_name(key, value)}
        if extras and isinstance(extras[0], dict):
            named.update(extras.pop(0))
        extra = extras[0] if extras else []
        order = [name for name in NAMED if name in named]
        order += [name for name in named if name not in NAMED]
        specs = {name: _spec(named[name], name) for name in order}
        self.names = {name: spec.content for name, spec in specs.items()}
        self.extra = [_spec(entry, "an added token") for entry in _list(extra)]
        plain = [*(named[name] for name in NAMED if name in named), *_list(extra)]
        special = {entry for entry in plain if isinstance(entry, str)}
        for content, index in added.items():
            flags = {"special": content in special, "normalized": content not in special}
            self.listed[int(index)] = _Spec(content, flags)
        for key, entry in self.config.get("added_tokens_decoder", {}).items():
            self.listed[int(key)] = _Spec(entry["content"], _flags(entry))
        by_content = {spec.content: spec for spec in self.listed.values()}
        self.named = [by_content.get(spec.content, spec) for spec in specs.values()]

    def add_to(self, backend: tokenizers.Tokenizer, vocab_size: int | None) -> None:
        """Add to a tokenizer what it lacks and correct flags, as transformers does.

        A token whose id the model has no row for is left out: it could only fail later.
        """
        for token in self._wanted(backend.get_added_tokens_decoder()):
            known = backend.token_to_id(token.content) is not None
            if known or vocab_size is None or backend.get_vocab_size() < vocab_size:
                backend.add_tokens([token])

    def _wanted(
        self, known: Mapping[int, tokenizers.AddedToken]
    ) -> Iterator[tokenizers.AddedToken]:
        """The listed by id, then the named, then the others; a later flag replaces an earlier.

        Without added_tokens_decoder those of tokenizer.json are the listed ones.
        """
        listed = dict(self.listed)
        if "added_tokens_decoder" not in self.config:
            listed.update((i, _Spec(token.content, _state(token))) for i, token in known.items())
        present = {spec.content for spec in listed.values()}
        present.update(token.content for token in known.values())
        special = set(self.names.values())
        yield from (_made(spec, special) for _, spec in sorted(listed.items()))
        for spec in [*self.named, *self.extra]:
            if spec.content not in present:
                yield _made(spec, special)


def _made(spec: _Spec, special: set[str]) -> tokenizers.AddedToken:
    """Make a token; one that is given by its spelling alone or that has a name is special."""
    from tokenizers import AddedToken

    token = AddedToken(spec.content, **({"special": True} if spec.flags is None else spec.flags))
    token.special = token.special or spec.content in special
    return token


def _given(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value}


def _is_name(key: str, value: Any) -> bool:
    """Whether a key of the config names a token (add_bos_token is a flag)."""
    return key in NAMED or (
        key.endswith("_token")
        and not key.startswith("add_")
        and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    )


def _spec(value: Any, name: str) -> _Spec:
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return _Spec(value["content"], _flags(value))
    if isinstance(value, str):
        return _Spec(value)
    raise TypeError(f"{shown_name(name)} must be a string, got {shown(value)}")


def _flags(entry: Mapping[str, Any]) -> dict[str, bool]:
    return {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"additional_special_tokens must be a list, got {shown(value)}")
    return value


def _state(token: tokenizers.AddedToken) -> dict[str, bool]:
    return {flag: bool(getattr(token, flag)) for flag in _FLAGS}


def eos_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens of a config file, those of a nested text_config included."""
    found: set[int] = set()
    for level in _levels(config):
        value = level.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool):
                found.add(token_id)
            elif token_id is not None:
                raise TokenizerError(
                    f"eos_token_id must be a token id or a list, got {shown(value)}"
                )
    return frozenset(found)


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return how many rows the model has for tokens, None where config.json does not say."""
    sizes = (level.get("vocab_size") for level in _levels(config))
    return next((size for size in sizes if isinstance(size, int)), None)


def _levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nested = config.get("text_config")
    return [config, nested] if isinstance(nested, dict) else [config]
