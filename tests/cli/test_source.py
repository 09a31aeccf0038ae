"""Which model and which prompt a command line means."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from aegis.checkpoint.hub_cache import HubName
from aegis.cli.source import names_model, resolve_model, resolve_request
from aegis.errors import UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()


@contextlib.contextmanager
def piped(monkeypatch: pytest.MonkeyPatch, text: bytes) -> Iterator[None]:
    read, write = os.pipe()
    os.write(write, text)
    os.close(write)
    with os.fdopen(read) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        yield


@pytest.mark.parametrize(
    "text", ["folder", "org/name", "org/name@v1", "synthetic:30b", "./gone", "/gone", "~/x"]
)
def test_a_path_a_hub_name_and_synthetic_are_models(text: str) -> None:
    assert names_model(text)


@pytest.mark.parametrize(
    "text", ["Why?", "What is 3/4 of 12?", "hello", "24/7", "this and/or that", "x" * 5000, "a\0b"]
)
def test_anything_else_is_a_prompt(text: str) -> None:
    assert not names_model(text)
    assert resolve_request([text], None, None, None).model is None


def test_a_single_positional_is_model_or_prompt_by_its_looks() -> None:
    assert resolve_request(["folder"], None, None, None).model == Path("folder")
    assert resolve_request(["Why is it so?"], None, None, None).prompt == "Why is it so?"


def test_a_name_on_the_hub_is_one_unless_a_folder_is_called_so(tmp_path: Path) -> None:
    assert resolve_model("org/name") == HubName("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("org/name") == Path("org/name")


def test_a_lone_word_like_a_model_may_have_been_meant_as_a_prompt() -> None:
    assert resolve_request(["and/or"], None, None, None).ambiguous
    for positionals, prompt in ((["and/or", "x"], None), (["and/or"], "x"), (["folder"], None)):
        assert not resolve_request(positionals, None, prompt, None).ambiguous
    assert not resolve_request([], "and/or", None, None).ambiguous


def test_two_positionals_are_model_and_prompt() -> None:
    request = resolve_request(["folder", "folder"], None, None, None)
    assert (request.model, request.prompt) == (Path("folder"), "folder")


def test_a_prompt_of_two_words_without_quotes_is_told_from_a_model() -> None:
    with pytest.raises(UsageError, match=r"there is no folder hello; .* quote a prompt"):
        resolve_request(["hello", "there"], None, None, None)


def test_with_a_model_option_the_positional_is_the_prompt() -> None:
    request = resolve_request(["folder"], "folder", None, None)
    assert (request.model, request.prompt) == (Path("folder"), "folder")


def test_nothing_at_all_is_the_embedded_model_and_no_prompt() -> None:
    request = resolve_request([], None, None, None)
    assert (request.model, request.prompt) == (None, None)


def test_piped_text_is_appended_to_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with piped(monkeypatch, b"some\ntext\n"):
        assert resolve_request([], None, "Sum up:", None).prompt == "Sum up:\nsome\ntext"


def test_piped_text_alone_is_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with piped(monkeypatch, "déjà \xff".encode("latin-1")):
        assert resolve_request([], None, None, None).prompt == "d\ufffdj\ufffd \ufffd"


@pytest.mark.parametrize("data", [b"a\r\nb\r\n", b"\xef\xbb\xbfa\r\nb", b"a\r\nb\n\n"])
def test_line_ends_are_kept_inside_a_text_and_dropped_behind_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "prompt.txt").write_bytes(data)
    assert resolve_request([], None, None, "prompt.txt").prompt == "a\r\nb"
    with piped(monkeypatch, data):
        assert resolve_request([], None, None, None).prompt == "a\r\nb"


def test_the_null_device_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open() as null:
        monkeypatch.setattr(sys, "stdin", null)
        assert resolve_request([], None, None, None).prompt is None


def test_a_file_is_read_as_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("From a file\n")
    assert resolve_request([], None, None, "prompt.txt").prompt == "From a file"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        resolve_request([], None, None, "binary")


@pytest.mark.parametrize(
    ("positionals", "model", "prompt", "match"),
    [
        (["a", "b", "c"], None, None, "too many"),
        (["folder", "b"], "folder", None, "MODEL is given twice"),
        (["hello"], None, "again", "PROMPT is given twice"),
    ],
)
def test_contradictions_are_usage_errors(
    positionals: list[str], model: str | None, prompt: str | None, match: str
) -> None:
    with pytest.raises(click.UsageError, match=match):
        resolve_request(positionals, model, prompt, None)


def test_a_tilde_is_the_home_only_where_a_shell_takes_it_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    Path("~").mkdir()
    Path("~", "here").mkdir()
    assert resolve_model("~/m") == tmp_path / "m"
    here = resolve_model("./~/here")
    assert here is not None
    assert here.is_dir()


def test_what_is_piped_exactly_keeps_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("\n", "\ufeffa\r\n\n"):
        with piped(monkeypatch, text.encode()):
            assert resolve_request([], None, None, None, exact=True).prompt == text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("synthetic:x", r"there is no shape .x.; choose one of qwen3.6-35b-a3b, .* config.json"),
        ("./gone", "there is no folder"),
        ("file", "is a file"),
        ("file.gguf", "is a GGUF file, which aegis does not read; give the folder"),
        ("~nobody-of-that-name/m", "there is no folder"),
        ("x" * 5000, "there is no folder"),
    ],
)
def test_what_is_no_folder_is_refused_with_what_to_do(text: str, match: str) -> None:
    Path("file").touch()
    Path("file.gguf").touch()
    with pytest.raises(UsageError, match=match):
        resolve_model(text)
