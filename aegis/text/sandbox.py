"""Jinja for chat templates: Hugging Face's extensions, and bounds on what a template takes.

A template is somebody else's program. It reaches nothing outside its variables (jinja2's sandbox),
and it comes to an end: rounds of loops and calls are counted, and so is the text that it makes, in
whatever way. What is allowed grows with the messages and is far above what any template needs.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TEXT = 1 << 20, 16  # characters, and how many more for every character of the messages
_STEPS = 1 << 17, 64  # rounds of loops, likewise
_KEPT = 32  # how many texts of the largest size a template may make in all
_CALL = 64  # rounds of a loop that take the time of a call
_LONGEST_NUMBER = 1 << 12  # bits
_PRINTING = ("string", "join", "pprint", "tojson", "urlize", "xmlattr")
_WIDENING = (
    "ljust",
    "rjust",
    "center",
    "zfill",
    "expandtabs",
    "indent",
    "batch",
    "slice",
    "tojson",
)
_WIDE_FORMAT = re.compile(r"\d{6}|%\S*\*|\{[^}]*\{")  # a width of six digits, or one given apart


class EndlessTemplateError(TemplateError):
    """A template takes more than its messages can be a reason for."""


@dataclass
class _Budget:
    """What is left of rounds, and of characters in all; room is what one text may have."""

    room: int
    steps: int
    characters: int

    @classmethod
    def for_input(cls, size: int) -> _Budget:
        room, steps = (least + more * size for least, more in (_TEXT, _STEPS))
        return cls(room, steps, _KEPT * room)

    def step(self, cost: int = 1) -> None:
        self.steps -= cost
        if self.steps < 0:
            raise EndlessTemplateError("it goes round and round")

    def made(self, size: int) -> None:
        self.characters -= size
        if size > self.room or self.characters < 0:
            raise EndlessTemplateError(f"it makes a text of more than {self.room} characters")


_budget: ContextVar[_Budget] = ContextVar("budget")


def _current() -> _Budget:
    return _budget.get(None) or _Budget.for_input(0)  # none is set while a template is compiled


@contextmanager
def bounded(*values: Any) -> Iterator[None]:
    """Set the bounds for rendering values: their size decides."""
    token = _budget.set(_Budget.for_input(_weight(values, 1 << 40)))
    try:
        yield
    finally:
        _budget.reset(token)


def _weight(value: Any, most: int) -> int:
    """Characters and entries that printing value takes; stops soon after most.

    Counted without recursion: what is nested twice in itself is twice as large at every level.
    """
    total, waiting = 0, [value]
    while waiting and total <= most:
        item = waiting.pop()
        total += len(item) + 1 if isinstance(item, str) else 8
        if isinstance(item, Mapping):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            waiting.extend(item)
    return total


def _checked(value: Any) -> Any:
    """Return value after counting its size, deep down."""
    if not isinstance(value, Undefined | int | float | None):
        budget = _current()
        budget.made(len(value) if isinstance(value, str) else _weight(value, budget.room))
    return value


def _small(value: Any) -> Any:
    """Return a result of any kind after counting its size, where it has one that grows."""
    if isinstance(value, str | bytes | list | tuple):
        _current().made(len(value))
    return value


def _foresee(name: str, text: Any, args: Iterable[Any]) -> None:
    """Refuse what would make a text too long before there is one, by a method or filter's name."""
    budget, values = _current(), list(args)
    numbers = [abs(value) for value in values if isinstance(value, int)]
    wide = isinstance(text, str) and name in ("format", "format_map", "%")
    if name in _WIDENING or (wide and _WIDE_FORMAT.search(text)):
        budget.made(max(numbers, default=0))
        budget.made(0 if not wide else max(map(int, re.findall(r"\d+", text)), default=0))
    if name == "replace" and isinstance(text, str) and len(values) > 1:
        old, new = map(str, values[:2])
        budget.made(len(text) + text.count(old) * len(new))


class _Generator(CodeGenerator):
    """Makes loops and concatenations go through the environment, as calls already do."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        counted = nodes.EnvironmentAttribute("counted")
        node.iter = nodes.Call(counted, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """{% generation %} marks what the model wrote, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's names and filters, inside the bounds."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=_checked,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, made) for name, made in self.filters.items()}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        del self.globals["lipsum"]

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a block or the whole template wrote."""
        kept = list(pieces)
        _current().made(sum(map(len, kept)))
        return "".join(kept)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items, each round counted."""
        budget = _current()
        for item in items:
            budget.step()
            yield item

    def joined(self, parts: tuple[Any, ...]) -> str:
        """Join the parts of a ~ b ~ c."""
        return self.concat(str(_checked(part)) for part in parts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an object of the template."""
        _current().step(_CALL)
        if isinstance(__obj, LoopContext) and args:
            args = (__self.counted(args[0]), *args[1:])
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _foresee(method.__name__, owner, (*args, *kwargs.values()))
        return _small(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute left operator right, if the outcome is not too large."""
        sized = (str, bytes, list, tuple)
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, sized) and isinstance(other, int):
                    _current().made(len(one) * max(0, other))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1)
            if bits + right.bit_length() > _LONGEST_NUMBER:
                raise EndlessTemplateError(f"a number has more than {_LONGEST_NUMBER} bits")
        if operator == "%":
            _foresee("%", left, right if isinstance(right, tuple) else (right,))
        return _small(super().call_binop(context, operator, left, right))


def _bounded(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: what it is given and what it makes are looked at."""
    own = 1 if hasattr(made, "jinja_pass_arg") else 0  # the environment comes first

    @functools.wraps(made)
    def bounded_filter(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[own] if len(args) > own else None, (*args[own + 1 :], *kwargs.values())
        if name in _PRINTING:
            _checked(value)
        _foresee(name, value, rest)
        return _small(made(*args, **kwargs))

    return bounded_filter


def _raise(message: object) -> None:
    raise TemplateError(str(message))


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
