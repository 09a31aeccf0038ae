"""A conversion that was killed goes on where it was, and never with what it did not finish."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_tools import Forked
from stores import raw_tensors, rewrite
from strategies import write_checkpoint

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.fileio import UncachedWriter
from aegis.checkpoint.plainfile import sealed
from aegis.checkpoint.store import Store
from aegis.convert import convert as converting
from aegis.convert import three_bit, vision
from aegis.convert.build import JOURNAL, remove_remains
from aegis.convert.cache import cached_store_path, ensure_store
from aegis.convert.convert import convert
from aegis.convert.verify import verify
from aegis.errors import StoreError

LAYERS = 4


class _Deadly:
    """Kills the process at its n-th call of what changes a disk; counts them."""

    def __init__(self, at: int) -> None:
        self.calls, self._at = 0, at
        for name in ("pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "open"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call


class Run:
    """A conversion in a process of its own, killed at its n-th call of the system; 0: never."""

    def __init__(
        self, source: Path, target: Path, at: int = 0, bits: int = 0, three: bool = False
    ) -> None:
        quantize = QuantSpec(bits, 64) if bits else None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115

        def work() -> int:
            self._log_writes()
            deadly = _Deadly(at)
            converting.convert(
                source, target, quantize=quantize, experts3bit=three, piece_nbytes=1 << 16
            )
            return deadly.calls

        self._child = Forked(work)

    def _log_writes(self) -> None:
        log = self._log.fileno()

        class Writer(UncachedWriter):
            def __init__(self, path: Path, *rest: Any) -> None:
                within = "experts/" if path.parent.name == "experts" else ""
                os.write(log, f"{within}{path.name}\n".encode())
                super().__init__(path, *rest)

        for module in (converting, three_bit, vision):
            vars(module)["UncachedWriter"] = Writer

    def end(self) -> Run:
        """Wait for it."""
        status, said = self._child.end()
        assert status == signal.SIGKILL or (status == 0 and said.isdigit()), said
        self.killed, self.calls = status != 0, int(said or 0)
        with self._log:
            self._log.seek(0)
            self.written = self._log.read().decode().split()
        return self


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def journals(folder: Path) -> list[set[str]]:
    return [set(json.loads(path.read_text())["files"]) for path in sorted(folder.rglob(JOURNAL))]


KINDS = [
    ("qwen2_moe", 0, False),
    ("qwen2_moe", 0, True),
    ("qwen2_moe", 4, True),
    ("qwen3_5_moe", 4, False),
]
"""A family, to how many bits a plain checkpoint is quantised (0: one with codes), and 3-bit
experts."""


@pytest.mark.parametrize(
    ("model_type", "bits", "three"), KINDS, ids=["codes", "3bit", "plain", "vision"]
)
def test_a_killed_conversion_goes_on_with_what_was_finished(
    model_type: str, bits: int, three: bool, tmp_path: Path
) -> None:
    source = write_checkpoint(
        tmp_path / "c",
        3,
        num_hidden_layers=LAYERS,
        dense=bits > 0,
        expert_bits=4,
        model_type=model_type,
    )
    if model_type == "qwen3_5_moe":
        picture = ("U8", np.random.default_rng(1).integers(0, 255, 300_001, np.uint8))
        source = rewrite(source, tmp_path / "m", raw_tensors(source) | {"visual.x": picture})
    whole = Run(source, tmp_path / "whole", bits=bits, three=three).end()
    sound = contents(tmp_path / "whole")
    rng, went_on = random.Random(bits + three), 0
    for number, at in enumerate(sorted(rng.sample(range(1, whole.calls + 1), 8))):
        folder = tmp_path / f"r{number}"
        folder.mkdir()
        finished: list[set[str]] = []
        # Killed again and again, each time a little further into what was left.
        for further in (at, rng.randint(at // 2 + 1, whole.calls)):
            run = Run(source, folder / "s", further, bits, three).end()
            for path in run.written:
                assert not any(path in files for files in finished), f"{path} again at {further}"
            finished = journals(folder) if run.killed else []
            went_on += bool(finished)
        run = Run(source, folder / "s", 0, bits, three).end()
        assert not any(path in files for path in run.written for files in finished)
        assert contents(folder / "s") == sound
        assert [path.name for path in folder.iterdir()] == ["s"]
    assert went_on


def killed(source: Path, target: Path, bits: int = 0) -> Path:
    """The folder of a conversion that was killed when half of its layers were there."""
    calls = Run(source, target.parent.parent / f"counted-{target.name}", bits=bits).end().calls
    assert Run(source, target, calls * 2 // 3, bits).end().killed
    [partial] = target.parent.glob(f".{target.name}.partial-*")
    [files] = journals(partial)
    assert 2 <= len(files) <= LAYERS
    return partial


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    return write_checkpoint(tmp_path / "m", 3, num_hidden_layers=LAYERS)


def written(source: Path, target: Path, bits: int = 0) -> int:
    """How many files a conversion writes that goes to its end."""
    run = Run(source, target, bits=bits).end()
    assert verify(Store.open(target)).ok
    assert [path.name for path in target.parent.iterdir() if "partial" in path.name] == []
    return len(run.written)


def damage_journal(partial: Path, **changes: Any) -> None:
    """By somebody who knows how it is sealed."""
    path = partial / JOURNAL
    content = json.loads(path.read_text()) | changes
    del content["crc32"]
    path.write_bytes(sealed(content))


@pytest.mark.parametrize("what", ["text", "key", "files", "digit", "nothing"])
def test_a_journal_that_does_not_fit_is_thrown_away(
    what: str, source: Path, tmp_path: Path
) -> None:
    partial = killed(source, tmp_path / "d" / "s")
    if what == "text":
        (partial / JOURNAL).write_text('{"key": ')
    elif what == "key":
        damage_journal(partial, key="0" * 64)
    elif what == "files":
        damage_journal(partial, files=["resident.bin"])
    elif what == "digit":
        text = (partial / JOURNAL).read_text()
        end = text.rindex("]")
        digit = "1" if text[end - 1] == "2" else "2"
        (partial / JOURNAL).write_text(text[: end - 1] + digit + text[end:])
    else:
        (partial / JOURNAL).unlink()
    assert written(source, tmp_path / "d" / "s") == LAYERS + 1


def test_another_source_layout_or_quantisation_begins_anew(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "d" / "s"
    killed(source, target)
    os.utime(source / "model.safetensors", (1, 1))
    assert written(source, target) == LAYERS + 1
    plain = write_checkpoint(tmp_path / "p", 3, num_hidden_layers=LAYERS, dense=True)
    killed(plain, tmp_path / "d" / "t", bits=4)
    assert written(plain, tmp_path / "d" / "t", bits=5) == LAYERS + 1
    killed(source, tmp_path / "d" / "u")
    assert convert(source, tmp_path / "d" / "u", layout="row").layout.layout == "row"


def test_a_finished_file_that_is_gone_or_shorter_is_written_again(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "d" / "s"
    partial = killed(source, target)
    kept = journals(partial)[0]
    (partial / "resident.bin").unlink()
    os.truncate(partial / "experts" / "layer_000.bin", 4096)
    assert written(source, target) == LAYERS + 1 - (len(kept) - 2)


def test_a_copied_file_that_the_source_has_no_more_is_not_kept(
    source: Path, tmp_path: Path
) -> None:
    (source / "generation_config.json").write_text("{}")
    partial = killed(source, tmp_path / "d" / "s")
    assert (partial / "generation_config.json").is_file()
    (source / "generation_config.json").unlink()
    written(source, tmp_path / "d" / "s")
    assert not (tmp_path / "d" / "s" / "generation_config.json").exists()


def test_a_failure_in_what_is_gone_on_with_leaves_nothing(source: Path, tmp_path: Path) -> None:
    killed(source, tmp_path / "d" / "s")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "d" / "s", progress=stop)
    assert list((tmp_path / "d").iterdir()) == []


def test_what_is_there_needs_no_room(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, asked = killed(source, tmp_path / "d" / "s"), list[int]()
    there = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())

    def refuse(folder: Path, nbytes: int, hint: str) -> None:
        asked.append(nbytes)
        raise StoreError("no room")

    monkeypatch.setattr("aegis.convert.convert.check_space", refuse)
    for name in ("s", "other"):
        with pytest.raises(StoreError, match="no room"):
            convert(source, tmp_path / "d" / name)
    assert asked[1] - asked[0] == there > 0
    assert partial.is_dir()  # Once there is room it is gone on with.


def test_two_at_once_go_on_with_one(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "d" / "s"
    killed(source, target)
    both = [Run(source, target) for _ in range(2)]
    lines = [len(run.end().written) for run in both]
    assert min(lines) == 0
    assert 0 < max(lines) <= LAYERS - 1
    assert verify(Store.open(target)).ok
    assert [path.name for path in target.parent.iterdir() if "partial" in path.name] == []


def test_what_may_be_gone_on_with_stays_for_a_week(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others convert beside it, and open stores of the same cache."""
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "d"))
    partial = killed(source, cached_store_path(source))
    other = write_checkpoint(tmp_path / "other", 9)
    for _ in range(2):  # Converts, then opens.
        ensure_store(other)
        assert partial.is_dir()
    week = time.time() - 8 * 24 * 3600
    os.utime(partial / JOURNAL, (week, week))
    ensure_store(other)
    assert not partial.exists()


def test_what_is_left_of_a_store_that_is_there_is_deleted(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "d" / "s"
    store = convert(source, tmp_path / "d" / "t")
    killed(source, target)
    store.path.rename(target)
    remove_remains(target)
    assert [path.name for path in target.parent.glob(".*")] == []
    assert convert(source, target).path == target
