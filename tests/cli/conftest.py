"""The real command in a process of its own, and a model small enough to run in a moment."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_here import Done, command_here

GOLDEN = Path(__file__).resolve().parent.parent / "goldens" / "qwen2_moe"


@pytest.fixture(scope="session")
def command_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a cache folder that the session shares."""
    return {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "AEGIS_CACHE": str(tmp_path_factory.mktemp("cache")),
    }


@pytest.fixture
def aegis(
    command_env: dict[str, str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``aegis ARGUMENTS`` somewhere outside the repository, with nothing on stdin."""

    def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "aegis", *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=command_env,
            check=False,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of three layers, copied so that a test may add files to it."""
    folder = tmp_path_factory.mktemp("model") / "small"
    shutil.copytree(GOLDEN, folder)
    return str(folder)


@pytest.fixture
def in_process(
    command_env: dict[str, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Done]:
    """The same in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AEGIS_CACHE", command_env["AEGIS_CACHE"])
    return command_here(capfd, monkeypatch)
