"""A model's tokenizer with Hugging Face's semantics, its end tokens and its chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis import heap
from aegis.checkpoint.vocabulary import Vocabulary, read_json
from aegis.errors import TokenizerError, UsageError, shown
from aegis.text import library, loader, made
from aegis.text.chat_template import ChatTemplate, ChatTemplates, Message, plain
from aegis.text.control import ControlTokens
from aegis.text.token_files import TokenFiles, eos_ids, vocab_size

if TYPE_CHECKING:
    import tokenizers

_CANNOT_ENCODE = ("the model's tokenizer cannot encode this text", "use another text or model")
_LONG_TEXT = 1 << 16  # characters; encoding takes some 200 bytes for each, for a moment
_PIECE = 1 << 12  # characters encoded at once where only the number of ids is wanted
_NOT_DONE = {
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
}
"""Arguments of apply_chat_template in transformers that a template must not get in silence."""
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
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
        chat_templates: ChatTemplates,
        clean_up_spaces: bool = False,
    ) -> None:
        self.backend = backend
        self.chat_templates = chat_templates
        self.special_tokens = dict(special_tokens)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.unk_token_id = self._named_id("unk_token")
        self.pad_token_id = self._named_id("pad_token")
        own = {self.eos_token_id} - {None}
        self.eos_token_ids = frozenset(int(i) for i in eos_token_ids | own if i is not None)
        self.cleans_up = clean_up_spaces
        self._control: ControlTokens | None = None
        self._around: tuple[list[int], list[int]] | None = None

    @classmethod
    def open(cls, folder: Path | str, *, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of a model or store folder.

        chat_template (a file, a name or a template) replaces the model's. TokenizerError names
        the file that is missing or damaged and what to do.
        """
        folder = Path(folder)
        files = TokenFiles.read(folder)
        model_config = read_json(folder / "config.json")
        templates = ChatTemplates.find(folder, files.config, chat_template)
        ends = eos_ids(model_config) | eos_ids(read_json(folder / "generation_config.json"))
        rows = vocab_size(model_config)
        vocabulary = Vocabulary.of(folder)
        path = folder / vocabulary.files[0]
        if vocabulary.rule == "tokenizers":
            backend = loader.load(path)
        else:
            backend = made.load(folder, vocabulary, files, rows)
        own = backend.get_vocab_size(with_added_tokens=False)
        if rows is not None and own > rows:
            raise TokenizerError(
                f"{path} has {own} tokens, but the model only {rows}: it is of another model"
            )
        with library.failures_say(
            f"{folder} declares tokens that cannot be added", "see its files"
        ):
            files.add_to(backend, rows)
        tokenizer = cls(backend, files.names, ends, templates, _cleans_up(files.config, backend))
        tokenizer._surrounded([])
        heap.give_back()
        return tokenizer

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the ids of text.

        add_special_tokens adds what the model expects around a text (often a BOS token). With
        parse_special=False text that spells a control token is encoded letter by letter.
        """
        text = without_surrogates(text)
        if parse_special:
            # The fast way leaves out which letters each token stands for, and so half the time.
            with library.failures_say(*_CANNOT_ENCODE):
                [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = encoding.ids
        else:
            marker = self.control.free_marker(text)
            ids = self.control.encode(self.control.break_text(text, marker), marker)
        self._after(text)
        return self._surrounded(ids) if add_special_tokens else ids

    def estimate(self, text: str) -> int:
        """About how many ids text has: a few more than it takes, found in little memory."""
        pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
        return sum(len(self.encode(piece, add_special_tokens=False)) for piece in pieces)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; bytes that form no character become U+FFFD."""
        try:
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise UsageError(f"token ids are {shown(ids)}; give numbers from 0 on") from error
        return clean_up(text) if self.cleans_up else text

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text the chat template makes of messages.

        chat_template is a template to use in place of the model's; variables go to the template
        (enable_thinking=False and the like).
        """
        chat = _chat(messages)
        if chat_template is not None:
            template = ChatTemplate(chat_template, "chat_template")
        else:
            template = self.chat_templates.choose(tools=tools is not None)
        return template.render(
            chat,
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
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the prompt ids for messages; control tokens are only those the template wrote.

        The same ids as apply_chat_template(tokenize=True) in transformers unless a message spells
        a control token (aegis.text.control says which count), which is then plain text. Arguments
        are those of render_chat.
        """

        def render(messages: Sequence[Message], others: list[Any]) -> str:
            text = self.render_chat(
                messages,
                tools=others[0],
                documents=others[1],
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                **variables,
            )
            return without_surrogates(text)

        chat, others = _chat(messages), plain([tools, documents])
        text = render(chat, others)
        marker = self.control.free_marker(text)
        broken, safe = self.control.break_spellings(chat, others, marker)
        if broken == chat and safe == others:
            ids = self.encode(text, add_special_tokens=False)
        else:
            text = render(broken, safe)
            ids = self.control.encode(text, marker)
            self._after(text)
        if not ids:
            raise TokenizerError(
                "the chat template makes no text of these messages; pass another one with "
                "--chat-template, or use --raw to send the prompt as it is"
            )
        return ids

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
        """``encode_chat`` or, without ``tokenize``, ``render_chat`` as transformers spells them.

        Raises:
            UsageError: an argument of transformers asks for what this does not do.
        """
        for name in _NOT_DONE & variables.keys():
            if variables.pop(name):
                raise UsageError(f"apply_chat_template has no {name}; leave it out")
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
        found: int | None = self.backend.token_to_id(without_surrogates(token))
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token's spelling in the vocabulary, or None for an id it does not have."""
        if not 0 <= token_id < 1 << 32:
            return None
        found: str | None = self.backend.id_to_token(token_id)
        return found

    def special_ids(self, spellings: Collection[str]) -> frozenset[int]:
        """Return the ids of special tokens spelled so, which decode() leaves out."""
        added = self.backend.get_added_tokens_decoder().items()
        return frozenset(i for i, token in added if token.special and token.content in spellings)

    @property
    def control(self) -> ControlTokens:
        """The control tokens, collected when first asked for."""
        if self._control is None:
            self._control = ControlTokens(self.backend, also_special=self.eos_token_ids)
        return self._control

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def _after(self, text: str) -> None:
        """Give back what encoding a long text took for a moment."""
        if len(text) > _LONG_TEXT:
            heap.give_back()

    def _surrounded(self, ids: list[int]) -> list[int]:
        """Put the tokens of the post-processor (BOS and the like) around ids."""
        if self._around is None:
            self._around = _around(self.backend)
        before, after = self._around
        return [*before, *ids, *after]


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return what the post-processor puts before and after a text, whatever the text is."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    if backend.post_processor is None:
        return [], []
    one = Backend(WordLevel({"a": 0}, unk_token="a")).encode("a")
    damaged = "the post_processor of the model's tokenizer cannot be used"
    with library.failures_say(damaged, "download tokenizer.json again"), library.quiet():
        whole = backend.post_processor.process(one)
    if 0 not in whole.special_tokens_mask:
        raise TokenizerError(f"{damaged} (it loses the text); download tokenizer.json again")
    at = whole.special_tokens_mask.index(0)
    return whole.ids[:at], whole.ids[at + 1 :]


