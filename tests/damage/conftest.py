"""Undamaged models to damage copies of, and command lines that start at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_server import CommandServer
from strategies import write_checkpoint

from aegis.checkpoint.config import QuantSpec
from aegis.convert.convert import convert

GOLDEN = Path(__file__).resolve().parent.parent / "goldens" / "qwen2_moe"
SEEING = GOLDEN.parent / "qwen3_5_moe" / "hf_bf16"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    """Runs ``aegis`` in a process of its own per command line."""
    with CommandServer(tmp_path_factory.mktemp("commands")) as started:
        yield started


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint in one file and one in three, and a store with 3-bit experts too; a checkpoint
    of a vision-language model, and its store."""
    folder = tmp_path_factory.mktemp("pristine")
    return {
        "checkpoint": Path(shutil.copytree(GOLDEN, folder / "checkpoint")),
        "sharded": write_checkpoint(folder / "sharded", 1, shards=3),
        "store": convert(GOLDEN, folder / "store", experts3bit=True).path,
        "seeing": Path(shutil.copytree(SEEING, folder / "seeing")),
        "seeing store": convert(SEEING, folder / "kept", quantize=QuantSpec(4, 64)).path,
    }
