"""Writes tests/goldens/text: what transformers and mlx-lm make of chats, texts and tokens.

Needs transformers (no torch) and mlx-lm: pip install transformers mlx-lm "mlx[cpu]", then
python tools/make_text_goldens.py from the repository root.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jinja2
import mlx.core as mx
import mlx_lm
import transformers
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_repetition_penalty
from mlx_lm.tokenizer_utils import load as load_mlx
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import AutoTokenizer

sys.path.insert(0, "tests")
from text_kinds import KINDS, write_folder

MODEL = Path("aegis/embedded")
TARGET = Path("tests/goldens/text")

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
    "extensions": """\
{%- set outer = 'outside' -%}
{%- set ns = namespace(count=0) -%}
{%- for message in messages recursive -%}
    {%- generation -%}
        {%- set outer = 'inside' -%}
        {{- message.content -}}
        {%- set ns.count = ns.count + 1 -%}
    {%- endgeneration -%}
    {{- '|' ~ outer ~ loop.index ~ (loop.depth0 or '') ~ nothing ~ (nothing is defined) -}}
    {%- if message.parts is defined %}{{ loop(message.parts) }}{% endif -%}
    {%- if loop.index == 2 %}{% continue %}{% endif -%}
    {{- '.' -}}
{%- endfor -%}
{{ ns.count }}{{ unk_token }}{{ bos_token }}{{ pad_token }}{{ mask_token }}
{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}
{{ messages[0] | tojson(indent=1) }}
{{ strftime_now('%%') }}{{ dict(a=1) | items | list }}{{ '%s-%d' | format('x', 3) }}
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
    (
        "extensions",
        [
            {
                "role": "user",
                "content": "a\u0000\r\nb\u2028",
                "parts": [{"content": "\U0001f469\u200d"}],
            },
            {"role": "user", "content": ["x", 1, None, {"k": [2.5, True]}]},
            {"role": "user", "content": "<|im_end", "parts": []},
        ],
        {"mask_token": "given"},
    ),
    ("loops_and_filters", TURNS, {}),
    ("loops_and_filters", [{"role": "user", "content": {"é": ["<|x|>", 1.5]}}], {}),
]

