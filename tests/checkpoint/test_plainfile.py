"""Small files: regular, bounded, and JSON that means one thing only."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from aegis.checkpoint.plainfile import (
    MAX_JSON_PARTS,
    FileDamageError,
    parse_object,
    read_object,
    read_regular,
    regular_nbytes,
    shown,
    shown_name,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"{", "is not valid JSON: Expecting"),
        (b"[]", "holds a list"),
        (b'"a"', "holds a string"),
        (b"1", "holds a number"),
        (b"1.5", "holds a number"),
        (b"true", "holds true or false"),
        (b"null", "holds null"),
        (b'{"a": 1, "a": 1}', "lists a twice"),
        (b'{"b": {"a": 1, "c": 2, "a": 1}}', "lists a twice"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b'{"a": "\xe9"}', "byte 7 is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a number has thousands of digits"),
        (b'{"a": ' * 100_000, "nested too deep"),
        (b'{"a": [' + b"[]," * MAX_JSON_PARTS, "implausibly large"),
    ],
)
def test_what_is_no_plain_json_object_is_refused_in_words(text: bytes, words: str) -> None:
    with pytest.raises(FileDamageError, match=words) as refused:
        parse_object(text)
    assert str(refused.value).isprintable()


def test_a_plain_json_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf {"a": [1, 2.5, null, "\xc3\xa9"]}\n')
    assert read_object(tmp_path / "a.json") == {"a": [1, 2.5, None, "é"]}


def test_a_file_of_a_million_empty_lists_takes_no_memory() -> None:
    text = b'{"a": [' + b"[]," * 2_000_000 + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(FileDamageError):
            parse_object(text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_ranges_of_a_file_are_read_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(range(100)))
    assert read_regular(file, 100) == bytes(range(100))
    assert read_regular(file, 8, 10, 8) == bytes(range(10, 18))
    assert read_regular(file, 8, 96, 8) == bytes(range(96, 100))
    assert read_regular(file, 8, 200, 8) == b""


def test_reads_go_on_where_the_system_gives_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(bytes(range(100)))
    original = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: original(fd, min(size, 7), at))
    assert read_regular(tmp_path / "f", 100) == bytes(range(100))


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    os.truncate(tmp_path / "f", 1 << 40)
    with pytest.raises(FileDamageError, match=r"is implausibly large \(1099511627776 bytes; exp"):
        read_regular(tmp_path / "f", 1 << 20)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (("", "is a directory"), ("pipe", "not a regular file"), ("loop", "cannot")):
        with pytest.raises(FileDamageError, match=words):
            read_regular(tmp_path / name, 100)
    with pytest.raises(FileDamageError, match="not a regular file"):
        regular_nbytes(Path("/dev/null"))
    with pytest.raises(FileDamageError, match="cannot be read"):
        regular_nbytes(tmp_path / "a\0b")
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing", 100)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "I/O")])
def test_what_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    (tmp_path / "f").write_bytes(b"abc")

    def fail(*args: Any) -> None:
        raise error

    for call in ("pread", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(
                FileDamageError, match=rf"cannot be read \({error.strerror}\)"
            ) as caught:
                read_regular(tmp_path / "f", 100)
        remedy = "chmod" if isinstance(error, PermissionError) else "download it again"
        assert remedy in caught.value.about(tmp_path / "f")


def test_a_file_that_disappears_meanwhile_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"abc")

    def gone(*args: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "open", gone)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "f", 100)


def test_messages_show_values_and_names_on_one_short_line() -> None:
    for value in ("a\nb" * 900, list(range(9**5)), 10**4000, 10**5000, {"a": [[[[[[[1]]]]]]]}):
        assert len(shown(value)) < 200
        assert shown(value).isprintable()
    assert shown_name("model.norm.weight") == "model.norm.weight"
    for name in ("a\nb", "\x1b[31m", "\ud800", "x" * 9**5):
        assert len(shown_name(name)) < 200
        assert shown_name(name).isprintable()
