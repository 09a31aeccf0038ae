"""Writes tests/goldens/text/vocabularies.json: ids of tiktoken and transformers for old files.

Needs tiktoken and transformers (no torch): pip install tiktoken transformers, then
python tools/make_vocabulary_goldens.py from the repository root.
"""

# ruff: noqa: RUF001, letters of many scripts are the point

from __future__ import annotations

import base64
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import tiktoken
import transformers
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import GPT2Tokenizer, Qwen2Tokenizer, Qwen3_5Tokenizer

TARGET = Path("tests/goldens/text/vocabularies.json")
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of Kimi-K2's tokenization_kimi.py."""

TEXTS = [
    "",
    "Hello, world! It's a test; we'll see what they've DONE.",
    "The quick brown fox jumps over the lazy dog, and the lazy dog doesn't mind at all.",
    "I'M SURE YOU'LL SAY 'TIS O'Clock. don'tcan'tWon't'S 'ſ",
    "1234567890 3.14159 1,000,000 ٠١٢٣٤٥٦٧٨٩ ①②③ ½ Ⅷ 十二",
    "camelCase HTTPServer snake_case kebab-case XMLHttpRequest2 iPhone15Pro",
    "    indented\n\tdef f(x):\n\t\treturn x ** 2  # ²\n\n\n    pass\r\n\r\nend  ",
    " \u00a0\u2003\u3000\u200b mixed\u2028blanks\u0085and\x0blines\x0c ",
    "中文和English混合内容。你好，世界！汉字abc漢字ABC 北京市 Pascal",
    "日本語のテキスト、カタカナとひらがな。東京2024年、々〆〇",
    "한국어 문장입니다. 안녕하세요 세계! 조선말",
    "Привет, мир! Это проверка. Ёжик ЕДЕТ домой.",
    "مرحبا بالعالم، كيف حالك؟ اللُّغَة العَرَبِيَّة",
    "שלום עולם, מה שלומך? בְּרֵאשִׁית",
    "नमस्ते दुनिया, कैसे हैं आप? क्षत्रिय ज्ञान",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "Γειά σου Κόσμε! Ὀδυσσεύς ΑΒΓ ς",
    "ქართული ენა, հայերեն լեզու, አማርኛ ቋንቋ, ᏣᎳᎩ, தமிழ், తెలుగు",
    "Dǅ ǅungla ﬁn ﬀ ẞ ß ŉ İi ıI ʰ ˈaˑ",
    "emoji 👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 ❤️ 🎉🎉🎉 ©®™",
    "naïve café e\u0301 A\u030a ﷺ combining: n\u0303n\u0303n\u0303",
    "𝒜𝓁𝑔𝑒𝒷𝓇𝒶 𠀀𠀁𪜶 𐍈𐌰 𓀀",
    "<|im_end|>text<|im_user|>user<|im_middle|>x[BOS][EOS]<|reserved_token_99999|><think>a</think>",
    "!!!???...---___***///\\\\\\|||~~~```\"\"\"'''((([[[{{{<<<>>>}}}]]])))",
    '{"key": [1, 2.5e-3, null], "x": "\\u00e9\\n"}\n',
    "aaaaaaaaaaa bababababab abaabaaba ababaababa aabaabaa",
    "a" * 40 + "b" * 40 + "ab" * 20 + "aba" * 20,
    "\x00\x01\x1f\x7f\x80\x9f\ufffd\ufeff",
]


def trained(size: int, pattern: str) -> Tokenizer:
    """Byte-level BPE on the texts."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def ranked(source: random.Random) -> list[bytes]:
    """Bytes in any order, what training joined, and joints that no training would choose."""
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    bytes_of = {chr(b if b in prints else next(others)): b for b in range(256)}
    vocab = trained(900, KIMI).get_vocab()
    tokens = [bytes(map(bytes_of.__getitem__, t)) for t in sorted(vocab, key=vocab.__getitem__)]
    tokens[:256] = source.sample(tokens[:256], 256)
    for _ in range(40):
        tokens.append(bytes(source.choices(b"ab", k=source.randint(2, 6))))
    for _ in range(300):
        tokens.append(source.choice(tokens) + source.choice(tokens))
    return list(dict.fromkeys(tokens))


def kimi() -> dict[str, Any]:
    """tiktoken.model and what tiktoken makes of every text with it."""
    tokens = ranked(random.Random(5))
    base = len(tokens)
    named = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 17: "<|im_middle|>"}
    special = {named.get(i, f"<|reserved_token_{base + i}|>"): base + i for i in range(256)}
    encoding = tiktoken.Encoding(
        "kimi",
        pat_str=KIMI,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens=special,
    )
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    return {
        "tiktoken.model": lines,
        "named": {str(base + place): name for place, name in named.items()},
        "rows": base + 256,
        "cases": [
            {
                "text": text,
                "ids": encoding.encode(text, allowed_special="all"),
                "plain": encoding.encode(text, disallowed_special=()),
            }
            for text in [*TEXTS, f"a<|reserved_token_{base + 40}|>b"]
        ],
    }


def pairs(reader: Any, config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """vocab.json and merges.txt, and what transformers makes of every text with them."""
    model = json.loads(trained(700, "").to_str())["model"]
    vocab = model["vocab"]
    if reader is not Qwen2Tokenizer:
        vocab["<|endoftext|>"] = len(vocab)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    added = {str(len(vocab)): "<|im_end|>", str(len(vocab) + 1): "<think>"}
    config = {
        **config,
        "added_tokens_decoder": {
            place: {"content": name, "special": name != "<think>", "normalized": False}
            for place, name in added.items()
        },
    }
    files = {
        "vocab.json": json.dumps(vocab),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
        "tokenizer_config.json": json.dumps(config),
        "config.json": json.dumps({"model_type": model_type, "vocab_size": len(vocab) + 8}),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_text(content, encoding="utf-8")
        if reader is Qwen3_5Tokenizer:  # Its from_pretrained does not look for these files.
            theirs = reader(vocab, [tuple(pair.split(" ")) for pair in merges])
            theirs.add_tokens([AddedToken(name, normalized=False) for name in added.values()])
        else:
            theirs = reader.from_pretrained(folder)
        cases = [
            {
                "text": text,
                "ids": theirs.encode(text),
                "shown": theirs.decode(theirs.encode(text), clean_up_tokenization_spaces=False),
            }
            for text in TEXTS
        ]
    return {"files": files, "cases": cases}


def main() -> None:
    """Write the file."""
    qwen = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"}
    gpt2 = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>"}
    gpt2 |= {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    goldens = {
        "versions": {"tiktoken": tiktoken.__version__, "transformers": transformers.__version__},
        "kimi": kimi(),
        "qwen2": pairs(Qwen2Tokenizer, qwen, "qwen3_moe"),
        "qwen3_5": pairs(Qwen3_5Tokenizer, qwen, "qwen3_5_moe"),
        "gpt2": pairs(GPT2Tokenizer, gpt2, "granitemoe"),
        "gpt2_surrounded": pairs(
            GPT2Tokenizer, {**gpt2, "add_bos_token": True, "add_prefix_space": True}, "granitemoe"
        ),
    }
    TARGET.write_text(json.dumps(goldens, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
