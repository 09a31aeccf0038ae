"""A tokenizer of any vocabulary: byte-level BPE over made-up words.

It takes the memory that a real one of that size takes, encodes every text, and is the same on
every machine. The last three ids are the control tokens of its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice, product

from aegis.checkpoint.vocabulary import byte_letters

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
_STRIDE = 7919
"""Longer words are every so manieth combination, so that they begin with every letter."""
_FOUR_LETTERS = 40_000
"""Of these there are so many, then come words of six with a blank ahead."""
_LINES_AT_ONCE = 4096
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n'"
    " }}{% endif %}"
)


def control_ids(vocab_size: int) -> dict[str, int]:
    """The control tokens of a vocabulary."""
    return {name: vocab_size - len(CONTROL) + i for i, name in enumerate(CONTROL)}


def tokenizer_json(vocab_size: int) -> Iterator[bytes]:
    """tokenizer.json with ``vocab_size`` tokens in all, in pieces."""
    words = max(vocab_size - len(CONTROL), 0)
    alphabet = sorted(byte_letters())[:words]
    head = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(name, i) for name, i in control_ids(vocab_size).items()],
        "normalizer": None,
        "pre_tokenizer": _BYTES,
        "post_processor": None,
        "decoder": _BYTES,
    }
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False}
    yield (json.dumps(head, indent=2)[:-2] + ',\n  "model": ').encode()
    yield (json.dumps(model, indent=4)[:-2] + ',\n    "vocab": {').encode()
    tokens = chain(alphabet, map("".join, islice(_merges(), words - len(alphabet))))
    yield from _lines(
        f"\n      {json.dumps(t, ensure_ascii=False)}: {i}" for i, t in enumerate(tokens)
    )
    yield b'\n    },\n    "merges": ['
    yield from _lines(
        f'\n      [\n        "{left}",\n        "{right}"\n      ]'
        for left, right in islice(_merges(), words - len(alphabet))
    )
    yield b"\n    ]\n  }\n}\n"


def _lines(lines: Iterator[str]) -> Iterator[bytes]:
    """The lines with commas between them, many in a piece."""
    comma = b""
    while piece := ",".join(islice(lines, _LINES_AT_ONCE)):
        yield comma + piece.encode()
        comma = b","


def tokenizer_config_json() -> bytes:
    """tokenizer_config.json with a plain chat template."""
    end, _, turn = CONTROL
    config = {
        "bos_token": None,
        "eos_token": turn,
        "pad_token": end,
        "chat_template": _TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return json.dumps(config, indent=2).encode()


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}


def _added(name: str, token_id: int) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": name, **flags, "special": True}


_BLANK = "\u0120"
"""What stands for a blank."""


def _merges() -> Iterator[tuple[str, str]]:
    """What is joined to new tokens, in this order; all of it is there before it is used."""
    yield from ((_BLANK, letter) for letter in _LETTERS)
    yield from product(_LETTERS, _LETTERS)
    pairs = [a + b for a, b in product(_LETTERS, _LETTERS)]
    firsts = [_BLANK + letter for letter in _LETTERS]
    yield from product(firsts, pairs)
    yield from islice(_spread(pairs, pairs), _FOUR_LETTERS)
    words = [first + pair for first, pair in product(firsts, pairs)]
    yield from _spread(words, pairs)


def _spread(lefts: list[str], rights: list[str]) -> Iterator[tuple[str, str]]:
    """All combinations, neighbours of which have little in common."""
    count = len(lefts) * len(rights)
    for i in range(count):
        left, right = divmod(i * _STRIDE % count, len(rights))
        yield lefts[left], rights[right]