def _chat(messages: Any) -> list[dict[str, Any]]:
    """Return messages as plain data, whatever objects a client library made of them."""
    chat = plain(messages) if isinstance(messages, list | tuple) else None
    if not chat or not all(isinstance(message, dict) for message in chat):
        raise UsageError(
            "a chat needs a list of at least one message, each a dict with a role and its content"
        )
    return list(chat)


def _cleans_up(config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> bool:
    """As transformers 5: BPE text is cleaned up only where the config insists, since that eats
    blanks of the text."""
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    bpe = type(backend.model).__name__ == "BPE"
    return bool(config.get("clean_up_tokenization_spaces")) and (
        not bpe or bool(config.get(forced))
    )


def clean_up(text: str) -> str:
    """Take out the blank before punctuation, as Hugging Face does for word-piece vocabularies."""
    for spaced in _CLEAN_UP:
        text = text.replace(spaced, spaced.strip())
    return text


def without_surrogates(text: str) -> str:
    """Return text as UTF-8 can hold it: pairs of surrogates joined, undecodable bytes as U+FFFD.

    Such text comes from the command line of a terminal that does not speak UTF-8.

    Raises:
        UsageError: it is no text.
    """
    if not isinstance(text, str):
        raise UsageError(f"{shown(text)} is a {type(text).__name__}; give text")
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        except UnicodeEncodeError:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
