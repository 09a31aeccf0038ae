"""Damage is refused by every command in one sentence: exit code 1, little memory, nothing left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import damage_cases
import damages
import pytest
from command_server import CommandServer, Ended
from damages import Case

RUN = ("--raw", "hello", "-n", "2", "-c", "64", "--cap", "300MiB", "-q")
REFUSED_NBYTES = 40 << 20
"""What refusing may take beyond the interpreter: reading a header of 20 MB, opening an arena."""


def check(ended: Ended, words: str) -> None:
    assert ended.code == 1, ended
    assert ended.stdout == "", ended
    assert re.search(words, ended.sentence), ended.sentence
    assert ended.sentence.isprintable()
    assert len(ended.sentence) < 700
    assert "AEGIS_TRACEBACK" not in ended.sentence
    assert ended.grown_nbytes < REFUSED_NBYTES


def damaged(pristine: Path, folder: Path, case: Case) -> Path:
    shutil.copytree(pristine, folder)
    case.damage(folder)
    return folder


def cases(*lists: list[Case]) -> pytest.MarkDecorator:
    found = [case for each in lists for case in each]
    assert len({case.name for case in found}) == len(found)
    return pytest.mark.parametrize("case", found, ids=lambda case: case.name)


@cases(damage_cases.CHECKPOINT)
def test_a_damaged_checkpoint_is_refused(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path, case: Case
) -> None:
    folder = damaged(pristine["checkpoint"], tmp_path / "m", case)
    cache = tmp_path / "cache"
    check(server.run("run", folder, *RUN, AEGIS_CACHE=cache), case.words)
    check(server.run("convert", folder, "-q", AEGIS_CACHE=cache), case.words)
    if case not in damage_cases.TEXT and case.words.find("not finite") < 0:
        check(server.run("plan", folder, "-q", "-c", "64", AEGIS_CACHE=cache), case.words)
    assert not cache.exists() or not list(cache.iterdir())


@cases(damage_cases.SHARDED)
def test_damaged_shards_are_refused(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path, case: Case
) -> None:
    folder = damaged(pristine["sharded"], tmp_path / "m", case)
    check(server.run("run", folder, *RUN, AEGIS_CACHE=tmp_path / "cache"), case.words)
    assert not (tmp_path / "cache").exists()


@cases(damage_cases.VISION)
def test_damage_to_what_is_only_kept_is_refused_too(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path, case: Case
) -> None:
    folder, cache = damaged(pristine["seeing"], tmp_path / "m", case), tmp_path / "cache"
    check(server.run("convert", folder, "-q", AEGIS_CACHE=cache), case.words)
    check(server.run("plan", folder, "-q", "-c", "64", AEGIS_CACHE=cache), case.words)
    assert not cache.exists()


@cases(damage_cases.VISION_STORE)
def test_a_store_with_damage_to_what_it_keeps_is_refused(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path, case: Case
) -> None:
    folder = damaged(pristine["seeing store"], tmp_path / "s", case)
    check(server.run("run", folder, *RUN, AEGIS_CACHE=tmp_path / "cache"), case.words)
    assert not (tmp_path / "cache").exists()


def test_damage_inside_of_what_is_kept_is_found_by_verify_and_met_by_nobody_else(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path
) -> None:
    case = Case("", damages.flipped("vision.safetensors"), "the contents in vision.safetensors;")
    folder = damaged(pristine["seeing store"], tmp_path / "s", case)
    ended = server.run("verify", folder, "-q")
    assert ended.stdout == f"damaged: the contents in {folder / 'vision.safetensors'}\n"
    check(Ended(ended.code, "", ended.stderr, ended.grown_nbytes, 0), case.words)
    sound = server.run("run", pristine["seeing store"], *RUN)
    ran = server.run("run", folder, *RUN)
    assert (ran.code, ran.stdout) == (0, sound.stdout)


@cases(damage_cases.STORE)
def test_a_damaged_store_is_refused(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path, case: Case
) -> None:
    folder = damaged(pristine["store"], tmp_path / "s", case)
    check(server.run("run", folder, *RUN, AEGIS_CACHE=tmp_path / "cache"), case.words)
    assert not (tmp_path / "cache").exists()


@cases(damage_cases.STORE_FILES)
def test_verify_names_every_damaged_file(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path, case: Case
) -> None:
    folder = damaged(pristine["store"], tmp_path / "s", case)
    ended = server.run("verify", folder, "-q")
    name = case.words.split()[0].replace("\\", "")
    lines = ended.stdout.splitlines()
    assert lines
    assert all(line.startswith("damaged: ") and line.endswith(name) for line in lines)
    check(Ended(ended.code, "", ended.stderr, ended.grown_nbytes, 0), f"are damaged, .* in {name};")


@pytest.mark.parametrize("embedding", ["ram", "disk"])
def test_a_damaged_embedding_table_is_refused_wherever_it_is_kept(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path, embedding: str
) -> None:
    case = Case("", damages.flipped("resident.bin", 5000), "the tensor embed_tokens is damaged")
    folder = damaged(pristine["store"], tmp_path / "s", case)
    check(server.run("run", folder, *RUN, "--embedding", embedding), case.words)


@pytest.mark.parametrize("bits", ["4bit", "3bit"])
def test_damaged_experts_end_a_run(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path, bits: str
) -> None:
    name = {"4bit": "experts", "3bit": "experts-3bit"}[bits]
    folder = Path(shutil.copytree(pristine["store"], tmp_path / "s"))
    for file in (folder / name).iterdir():
        data = bytearray(file.read_bytes())
        data[100::4096] = bytes(byte ^ 1 for byte in data[100::4096])
        file.write_bytes(data)
    ended = server.run("run", folder, *RUN, "--experts", bits)
    check(ended, rf"{name}/layer_00\d\.bin: the record of layer \d, expert \d .* is damaged")
    other = {"4bit": "3bit", "3bit": "4bit"}[bits]
    assert server.run("run", folder, *RUN, "--experts", other).code == 0


def test_a_store_in_the_place_of_another_is_refused(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    made = server.run("convert", pristine["sharded"], AEGIS_CACHE=cache)
    shutil.rmtree(made.stdout.strip())
    shutil.copytree(pristine["store"], made.stdout.strip())
    check(
        server.run("run", pristine["sharded"], *RUN, AEGIS_CACHE=cache),
        "holds another model than it is named for; remove it",
    )


def test_a_changed_source_is_noticed(
    server: CommandServer, pristine: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pristine["checkpoint"], tmp_path / "m"))
    cache, store = tmp_path / "cache", tmp_path / "s"
    assert server.run("convert", folder, store, "-q").code == 0
    before = server.run("convert", folder, "-q", AEGIS_CACHE=cache).stdout
    assert server.run("verify", folder, "-q", AEGIS_CACHE=cache).code == 0
    damages.values("model.norm.weight", 0x3F00)(folder)
    check(server.run("verify", folder, "-q", AEGIS_CACHE=cache), "has changed since it was conv")
    check(server.run("convert", folder, store, "-q"), "holds the store of another checkpoint")
    after = server.run("convert", folder, "-q", AEGIS_CACHE=cache).stdout
    assert before != after


def test_a_fresh_interpreter_says_the_same(pristine: dict[str, Path], tmp_path: Path) -> None:
    wanted = ["config nested deep", "header past the end", "NaN scale", "tokenizer a pipe"]
    for number, case in enumerate(c for c in damage_cases.CHECKPOINT if c.name in wanted):
        folder = damaged(pristine["checkpoint"], tmp_path / str(number), case)
        ended = subprocess.run(
            [sys.executable, "-m", "aegis", "run", str(folder), *RUN],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "AEGIS_CACHE": str(tmp_path / "cache")},
            check=False,
            timeout=60,
        )
        check(Ended(ended.returncode, ended.stdout, ended.stderr, 0, 0), case.words)
