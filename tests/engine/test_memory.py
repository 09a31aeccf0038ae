"""Giving memory back must work beside whatever the caller's own program has imported."""

import mmap
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fault_tools import python_script
from small_model import linux

from aegis.engine import memory
from aegis.tiers.arena import Arena


class Answers(ModuleType):
    """A stand-in for a module that answers every name, as lazy packages put into sys.modules."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(name=name)


class Raises(ModuleType):
    """One that loads something, and fails, at every look."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("stranger", [Answers("stranger"), Raises("stranger"), None, 7])
def test_strangers_among_the_modules_change_nothing(
    stranger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = memory._loaded_files()
    monkeypatch.setitem(sys.modules, "stranger", stranger)
    assert memory._loaded_files() >= before
    memory.drop_loaded_pages()


@linux
@pytest.mark.parametrize("name", [b"caf\xe9", b"a\rb", b"a\x0cb 1", b"a\nb", "a\u2028b".encode()])
def test_whatever_the_callers_program_has_mapped_has_any_name(tmp_path: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(fd, bytes(4096))
    with mmap.mmap(fd, 4096):
        files = memory._loaded_files()
        assert os.fsdecode(path) in files or b"\n" in name  # the kernel writes that as \\012
        memory.drop_loaded_pages()
        arena = Arena(1 << 20)
        assert arena.huge_nbytes() == 0
        arena.close()
    os.close(fd)


@linux
def test_a_process_may_have_a_name_that_ends_in_the_middle_of_a_character() -> None:
    code = (
        "import ctypes; from aegis.engine import memory\n"
        "ctypes.CDLL(None).prctl(15, bytes([0x61, 0xe8, 0xa8]))\n"
        "assert open('/proc/self/comm', 'rb').read() == bytes([0x61, 0xe8, 0xa8, 0x0a])\n"
        "assert min(memory.resident_nbytes(), memory.peak_nbytes()) > 1 << 20"
    )
    done = python_script(code)
    assert not done.returncode, done.stderr
