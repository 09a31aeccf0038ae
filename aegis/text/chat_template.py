"""Chat templates with Hugging Face's semantics: where they are found and how they render."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.checkpoint.plainfile import FileDamageError, read_regular
from aegis.checkpoint.vocabulary import read_json
from aegis.errors import TokenizerError, UsageError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]

_MAX_NBYTES = 16 << 20

# Names a message's reasoning goes by; templates read the first, gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template; origin says in messages where it came from."""

    def __init__(self, text: str, origin: str) -> None:
        self.text = text
        self.origin = origin
        self._compiled: Template | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text for messages; variables are what else the template may read."""
        from jinja2 import TemplateSyntaxError

        from aegis.text.sandbox import EndlessTemplateError, bounded

        try:
            values = {
                **plain(variables or {}),
                "messages": [_normalised(message) for message in messages],
                "tools": plain(tools),
                "documents": plain(documents),
                "add_generation_prompt": add_generation_prompt,
            }
            with bounded(values):
                return self._template().render(values)
        except TemplateSyntaxError as error:
            wrong = f"is not valid Jinja (line {error.lineno}: {error.message})"
            raise self._failure(wrong) from error
        except EndlessTemplateError as error:
            wrong = f"does not come to an end with these messages: {error}"
            raise self._failure(wrong) from error
        except Exception as error:  # somebody else's program may raise anything
            said = str(error) or type(error).__name__
            raise self._failure(f"refuses these messages: {said}", hint=False) from error

    def _failure(self, said: str, hint: bool = True) -> TokenizerError:
        other = "; pass another one with --chat-template" * hint
        return TokenizerError(" ".join(f"the chat template in {self.origin} {said}{other}".split()))

    def _template(self) -> Template:
        if self._compiled is None:
            from aegis.text.sandbox import ChatEnvironment

            self._compiled = ChatEnvironment().from_string(self.text)
        return self._compiled


class ChatTemplates:
    """The templates of one model folder, by name; most models have only "default"."""

    def __init__(self, templates: Mapping[str, ChatTemplate], folder: Path) -> None:
        self._templates = dict(templates)
        self._folder = folder

    @classmethod
    def find(
        cls, folder: Path, tokenizer_config: Mapping[str, Any], override: str | None = None
    ) -> ChatTemplates:
        """Collect the templates of folder; override is a file, a template's name or a template."""
        found = (
            _from_jinja_files(folder)
            or _from_config(_read_legacy(folder), str(folder / "chat_template.json"))
            or _from_config(tokenizer_config, str(folder / "tokenizer_config.json"))
        )
        if override is not None:
            found = {"default": _overridden(override, found)}
        return cls(found, folder)

    def __bool__(self) -> bool:
        return bool(self._templates)

    def choose(self, *, tools: bool) -> ChatTemplate:
        """Return the template for a request: "tool_use" where tools are given and it exists."""
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            raise TokenizerError(
                f"{self._folder} has several chat templates and none is the default; name one with "
                f"--chat-template: {', '.join(sorted(self._templates))}"
            )
        raise TokenizerError(
            f"{self._folder} has no chat template (chat_template.jinja or tokenizer_config.json); "
            "use --raw to send the prompt as it is, or pass one with --chat-template"
        )


def _from_jinja_files(folder: Path) -> dict[str, ChatTemplate]:
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    return {name: ChatTemplate(_read_text(path), str(path)) for name, path in files.items()}


def _read_text(path: Path) -> str:
    try:
        text = read_regular(path, _MAX_NBYTES).decode()
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise TokenizerError(f"the chat template {path} is missing; pass another one") from None
    except FileDamageError as error:
        raise TokenizerError(f"the chat template {error.about(path)}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"the chat template {path} is no UTF-8 text ({error}); download it again"
        ) from error


def _read_legacy(folder: Path) -> Mapping[str, Any]:
    return read_json(folder / "chat_template.json")


def _from_config(config: Mapping[str, Any], origin: str) -> dict[str, ChatTemplate]:
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": ChatTemplate(value, origin)}
    try:
        named = value if isinstance(value, dict) else {t["name"]: t["template"] for t in value}
        if not all(isinstance(part, str) for pair in named.items() for part in pair):
            raise TypeError("a name or a template is no string")
    except (LookupError, TypeError) as error:
        raise TokenizerError(
            f"chat_template in {origin} must be a template or a list of name and template"
        ) from error
    return {name: ChatTemplate(text, origin) for name, text in named.items()}


def _overridden(override: str, found: Mapping[str, ChatTemplate]) -> ChatTemplate:
    if override in found:
        return found[override]
    if "{" in override:
        return ChatTemplate(override, "--chat-template")
    with contextlib.suppress(OSError):  # a name longer than a file system has
        if Path(override).is_file():
            return ChatTemplate(_read_text(Path(override)), override)
    raise UsageError(
        f"--chat-template {override!r} is neither a file, nor the name of one of the model's "
        "templates, nor a Jinja template"
    )


def plain(value: Any) -> Any:
    """Return value made of what JSON has, which is all that a template should meet.

    Data classes and pydantic models become mappings; of anything else only the type's name is left.

    Raises:
        UsageError: it is nested too deep, or contains itself.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise UsageError("the messages are nested too deep; give plain text as content") from None


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # what an enumeration holds, not its name
    if isinstance(value, int | float):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, type):
        return f"<{type(value).__name__}>"
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _normalised(message: Message) -> dict[str, Any]:
    """Drop keys set to None, which templates would print, and give reasoning its known names."""
    known = {key: plain(value) for key, value in message.items() if value is not None}
    reasoning = next((known[name] for name in _REASONING if name in known), None)
    if reasoning is None:
        return known
    return {"thinking": reasoning, **known, "reasoning_content": reasoning}
