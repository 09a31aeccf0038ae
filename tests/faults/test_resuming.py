"""A conversion that was killed or ended goes on where it was, and never with what it did not
finish."""

from __future__ import annotations

import errno
import json
import os
import random
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_here import command_here
from fault_tools import Failing, Forked, check_kept, contents, journals
from stores import raw_tensors, rewrite
from strategies import write_checkpoint

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.plainfile import sealed
from aegis.checkpoint.store import Store
from aegis.convert import convert as converting
from aegis.convert import records, vision
from aegis.convert.build import JOURNAL, remove_remains
from aegis.convert.cache import cached_store_path, ensure_store
from aegis.convert.convert import convert
from aegis.convert.three_bit import add_3bit
from aegis.convert.verify import verify
from aegis.engine.places import find_places
from aegis.errors import CheckpointError, StoreError, UsageError

LAYERS = 4


DISK = ("pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "open")
"""What changes a disk."""


class _Deadly:
    """Kills the process at its n-th call of what changes a disk; counts them."""

    def __init__(self, at: int) -> None:
        self.calls, self._at = 0, at
        for name in DISK:
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

        def logging(writer: type[Any]) -> type[Any]:
            class Writer(writer):  # type: ignore[misc]
                def __init__(self, path: Path, *rest: Any) -> None:
                    within = "experts/" if path.parent.name == "experts" else ""
                    os.write(log, f"{within}{path.name}\n".encode())
                    super().__init__(path, *rest)

            return Writer

        for module in (converting, records, vision):
            for name in vars(module).keys() & {"OverlappedWriter", "PlacedWriter"}:
                vars(module)[name] = logging(vars(module)[name])

    def end(self) -> Run:
        """Wait for it."""
        status, said = self._child.end()
        assert status == signal.SIGKILL or (status == 0 and said.isdigit()), said
        self.killed, self.calls = status != 0, int(said or 0)
        with self._log:
            self._log.seek(0)
            self.written = self._log.read().decode().split()
        return self


KINDS = [
    ("qwen2_moe", 0, False),
    ("qwen2_moe", 0, True),
    ("qwen2_moe", 4, True),
    ("qwen3_5_moe", 4, False),
]
"""A family, to how many bits a plain checkpoint is quantised (0: one with codes), and 3-bit
experts."""


kinds = pytest.mark.parametrize(
    ("model_type", "bits", "three"), KINDS, ids=["codes", "3bit", "plain", "vision"]
)


def source_of(model_type: str, bits: int, tmp_path: Path) -> Path:
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
    return source


@kinds
def test_a_killed_conversion_goes_on_with_what_was_finished(
    model_type: str, bits: int, three: bool, tmp_path: Path
) -> None:
    source = source_of(model_type, bits, tmp_path)
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


@kinds
def test_an_ended_conversion_leaves_what_was_finished_and_goes_on_with_it(
    model_type: str, bits: int, three: bool, tmp_path: Path
) -> None:
    """By Ctrl-C or an error, at any call of the system, twice in a row."""
    source = source_of(model_type, bits, tmp_path)
    quantize = QuantSpec(bits, 64) if bits else None
    options: dict[str, Any] = {"quantize": quantize, "experts3bit": three, "piece_nbytes": 1 << 16}
    with pytest.MonkeyPatch.context() as patch:
        counted = Failing(patch, 0, 0, *DISK)
        sound = contents(convert(source, tmp_path / "whole", **options).path)
    rng, most = random.Random(bits + three), 0
    endings = [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), MemoryError(), RuntimeError()]
    for number, at in enumerate(sorted(rng.sample(range(2, counted.calls), 8))):
        folder, kept = tmp_path / f"r{number}", dict[str, int]()
        folder.mkdir()
        for further in (at, rng.randint(at // 2 + 1, counted.calls - 1)):
            ending = type(endings[number % 4])(*endings[number % 4].args)
            with pytest.MonkeyPatch.context() as patch:
                Failing(patch, ending, further, *DISK)
                try:
                    convert(source, folder / "s", **options)
                except (KeyboardInterrupt, StoreError, MemoryError, RuntimeError) as error:
                    if (folder / "s").exists():  # Ended when all was done.
                        break
                    found = check_kept(folder, sound, error)
                else:
                    break
            assert found.items() >= kept.items(), "what was finished before is gone"
            kept, most = found, max(most, len(found))
        assert contents(convert(source, folder / "s", **options).path) == sound
        assert [path.name for path in folder.iterdir()] == ["s"]
        for name, inode in kept.items():
            assert (folder / "s" / name).stat().st_ino == inode, f"{name} was written again"
    assert most > LAYERS + three


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


def test_a_failure_in_what_is_gone_on_with_leaves_it_as_it_was(
    source: Path, tmp_path: Path
) -> None:
    """But for what the kill left unfinished."""
    sound = contents(convert(source, tmp_path / "whole").path)
    partial = killed(source, tmp_path / "d" / "s")
    [before] = journals(partial)
    assert {path.name for path in partial.iterdir()} >= {"tokenizer.json"}

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        convert(source, tmp_path / "d" / "s", progress=stop)
    assert check_kept(tmp_path / "d", sound, raised.value).keys() == before
    assert written(source, tmp_path / "d" / "s") == LAYERS + 1 - len(before)


def test_a_source_that_is_found_damaged_leaves_nothing_of_what_was_made_of_it(
    source: Path, tmp_path: Path
) -> None:
    """A file that is downloaded again may be another one everywhere."""
    tensors = raw_tensors(source)
    name = f"model.layers.{LAYERS - 1}.mlp.switch_mlp.down_proj.scales"
    tensors[name][1].reshape(-1)[-1] = 0x7FC0
    damaged = rewrite(source, tmp_path / "damaged", tensors)
    seen: list[int] = []
    with pytest.raises(CheckpointError, match="not finite") as raised:
        convert(damaged, tmp_path / "d" / "s", progress=lambda done, _: seen.append(done))
    assert len(seen) > LAYERS
    assert check_kept(tmp_path / "d", {}, raised.value) == {}


def test_the_journal_of_a_build_that_was_killed_when_all_was_renamed_goes(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "d" / "s"
    sound = contents(convert(source, target).path)
    (target / JOURNAL).write_text("{}")
    assert written(source, target) == 0
    assert contents(target) == sound


def test_what_is_kept_is_deleted_by_the_command_that_the_message_names(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In the cache, elsewhere, and inside of a store; nothing else goes."""
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    aegis = command_here(capfd, monkeypatch)
    there = convert(source, tmp_path / "d" / "there").path
    for destination, three, command in (
        (cached_store_path(source), False, "aegis rm"),
        (tmp_path / "d" / "a b", False, "aegis rm"),
        (there, True, "rm -r"),
    ):
        before = contents(tmp_path / "d")
        place = there if three else destination.parent

        def stop(done: int, total: int) -> None:
            if 4 * done >= 3 * total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as raised:
            add_3bit(there, stop) if three else convert(source, destination, progress=stop)
        [partial] = place.glob(".*.partial-*")
        said = raised.value.__notes__[0].split("'")[1:-1]
        words = shlex.split("'".join(said))
        assert " ".join(words).startswith(command)
        if words[0] == "aegis":
            done = aegis(*words[1:], "-y")
            assert done.stdout.startswith(f"deleted {destination}, "), done
        else:
            subprocess.run(words, check=True)
        assert not partial.exists()
        assert contents(tmp_path / "d") == before
    assert aegis("rm", str(tmp_path / "d" / "never"), "-y").returncode == 2


def test_what_is_kept_of_a_model_of_the_hub_has_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    source.rename(snapshot)

    def stop(done: int, total: int) -> None:
        if 4 * done >= 3 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_store(snapshot, progress=stop)
    [place] = find_places("org/name")
    assert (place.state, place.path) == ("unfinished", cached_store_path(snapshot))
    for other in ("org/nam", "org/name@v1", "or/name"):
        with pytest.raises(UsageError):
            find_places(other)


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
