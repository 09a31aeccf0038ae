"""Giving memory back must work beside whatever the caller's own program has imported."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aegis.engine import memory


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
