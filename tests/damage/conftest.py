"""Undamaged models to damage copies of, and command lines that start at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_server import CommandServer
from strategies import write_checkpoint

from aegis.convert.convert import convert

GOLDEN = Path(__file__).resolve().parent.parent / "goldens" / "qwen2_moe"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    """Runs ``aegis`` in a process of its own per command line."""
    with CommandServer(tmp_path_factory.mktemp("commands")) as started:
        yield started


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint in one file and one in three, and a store with 3-bit experts too."""
    folder = tmp_path_factory.mktemp("pristine")
    return {
        "checkpoint": Path(shutil.copytree(GOLDEN, folder / "checkpoint")),
        "sharded": write_checkpoint(folder / "sharded", 1, shards=3),
        "store": convert(GOLDEN, folder / "store", experts3bit=True).path,
    }