FAILING = [
    "{{ raise_exception('Roles must\nalternate.') }}",
    "{{ raise_exception('') }}",
    "{{ nothing.at.all }}",
    "{{ messages[7].role }}",
    "{{ messages | tojson | fromjson }}",
    "{% for m in messages %}",
    "{{ nothing() }}",
    "{{ messages[0].content + 1 }}",
    "{{ undefined_thing | tojson }}",
    "{{ 1 // 0 }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'other' %}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
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

SCRIPTS = [
    "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 ❤️\u200d🔥",
    "🇩🇪🇯🇵🇺🇳🇪",
    "👋🏻👋🏼👋🏽👋🏾👋🏿 👩🏿\u200d🚀",
    "e\u0301 \u0301 a\u0308\u0304 Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334",
    "\u1112\u1161\u11ab한글 ภาษาไทย नमस्ते עִבְרִית العَرَبِيَّة",
    "1️⃣ #️⃣ ©️ \ufeffx\u2028y\u0085z",
    "\U00020bb7\U0001f1e6\U0010fffd\ue000\uf8ff\ufffd",
    "a\r\nb\rc\u0000d\u007f\u001be",
    " leading, trailing \u00a0\u3000 ",
    "▁▁ ▁a <0xE2><0x82>  .",
    "he's n't it 's , . ! it ' ve '",
]

PIECES = [
    "<a>",
    "<a><b>",
    "<b>",
    "[T]",
    "hello",
    "he",
    " ",
    "  ",
    "\n",
    "\t",
    "x",
    "_",
    "é",
    "e\u0301",
]
PIECES += [
    "<",
    "the",
    "\x1c",
    "\x85",
    "\xa0",
    "\u3000",
    "\u200b",
    "<A>",
    "\uff21",
    "ß",
    "word",
    "wordy",
    "İ",
]
SPELLED = ["<a>", "<a><b>", "<b>", "[T]", "word", "<A>", "  ", "é"]
NAMES = ["bos_token", "eos_token", "pad_token", "mask_token", "image_token"]
NORMALIZERS = {
    "NFC": normalizers.NFC,
    "NFKC": normalizers.NFKC,
    "Lowercase": normalizers.Lowercase,
}


def opened(backend: Tokenizer, **files: Any) -> tuple[Any, Any]:
    """The tokenizer of transformers and that of mlx-lm for a folder with these files."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name) / "model", backend, **files)
        return AutoTokenizer.from_pretrained(folder), load_mlx(folder)


def scripts() -> dict[str, list[dict[str, Any]]]:
    """Texts of many scripts, and ids that are no text, by kind of tokenizer."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for kind, build in KINDS.items():
        hf, mlx = opened(build(), tokenizer_config={"clean_up_tokenization_spaces": True})
        draw = random.Random(kind)
        wild = [[draw.randrange(len(hf)) for _ in range(30)] for _ in range(6)]
        texts = [hf(text, add_special_tokens=False)["input_ids"] for text in SCRIPTS]
        cases[kind] = [
            {
                "ids": ids,
                "shown": hf.decode(ids),
                "skipped": hf.decode(ids, skip_special_tokens=True),
            }
            for ids in [*texts, *wild]
        ]
        for case in cases[kind][: len(SCRIPTS)]:
            stream = mlx.detokenizer
            for token in case["ids"]:
                stream.add_token(token)
            stream.finalize()
            case["mlx_lm"] = stream.text
    return cases


def added_token(draw: random.Random, content: str) -> dict[str, Any]:
    """A token with flags at random."""
    odds = {"single_word": 0.3, "lstrip": 0.3, "rstrip": 0.3, "normalized": 0.4, "special": 0.5}
    return {"content": content, **{flag: draw.random() < share for flag, share in odds.items()}}


def added_tokens() -> list[dict[str, Any]]:
    """Tokenizers with added tokens of every flag, declared in one file or another."""
    draw, cases = random.Random(3), []
    for index in range(48):
        kind = ["byte_level", "llama_metaspace", "llama_prepend", "unigram", "word_pieces"][
            index % 5
        ]
        normalizer = None if kind == "llama_prepend" else draw.choice([None, None, *NORMALIZERS])
        # Two spellings that normalize to one token are the library's to choose between.
        pool = [s for s in SPELLED if normalizer != "Lowercase" or s != "<A>"]
        own = [added_token(draw, content) for content in draw.sample(pool, draw.randint(1, 4))]
        backend = KINDS[kind]()
        if normalizer:
            backend.normalizer = NORMALIZERS[normalizer]()
        backend.add_tokens([AddedToken(**token) for token in own])
        config: dict[str, Any] = {}
        if index % 3:
            listed = [added_token(draw, content) for content in draw.sample(pool, 2)]
            ids = {t["content"]: backend.token_to_id(t["content"]) for t in listed}
            new = iter(range(backend.get_vocab_size(), backend.get_vocab_size() + 2))
            config["added_tokens_decoder"] = {
                str(next(new) if ids[t["content"]] is None else ids[t["content"]]): t
                for t in listed
            }
        if index % 2:
            names = draw.sample(NAMES, 2)
            config |= {name: draw.choice(["<a>", "<b>", "[T]", "<new>"]) for name in names}
        files = {"tokenizer_config": config}
        if index % 4 == 3:
            files["special_tokens_map"] = {
                "eos_token": "<map>",
                "additional_special_tokens": ["<b>"],
            }
        hf, _ = opened(backend, **files)
        texts = ["".join(draw.choices(PIECES, k=draw.randint(2, 9))) for _ in range(10)]
        cases.append(
            {
                "kind": kind,
                "normalizer": normalizer,
                "added": own,
                "files": files,
                "names": dict(hf.special_tokens_map),
                "tokens": {
                    str(i): token.__getstate__()
                    for i, token in hf.backend_tokenizer.get_added_tokens_decoder().items()
                },
                "texts": [{"text": text, "ids": hf(text)["input_ids"]} for text in texts],
            }
        )
    return cases


def filters() -> list[dict[str, Any]]:
    """Which tokens the filters of mlx-lm leave, and what its repetition penalty makes of logits."""
    draw, cases = random.Random(5), []
    for top_p, min_p, top_k in [(0.9, 0, 0), (0.3, 0, 0), (1, 0.1, 0), (1, 0, 7), (0.95, 0.02, 9)]:
        logits = mx.array([draw.gauss(0, 2.5) for _ in range(60)])
        left = logits - mx.logsumexp(logits)
        left = apply_top_p(left, top_p) if top_p < 1 else left
        left = apply_min_p(left, min_p) if min_p else left
        left = apply_top_k(left, top_k) if top_k else left
        kept = [i for i, value in enumerate(left.tolist()) if value > float("-inf")]
        history = [draw.randrange(60) for _ in range(30)]
        settings = {"top_p": top_p, "min_p": min_p, "top_k": top_k}
        case = {"settings": settings, "logits": logits.tolist(), "kept": kept, "history": history}
        penalty = make_repetition_penalty(1.3, 20)
        cases.append({**case, "penalised": penalty(history, logits[None])[0].tolist()})
    return cases


def failures(tokenizer: Any) -> list[dict[str, str]]:
    """What templates that fail say."""
    cases = []
    for template in FAILING:
        try:
            tokenizer.apply_chat_template([QUESTION], tokenize=False, chat_template=template)
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            RecursionError,
            TypeError,
        ) as error:
            cases.append({"template": template, "error": str(error)})
        else:
            raise SystemExit(f"{template} does not fail")
    return cases


def main() -> None:
    """Render, encode and decode every case with transformers and mlx-lm."""
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
    for text in TEXTS + SCRIPTS:
        ids = tokenizer(text)["input_ids"]
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        texts.append({"text": text, "ids": ids, "shown": shown, "whole": tokenizer.decode(ids)})
    oracle = f"transformers {transformers.__version__}, mlx-lm {mlx_lm.__version__}"
    TARGET.mkdir(parents=True, exist_ok=True)
    goldens = {
        "chat": {
            "templates": TEMPLATES,
            "chats": chats,
            "texts": texts,
            "failures": failures(tokenizer),
        },
        "sampling": {"filters": filters()},
        "kinds": {"scripts": scripts(), "added_tokens": added_tokens()},
    }
    for name, golden in goldens.items():
        content = json.dumps({"oracle": oracle, **golden}, ensure_ascii=True, indent=1)
        content = re.sub(r"\[[\d,\s]+\]", lambda found: " ".join(found[0].split()), content)
        (TARGET / f"{name}.json").write_text(content + "\n")


if __name__ == "__main__":
    main()
