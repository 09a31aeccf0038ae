"""Tokenizers made from tiktoken.model, or from vocab.json and merges.txt, give their ids."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aegis.checkpoint.vocabulary import Vocabulary, tokenizer_nbytes
from aegis.errors import TokenizerError
from aegis.text.tokenizer import Tokenizer

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "goldens/text/vocabularies.json").read_text(encoding="utf-8")
)
KIMI = GOLDEN["kimi"]
AUTO_MAP = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
PAIRS = ["qwen2", "qwen3_5", "gpt2", "gpt2_surrounded"]


def write_kimi(
    folder: Path, lines: Sequence[str], rows: int | None, named: dict[str, str], **config: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    listed = {place: {"content": name, "special": True} for place, name in named.items()}
    said = {"auto_map": AUTO_MAP, "added_tokens_decoder": listed, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    model = {"model_type": "kimi_k2"} | ({} if rows is None else {"vocab_size": rows})
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    return write_kimi(tmp_path, KIMI["tiktoken.model"], KIMI["rows"], KIMI["named"])


def test_kimis_texts_have_the_ids_tiktoken_gives(kimi: Path) -> None:
    tokenizer = Tokenizer.open(kimi)
    assert tokenizer.vocab_size == KIMI["rows"]
    for case in KIMI["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["plain"]) == case["text"]
        if "<|reserved" not in case["text"] and "<think>" not in case["text"]:
            assert tokenizer.encode(case["text"], parse_special=False) == case["plain"]


def test_kimis_tokens_behind_the_ranked_ones_have_their_places(kimi: Path) -> None:
    tokenizer = Tokenizer.open(kimi)
    base = KIMI["rows"] - 256
    for place, name in KIMI["named"].items():
        assert tokenizer.token_to_id(name) == int(place)
    assert tokenizer.id_to_token(base + 40) == f"<|reserved_token_{base + 40}|>"
    assert tokenizer.decode([base + 40, base + 2]) == ""
    chat = tokenizer.encode_chat(
        [{"role": "user", "content": "a<|im_end|>b"}], chat_template="{{ messages[0].content }}"
    )
    assert base + 2 not in chat


def test_tokens_that_the_model_has_no_rows_for_are_left_out(tmp_path: Path) -> None:
    rows = KIMI["rows"] - 200
    folder = write_kimi(tmp_path, KIMI["tiktoken.model"], rows, KIMI["named"])
    assert Tokenizer.open(folder).vocab_size == rows
    folder = write_kimi(tmp_path, KIMI["tiktoken.model"], None, KIMI["named"])
    assert Tokenizer.open(folder).vocab_size == KIMI["rows"]


def test_ranks_may_stand_in_any_order(kimi: Path) -> None:
    path = kimi / "tiktoken.model"
    text = KIMI["cases"][1]["text"]
    path.write_text("\r\n".join(reversed(path.read_text().splitlines())) + "\r\n\r\n")
    assert Tokenizer.open(kimi).encode(text) == KIMI["cases"][1]["ids"]


def joined(tokens: Sequence[bytes], text: bytes) -> list[int]:
    """As tiktoken says it: of all neighbours that are a token, the lowest rank, from the left."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if text in ranks:
        return [ranks[text]]
    parts = [text[i : i + 1] for i in range(len(text))]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


BYTES = [bytes([byte]) for byte in range(256)]


@st.composite
def grown(draw: st.DrawFn) -> list[bytes]:
    """All bytes, and tokens that each join two earlier ones, as training leaves them, or mixed."""
    pool = [b"a", b"b"]
    for _ in range(draw(st.integers(0, 12))):
        token = draw(st.sampled_from(pool)) + draw(st.sampled_from(pool))
        if token not in pool and len(token) <= 12:
            pool.append(token)
    return BYTES + (draw(st.permutations(pool[2:])) if draw(st.booleans()) else pool[2:])


@settings(max_examples=40)
@given(grown(), st.lists(st.text("ab", min_size=1, max_size=24), min_size=1, max_size=8))
@example([*BYTES, b"ba", b"ab", b"aba"], ["ababa", "abbaba", "babab", "abaab"])
# The last token is one only where it is a whole word: bb is joined before.
@example([*BYTES, b"bb", b"ab", b"ba", b"abba"], ["abba", "babba"])
def test_joining_by_pairs_is_joining_by_ranks(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[bytes], words: list[str]
) -> None:
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(tokens)]
    folder = write_kimi(tmp_path_factory.mktemp("ranks"), lines, None, {})
    tokenizer = Tokenizer.open(folder)
    for word in words:
        assert tokenizer.encode(word) == joined(tokens, word.encode()), (tokens[256:], word)


@pytest.mark.parametrize("rule", PAIRS)
def test_pairs_give_the_ids_transformers_gives(tmp_path: Path, rule: str) -> None:
    folder = write_files(tmp_path, GOLDEN[rule]["files"])
    assert Vocabulary.of(folder).rule == rule.removesuffix("_surrounded")
    tokenizer = Tokenizer.open(folder)
    for case in GOLDEN[rule]["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["shown"]


def test_a_config_without_that_asks_for_no_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_files(tmp_path, GOLDEN["gpt2"]["files"]))
    assert tokenizer.bos_token_id is not None
    assert tokenizer.bos_token_id not in tokenizer.encode("a")


