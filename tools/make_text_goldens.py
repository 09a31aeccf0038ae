"""Writes tests/goldens/text/chat.json: what transformers makes of chats and texts.

Needs transformers (no torch): pip install transformers jinja2, then
python tools/make_text_goldens.py from the repository root.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer

MODEL = Path("aegis/embedded")
TARGET = Path("tests/goldens/text/chat.json")

TEMPLATES = {
    "model": None,
    "tools_and_thinking": """\
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- else -%}
        {%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- text_of(messages[0].content) + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + text_of(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- elif message.role == 'assistant' %}
        {%- set shown = text_of(message.content or '') %}
        {%- if '</think>' in shown and loop.index0 < ns.last_user %}
            {%- set shown = shown.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- shown }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ call.function | tojson(indent=2) ~ '\\n</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + text_of(message.content) }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "strict_turns": """\
{{ bos_token }}
{% if messages[0]['role'] == 'system' %}
    {% set first = messages[0]['content'] | trim + '\\n\\n' %}
    {% set turns = messages[1:] %}
{% else %}
    {% set first = '' %}
    {% set turns = messages %}
{% endif %}
{% for message in turns %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant.') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + (first if loop.first else '') + message['content'] | trim + ' [/INST]' }}
    {% else %}
        {% generation %}
{{ ' ' + message['content'] + eos_token }}
        {% endgeneration %}
    {% endif %}
{% endfor %}
""",
    "loops_and_filters": """\
{% for message in messages %}
{% if loop.index > 3 %}{% break %}{% endif %}
### {{ message.role | capitalize }}{{ strftime_now('') }}
{% for key, value in message.items() | sort if key not in ['role'] %}
{% set plain = value | replace('\\t', '  ') if value is string else '' %}
{{ key }}={{ value | tojson(ensure_ascii=True) if value is mapping else plain }}
{% endfor %}
{% endfor %}
{% if add_generation_prompt %}### Assistant
{% endif %}
""",
}

QUESTION = {"role": "user", "content": '  What is 2 < 3 & "4"?\tWhy? ça 你好 👋🏽\n'}
TURNS = [
    {"role": "system", "content": "Be brief.\n"},
    QUESTION,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nBecause.", "name": None},
    {"role": "user", "content": "And \u0301e\u0301?"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather; <b>not</b> tomorrow's é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = [
    {"role": "user", "content": [{"type": "text", "text": "Weather in Paris"}, {"type": "image"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I should look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Päris"}}}
        ],
    },
    {"role": "tool", "content": '{"sky": "clear"}'},
]

CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    ("model", [QUESTION], {}),
    ("model", TURNS, {}),
    ("model", TURNS, {"add_generation_prompt": False}),
    ("tools_and_thinking", [QUESTION], {}),
    ("tools_and_thinking", TURNS, {"enable_thinking": False}),
    ("tools_and_thinking", CALLS, {"tools": [WEATHER]}),
    ("strict_turns", TURNS, {"add_generation_prompt": False}),
    ("strict_turns", [QUESTION], {}),
    ("loops_and_filters", TURNS, {}),
    ("loops_and_filters", [{"role": "user", "content": {"é": ["<|x|>", 1.5]}}], {}),
]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  blanks\n\n\nand\ttabs ",
    "def f(x):\n    return x  # ≈ 3.14159",
    "你好 世界 — naïve café 👩‍👩‍👧‍👦 \u0000\u200b",
    "<|im_start|>user\nhi<|im_end|>",
]


def main() -> None:
    """Render and encode every case with transformers."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chats = []
    for name, messages, options in CASES:
        arguments = {"add_generation_prompt": True, **options}
        if TEMPLATES[name] is not None:
            arguments["chat_template"] = TEMPLATES[name]
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        encoded = tokenizer.apply_chat_template(messages, tokenize=True, **arguments)
        chats.append(
            {
                "template": name,
                "messages": messages,
                "options": options,
                "text": text,
                "ids": list(encoded["input_ids"]),
            }
        )
    texts = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        texts.append({"text": text, "ids": ids, "shown": shown, "whole": tokenizer.decode(ids)})
    golden = {
        "oracle": f"transformers {transformers.__version__}",
        "templates": TEMPLATES,
        "chats": chats,
        "texts": texts,
    }
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(golden, ensure_ascii=True, indent=1) + "\n")


if __name__ == "__main__":
    main()
