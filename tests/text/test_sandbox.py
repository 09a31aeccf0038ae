"""A chat template comes to an end in little memory, whatever is written in it."""

from __future__ import annotations

import enum
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest

from aegis.errors import TokenizerError
from aegis.text.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]
DOUBLING = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}STEP{% endfor %}"
ENDLESS = {
    "loops in loops": (
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    ),
    "loops over text": (
        "{% set t = 'x' * 9999 %}{% for i in t %}{% for j in t %}{% endfor %}{% endfor %}"
    ),
    "a macro calling itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a wide recursive loop": (
        "{% set wide = range(99999) %}{% for n in range(40) recursive %}"
        "{% if loop.depth == 1 %}{{ loop(wide) }}{% endif %}{% endfor %}"
    ),
    "a recursive loop": (
        "{% for n in [60] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}"
    ),
}
HUGE = {
    "doubling with +": DOUBLING.replace("STEP", "{% set ns.x = ns.x + ns.x %}"),
    "doubling with ~": DOUBLING.replace("STEP", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubling with join": DOUBLING.replace("STEP", "{% set ns.x = [ns.x, ns.x] | join %}"),
    "doubling with a method": DOUBLING.replace("STEP", "{% set ns.x = ''.join([ns.x, ns.x]) %}"),
    "doubling with replace": DOUBLING.replace("STEP", "{% set ns.x = ns.x | replace('a', 'aa') %}"),
    "doubling in a block": DOUBLING.replace(
        "STEP", "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"
    ),
    "doubling a list": DOUBLING.replace("STEP", "{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
    "doubling JSON": DOUBLING.replace("STEP", "{% set ns.x = [ns.x, ns.x] %}")
    + "{{ ns.x | tojson }}",
    "doubling a list, joined": DOUBLING.replace("STEP", "{% set ns.x = [ns.x, ns.x] %}")
    + "{{ ns.x ~ '' }}",
    "much text in a loop": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "much text in a macro": (
        "{% macro f() %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endmacro %}"
        "{% set x = f() %}"
    ),
    "many texts": (
        "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}"
        "{% set ns.x = ns.x + ['x' * 1000000 ~ i] %}{% endfor %}"
    ),
    "a text times a number": "{{ 'x' * 10 ** 12 }}",
    "a number times a text": "{{ 10 ** 12 * 'x' }}",
    "a list times a number": "{{ ([0] * 10 ** 10) | length }}",
    "a power": "{{ 9 ** 99999 }}",
    "squares": DOUBLING.replace("'aaaaaaaa'", "99").replace("STEP", "{% set ns.x = ns.x * ns.x %}"),
    "a wide method": "{{ 'x'.ljust(10 ** 12) }}",
    "a wide filter": "{{ 'x' | center(1000000000000) }}",
    "wide JSON": "{{ messages | tojson(indent=1000000000000) }}",
    "a wide format": "{{ '%1000000000000d' % 1 }}",
    "a wide format filter": "{{ '%1000000000000d' | format(1) }}",
    "a wide format method": "{{ '{:>1000000000000}'.format(1) }}",
    "a width given apart": "{{ '{:>{}}'.format(1, 10 ** 12) }}",
    "a width given by a star": "{{ '%*d' % (10 ** 12, 1) }}",
}


def refused(template: str) -> str:
    with pytest.raises(TokenizerError, match="the test does not come to an end") as failure:
        ChatTemplate(template, "the test").render(HELLO)
    assert "\n" not in str(failure.value)
    return str(failure.value)


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_without_an_end_is_refused(template: str) -> None:
    assert "round and round" in refused(template)


@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE.keys())
def test_a_template_that_makes_too_much_is_refused_in_little_memory(template: str) -> None:
    tracemalloc.start()
    try:
        refused(template)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


class Role(str, enum.Enum):  # noqa: UP042 - prints as Role.USER
    USER = "user"


@dataclass
class Part:
    type: str
    text: str


class Model:
    """Like a message of the OpenAI client."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def model_dump(self) -> dict[str, Any]:
        return self._values


def test_a_template_meets_only_what_json_has() -> None:
    content = [Part("text", "a"), Model(type="text", text="b"), {"type": "image", "image": Model}]
    template = ChatTemplate("{{ messages[0] | tojson }}{{ messages[0].role }}", "the test")
    text = template.render([{"role": Role.USER, "content": tuple(content)}])
    assert text == (
        '{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}'
        ', {"type": "image", "image": "<type>"}]}user'
    )


def test_long_honest_chats_are_far_from_the_bounds() -> None:
    turn = "{% for m in messages %}{% set ns.x = ns.x ~ m.content | trim ~ '\n' %}{% endfor %}"
    template = ChatTemplate(
        "{% set ns = namespace(x='') %}{% macro show(m) %}{{ m.role | upper }}: "
        "{{ m.content.split('</think>')[-1].strip() | replace('a', 'b') | indent(2) }}"
        "{{ messages | length }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{{ loop.index }}/{{ loop.length }}"
        "{% for c in m.content[:20] %}{{ c }}{% endfor %}{% endfor %}"
        + turn
        + "{{ ns.x | length }}",
        "the test",
    )
    for words, turns in ((200, 300), (0, 1500), (20_000, 2)):
        messages = [{"role": "user", "content": f"{i} " + "word " * words} for i in range(turns)]
        length = sum(len(m["content"].strip()) + 1 for m in messages)
        assert template.render(messages).endswith(str(length))


def test_loops_know_their_length_as_ever() -> None:
    template = ChatTemplate(
        "{% for a, b in {'x': 1, 'y': 2}.items() if b > 0 %}{{ loop.length }}{{ loop.revindex }}"
        "{{ loop.last }}{{ loop.nextitem }}{{ a }}{% else %}none{% endfor %}"
        "{% for x in nothing %}{% else %} none{% endfor %}",
        "the test",
    )
    assert template.render(HELLO) == "22False('y', 2)x21Truey none"


def test_an_error_of_the_template_program_itself_is_a_sentence() -> None:
    deep = "{% for a in b %}" * 30 + "{% endfor %}" * 30  # more blocks than Python nests
    with pytest.raises(TokenizerError, match="the test refuses these messages"):
        ChatTemplate(deep, "the test").render(HELLO)
