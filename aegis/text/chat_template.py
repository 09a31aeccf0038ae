"""Chat templates with Hugging Face's semantics: where they are found and how they render."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.checkpoint.plainfile import FileDamageError, read_object, read_regular
from aegis.errors import TokenizerError, UsageError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

_MAX_NBYTES = 16 << 20

# Names a message's reasoning goes by; templates read the first, gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# What running somebody else's template may raise besides jinja2's own errors.
_RUN_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


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
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            return self._template().render(
                {
                    **(variables or {}),
                    "messages": [_normalised(message) for message in messages],
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"The chat template in {self.origin} is not valid Jinja (line {error.lineno}: "
                f"{error.message}); pass another one with --chat-template"
            ) from error
        except (TemplateError, *_RUN_ERRORS) as error:
            raise TokenizerError(
                f"The chat template in {self.origin} refuses these messages: {error}"
            ) from error

    def _template(self) -> Template:
        if self._compiled is None:
            self._compiled = _environment().from_string(self.text)
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
        raise TokenizerError(f"The chat template {path} is missing; pass another one") from None
    except FileDamageError as error:
        raise TokenizerError(f"The chat template {path} {error}; download it again") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"The chat template {path} is no UTF-8 text ({error}); download it again"
        ) from error


def _read_legacy(folder: Path) -> Mapping[str, Any]:
    path = folder / "chat_template.json"
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except FileDamageError as error:
        raise TokenizerError(f"{path} {error}; download it again") from error


def _from_config(config: Mapping[str, Any], origin: str) -> dict[str, ChatTemplate]:
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": ChatTemplate(value, origin)}
    try:
        named = value if isinstance(value, dict) else {t["name"]: t["template"] for t in value}
    except (LookupError, TypeError) as error:
        raise TokenizerError(
            f"chat_template in {origin} must be a template or a list of name and template"
        ) from error
    return {str(name): ChatTemplate(str(text), origin) for name, text in named.items()}


def _overridden(override: str, found: Mapping[str, ChatTemplate]) -> ChatTemplate:
    if override in found:
        return found[override]
    if "{" in override:
        return ChatTemplate(override, "--chat-template")
    if Path(override).is_file():
        return ChatTemplate(_read_text(Path(override)), override)
    raise UsageError(
        f"--chat-template {override!r} is neither a file, nor the name of one of the model's "
        "templates, nor a Jinja template"
    )


def _normalised(message: Message) -> dict[str, Any]:
    """Drop keys set to None, which templates would print, and give reasoning its known names."""
    known = {key: value for key, value in message.items() if value is not None}
    reasoning = next((known[name] for name in _REASONING if name in known), None)
    if reasoning is None:
        return known
    return {"thinking": reasoning, **known, "reasoning_content": reasoning}


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what the model wrote, for training; here it only groups."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain attribute

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The tojson filter without jinja2's HTML escaping, which models never saw in training."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