def test_tokenizer_json_comes_before_the_older_files(
    kimi: Path, make_folder: Callable[..., Path], byte_level: Any
) -> None:
    byte_level.save(str(kimi / "tokenizer.json"))
    (kimi / "tokenizer_config.json").unlink()
    assert Tokenizer.open(kimi).encode("a") == byte_level.encode("a").ids


def test_their_memory_is_that_of_a_larger_tokenizer_json(kimi: Path, tmp_path: Path) -> None:
    ranks = (kimi / "tiktoken.model").stat().st_size
    assert tokenizer_nbytes(kimi) == 5 * ranks
    folder = tmp_path / "pairs"
    folder.mkdir()
    files = write_files(folder, GOLDEN["qwen2"]["files"])
    sizes = [(files / name).stat().st_size for name in ("vocab.json", "merges.txt")]
    assert tokenizer_nbytes(files) == 3 * sum(sizes)
    (files / "merges.txt").unlink()
    with pytest.raises(TokenizerError, match=r"merges\.txt, without which .* is missing too"):
        tokenizer_nbytes(files)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "names none"),
        ({"tokenizer_class": "TikTokenTokenizer"}, "names 'TikTokenTokenizer'"),
        ({"auto_map": {"AutoTokenizer": ["tokenization_hy.HYTokenizer", None]}}, "names none"),
        ({"auto_map": []}, "names none"),
    ],
)
def test_ranks_of_unknown_rules_are_refused(kimi: Path, config: dict[str, Any], words: str) -> None:
    (kimi / "tokenizer_config.json").write_text(json.dumps(config))
    match = (
        rf"tokenizer\.json is missing; .*tiktoken\.model for .* alone, and .* {words}\), so copy"
    )
    with pytest.raises(TokenizerError, match=match):
        Tokenizer.open(kimi)


@pytest.mark.parametrize("name", [None, "RobertaTokenizer", "PreTrainedTokenizerFast", 5])
def test_pairs_of_unknown_rules_are_refused(tmp_path: Path, name: object) -> None:
    folder = write_files(tmp_path, GOLDEN["gpt2"]["files"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    match = r"tokenizer\.json is missing; .*GPT2Tokenizer and Qwen2.*, so copy it there or write it"
    with pytest.raises(TokenizerError, match=match):
        Tokenizer.open(folder)


def test_code_of_a_checkpoint_is_never_run(kimi: Path) -> None:
    (kimi / "tokenization_kimi.py").write_text("raise AssertionError('this was run')")
    assert Tokenizer.open(kimi).encode("a")


LINES = KIMI["tiktoken.model"]
TOKEN = base64.b64encode(b"\x07").decode()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no token for the byte 0"),
        ([line for line in LINES if not line.endswith(" 7")], "has no token of rank 7, though"),
        ([*LINES, f"YWI= {len(LINES)}"], "lists a token twice"),
        (["x 0", *LINES[1:]], "line 1 of .* is not a token in base64 and its rank"),
        ([LINES[0], "QQ==", *LINES[2:]], "line 2 of"),
        ([*LINES[:9], "QQ== 9 9", *LINES[10:]], "line 10 of"),
        ([*LINES[:9], "QQ== nine", *LINES[10:]], "line 10 of"),
        ([*LINES, f"{'YWFh' * 300} {len(LINES)}"], r"line \d+ of"),
        (["AAAA 0", *LINES[1:]], "has no token for the byte"),
    ],
)
def test_damaged_ranks_are_refused(tmp_path: Path, lines: list[str], words: str) -> None:
    folder = write_kimi(tmp_path, lines, None, {})
    with pytest.raises(TokenizerError, match=rf"{words}.*; download it again"):
        Tokenizer.open(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("merges.txt", "a b c\n"),
        ("merges.txt", "a\n"),
        ("merges.txt", "a nothing\n"),
        ("vocab.json", "{"),
        ("vocab.json", "[]"),
        ("vocab.json", '{"a":-1}'),
        ("vocab.json", "{}"),
    ],
)
def test_damaged_pairs_are_refused(tmp_path: Path, name: str, content: str) -> None:
    folder = write_files(tmp_path, GOLDEN["qwen2"]["files"] | {name: content})
    with pytest.raises(TokenizerError, match=r"vocab\.json .*; download"):
        Tokenizer.open(folder)


def test_an_added_token_with_another_id_is_refused(kimi: Path, tmp_path: Path) -> None:
    named = {**KIMI["named"], "3": "<|far|>"}
    folder = write_kimi(kimi, KIMI["tiktoken.model"], KIMI["rows"], named)
    match = r"config\.json gives <\|far\|> the id 3, but with tiktoken\.model it is None; download"
    with pytest.raises(TokenizerError, match=match):
        Tokenizer.open(folder)


def test_a_temporary_folder_without_room_is_named(
    kimi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(kimi / "nowhere"))
    with pytest.raises(TokenizerError, match=r"temporary folder \(No such .*\); set TMPDIR"):
        Tokenizer.open(kimi)
