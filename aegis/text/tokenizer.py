"""A model's tokenizer with Hugging Face's semantics, its end tokens and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis import heap
from aegis.errors import TokenizerError, UsageError
from aegis.text import loader
from aegis.text.chat_template import ChatTemplate, ChatTemplates, Message
from aegis.text.control import AddedToken, ControlTokens, free_marker

if TYPE_CHECKING:
    import tokenizers

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LONG_TEXT = 1 << 16  # characters; encoding takes some 200 bytes for each, for a moment
_PIECE = 1 << 12  # characters encoded at once where only the number of ids is wanted
_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Tokenizer:
    """Text to token ids and back, for the model in one folder.

    Attributes: ``vocab_size`` (added tokens included), ``bos_token_id``, ``eos_token_id``,
    ``unk_token_id``, ``pad_token_id`` (int or None; the tokens themselves are in
    ``special_tokens``), ``eos_token_ids`` (every end token that any of the config files names)
    and ``chat_templates`` (false where the model has none).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        eos_token_ids: frozenset[int],
        chat_templates: ChatTemplates,
    ) -> None:
        self.backend = backend
        self.chat_templates = chat_templates
        self.special_tokens = {name: config[name] for name in _NAMED if name in config}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.unk_token_id = self._named_id("unk_token")
        self.pad_token_id = self._named_id("pad_token")
        own = {self.eos_token_id} - {None}
        self.eos_token_ids = frozenset(int(i) for i in eos_token_ids | own if i is not None)
        # As transformers 5: BPE text is never cleaned up, since that eats blanks of the text.
        self.cleans_up = bool(config.get("clean_up_tokenization_spaces")) and (
            type(backend.model).__name__ != "BPE"
        )
        self._add_bos = bool(config.get("add_bos_token"))
        self._add_eos = bool(config.get("add_eos_token"))
        self._control: ControlTokens | None = None
        self._later_pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer | None = None

    @classmethod
    def open(cls, folder: Path | str, *, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of a model or store folder.

        chat_template (a file, a name or a template) replaces the model's. TokenizerError names
        the file that is missing or damaged and what to do.
        """
        folder = Path(folder)
        config = _token_names(folder)
        model_config = _read_json(folder / "config.json")
        templates = ChatTemplates.find(folder, config, chat_template)
        ends = _eos_ids(model_config) | _eos_ids(_read_json(folder / "generation_config.json"))
        backend = loader.load(folder / "tokenizer.json")
        _add_missing(backend, config, _vocab_size(model_config))
        tokenizer = cls(backend, config, ends, templates)
        heap.give_back()
        return tokenizer

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the ids of text.

        add_special_tokens adds what the model expects around a text (often a BOS token). With
        parse_special=False text that spells a control token is encoded letter by letter.
        """
        text = _without_surrogates(text)
        if parse_special:
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        else:
            marker = free_marker(text)
            ids = self.control.encode(self.control.break_text(text, marker), marker)
        if len(text) > _LONG_TEXT:
            heap.give_back()
        return self._surrounded(ids) if add_special_tokens else ids

    def estimate(self, text: str) -> int:
        """About how many ids text has: a few more than it takes, found in little memory."""
        pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
        return sum(len(self.encode(piece, add_special_tokens=False)) for piece in pieces)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; bytes that form no character become U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self.cleans_up else text

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt text the chat template makes of messages."""
        template = self._template_for(messages, tools)
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Return the prompt ids for messages; control tokens are only those the template wrote.

        The same ids as apply_chat_template(tokenize=True) in transformers unless a message spells
        a control token (aegis.text.control says which count), which is then plain text. variables
        go to the template (enable_thinking=False and the like).
        """
        text = self.render_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        marker = free_marker(text)
        broken, (safe_tools, safe_documents) = self.control.break_spellings(
            messages, (tools, documents), marker
        )
        if (
            broken == list(messages)
            and _same(safe_tools, tools)
            and _same(safe_documents, documents)
        ):
            return self.encode(text, add_special_tokens=False)
        text = self.render_chat(
            broken,
            tools=safe_tools,
            documents=safe_documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return self.control.encode(_without_surrogates(text), marker)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """``encode_chat`` or, without ``tokenize``, ``render_chat`` as transformers spells them."""
        render = self.encode_chat if tokenize else self.render_chat
        return render(
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary, or None."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token's spelling in the vocabulary, or None for an id it does not have."""
        found: str | None = self.backend.id_to_token(token_id)
        return found

    @property
    def control(self) -> ControlTokens:
        """The control tokens, collected when first asked for."""
        if self._control is None:
            tokens = added_tokens(self.backend, also_special=self.eos_token_ids)
            self._control = ControlTokens(tokens, self._encode_plain)
        return self._control

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def _template_for(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> ChatTemplate:
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise UsageError("a chat needs at least one message, each with a role and its content")
        return self.chat_templates.choose(tools=tools is not None)

    def _surrounded(self, ids: list[int]) -> list[int]:
        """Put the post-processor's tokens around ids, and the BOS and EOS the config asks for."""
        before, after = self._affixes()
        return [*before, *ids, *after]

    def _affixes(self) -> tuple[list[int], list[int]]:
        probe = self.backend.encode("a", add_special_tokens=True)
        inside = [i for i, special in enumerate(probe.special_tokens_mask) if not special]
        before = list(probe.ids[: inside[0]]) if inside else []
        after = list(probe.ids[inside[-1] + 1 :]) if inside else []
        if self._add_bos and self.bos_token_id is not None and self.bos_token_id not in before:
            before.insert(0, self.bos_token_id)
        if self._add_eos and self.eos_token_id is not None and self.eos_token_id not in after:
            after.append(self.eos_token_id)
        return before, after

    def _encode_plain(self, text: str, at_start: bool) -> list[int]:
        """Encode text with no added token recognised, by the parts of the library's pipeline."""
        backend = self.backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splitter = backend.pre_tokenizer
        if splitter is not None and not at_start:
            splitter = self._pre_tokenizer_inside()
        words = splitter.pre_tokenize_str(text) if splitter is not None else [(text, None)]
        return [token.id for word, _ in words if word for token in backend.model.tokenize(word)]

    def _pre_tokenizer_inside(self) -> tokenizers.pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer for text that follows a token.

        A Metaspace that marks the first word of a text must not mark the first word of a run.
        """
        if self._later_pre_tokenizer is None:
            from tokenizers import Tokenizer as Backend
            from tokenizers.models import BPE

            state = self.backend.pre_tokenizer.__getstate__().decode()
            bare = json.loads(Backend(BPE()).to_str())
            bare["pre_tokenizer"] = json.loads(
                state.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
            )
            self._later_pre_tokenizer = Backend.from_str(json.dumps(bare)).pre_tokenizer
        return self._later_pre_tokenizer


def clean_up(text: str) -> str:
    """Take out the blank before punctuation, as Hugging Face does for word-piece vocabularies."""
    for spaced in _CLEAN_UP:
        text = text.replace(spaced, spaced.strip())
    return text


def added_tokens(
    backend: tokenizers.Tokenizer, *, also_special: frozenset[int] = frozenset()
) -> list[AddedToken]:
    """Return the added tokens of a tokenizer by ascending id; some ids may be declared special."""
    return [
        AddedToken(i, token.content, token.special or i in also_special, token.lstrip, token.rstrip)
        for i, token in sorted(backend.get_added_tokens_decoder().items())
    ]


def _same(left: Any, right: Any) -> bool:
    return json.dumps(left, default=str) == json.dumps(right, default=str)


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates (undecodable bytes of a command line), which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in path, {} where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{path} cannot be read as JSON ({error}); download it again"
        ) from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object; download it again")
    return content


def _token_names(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with each named token as its spelling.

    special_tokens_map.json fills in names the config lacks, as it did in older checkpoints.
    """
    config = {
        **_read_json(folder / "special_tokens_map.json"),
        **{k: v for k, v in _read_json(folder / "tokenizer_config.json").items() if v is not None},
    }
    for name in _NAMED:
        value = config.pop(name, None)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            config[name] = content
        elif content is not None:
            raise TokenizerError(
                f"{name} in {folder / 'tokenizer_config.json'} must be a string, got {content!r}"
            )
    return config


def _eos_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens of a config file, those of a nested text_config included."""
    found: set[int] = set()
    for level in (config, config.get("text_config") or {}):
        value = level.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool):
                found.add(token_id)
            elif token_id is not None:
                raise TokenizerError(f"eos_token_id must be a token id or a list, got {value!r}")
    return frozenset(found)


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    nested = config.get("text_config") or {}
    value = config.get("vocab_size", nested.get("vocab_size"))
    return value if isinstance(value, int) else None


def _add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], vocab_size: int | None
) -> None:
    """Add the tokens that only tokenizer_config.json names, as transformers does.

    One whose id the model has no row for is left out: it could only fail later.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    try:
        wanted = _wanted_tokens(config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"tokenizer_config.json lists added tokens that cannot be read ({error!r}); download "
            "it again"
        ) from error
    for content, token in wanted.items():
        fits = vocab_size is None or backend.get_vocab_size() < vocab_size
        if content not in known and (fits or backend.token_to_id(content) is not None):
            backend.add_tokens([token])


def _wanted_tokens(config: Mapping[str, Any]) -> dict[str, tokenizers.AddedToken]:
    """Return the tokens the config asks for: the listed by id, then the named, then the others."""
    from tokenizers import AddedToken as Added

    decoder = config.get("added_tokens_decoder") or {}
    listed = sorted(((int(i), entry) for i, entry in decoder.items()), key=lambda pair: pair[0])
    wanted = {
        entry["content"]: Added(entry["content"], **{k: entry[k] for k in _FLAGS if k in entry})
        for _, entry in listed
    }
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [config[name] for name in _NAMED if name in config]
    for token in [*named, *(extra.values() if isinstance(extra, dict) else extra)]:
        content = token["content"] if isinstance(token, dict) else token
        wanted.setdefault(content, Added(content, special=True))
    return wanted
