"""Runs command lines in the tests' own process, which saves starting one for each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from aegis.cli.app import _guarded


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout)
        return found


def command_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """Runs ``aegis ARGUMENTS`` here, with nothing on stdin."""

    def run(*arguments: str) -> Done:
        with open(os.devnull) as nothing, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", nothing)
            # Tests before this one may have taken more than the cap.
            patch.setattr("aegis.cli.run.check_cap", lambda result: None)
            capfd.readouterr()
            code = _guarded(arguments)
        return Done(code, *capfd.readouterr())

    return run
