"""Conversion changes no value, and appears whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import (
    cached_nbytes,
    check_same_store,
    checkpoint_values,
    expert_values,
    raw_tensors,
    require_direct_io,
    resident_values,
    rewrite,
)
from strategies import Choices, checkpoint_choices, seeds, write_checkpoint, write_choices

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.fileio import sync_folder, write_file
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import Store
from aegis.convert import convert as convert_module
from aegis.convert import journal, records
from aegis.convert.build import JOURNAL
from aegis.convert.cache import embedded_path
from aegis.convert.convert import convert
from aegis.convert.quantize import quantize
from aegis.convert.verify import verify
from aegis.errors import CheckpointError, StoreError
from aegis.kernels.base import Format, Layout
from aegis.kernels.sizes import CODE_BITS, GROUPS

layouts: st.SearchStrategy[Layout] = st.sampled_from(["il16", "row"])


def check_same_values(source: Path, store: Store) -> None:
    resident, experts = checkpoint_values(source)
    stored = resident_values(store)
    assert stored.keys() == resident.keys()
    for name, values in resident.items():
        assert np.array_equal(stored[name], values), name
    for key, values in expert_values(store).items():
        assert np.array_equal(values, experts.pop(key)), key
    assert not experts


@given(checkpoint_choices(), seeds, layouts, st.sampled_from([1 << 12, 1 << 14, 1 << 20]))
def test_a_store_holds_exactly_the_values_of_its_checkpoint(
    choices: Choices, seed: int, layout: Layout, piece_nbytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write_choices(Path(folder, "m"), seed, choices)
        store = convert(source, Path(folder, "s"), layout=layout, piece_nbytes=piece_nbytes)
        check_same_values(source, store)
        assert verify(store).ok


@settings(max_examples=15)
@given(
    checkpoint_choices(dense=True, num_hidden_layers=1, num_experts=2, num_experts_per_tok=1),
    layouts,
)
def test_an_unquantised_checkpoint_keeps_its_values_too(choices: Choices, layout: Layout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write_choices(Path(folder, "m"), 0, choices)
        check_same_values(source, convert(source, Path(folder, "s"), layout=layout))


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_every_code_width_and_group_keeps_its_values(
    tmp_path: Path, bits: int, group_size: int
) -> None:
    wide = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    source = write_checkpoint(tmp_path / "m", 1, bits=(bits,), group_size=group_size, **wide)
    for layout in ("il16", "row"):
        store = convert(source, tmp_path / layout, layout=layout)
        check_same_values(source, store)
        assert store.layout.embedding.format.group_size == group_size


def test_modules_may_have_a_width_and_a_group_of_their_own(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "m", 1, dense=True)
    tensors = raw_tensors(plain)
    entries = {
        "lm_head": QuantSpec(3, 128),
        "model.layers.0.self_attn.q_proj": QuantSpec(5, 32),
        "model.layers.1.mlp.gate": QuantSpec(8, 64),
    }
    for module, spec in entries.items():
        raw = tensors[f"{module}.weight"][1]
        arrays, _ = quantize(raw, Format("dense", "bf16"), spec.bits, spec.group_size)
        for part, array in zip(("weight", "scales", "biases"), arrays, strict=True):
            tensors[f"{module}.{part}"] = ("U32" if part == "weight" else "BF16", array)
    quantization = {"group_size": 64, "bits": 4} | {m: asdict(s) for m, s in entries.items()}
    source = rewrite(plain, tmp_path / "q", tensors, quantization_config=quantization)
    for layout in ("il16", "row"):
        store = convert(source, tmp_path / layout, layout=layout)
        check_same_values(source, store)
        formats = [store.layout.resident[m.removeprefix("model.")].format for m in entries]
        assert [fmt.group_size for fmt in formats] == [128, 32, 64]
        assert store.layout.embedding.format.kind == "dense"


def test_experts_quantised_unlike_from_layer_to_layer_keep_their_values(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 4, bits=(4, 3, 8), num_hidden_layers=3)
    config = Checkpoint.open(source).config.get("quantization")
    widths = {
        config.get(f"model.layers.{layer}.mlp.switch_mlp.up_proj", {}).get("bits", 4)
        for layer in range(3)
    }
    assert len(widths) > 1
    store = convert(source, tmp_path / "s")
    assert store.layout.experts.segments["up_proj"].format.bits == max(widths)
    check_same_values(source, store)


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 1, bits=(4, 8))
    stores = [convert(source, tmp_path / name, experts3bit=True).path for name in "ab"]
    files = [
        {p.relative_to(store): p.read_bytes() for p in store.rglob("*") if p.is_file()}
        for store in stores
    ]
    assert files[0] == files[1]


def test_separate_and_stacked_experts_give_the_same_expert_files(tmp_path: Path) -> None:
    stores = [
        convert(
            write_checkpoint(tmp_path / f"m{i}", 1, separate_experts=bool(i)), tmp_path / f"{i}"
        )
        for i in range(2)
    ]
    first, second = ([path.read_bytes() for path in store.expert_paths()] for store in stores)
    assert first == second


def test_3bit_codes_have_the_same_values_packed_and_in_nibbles(tmp_path: Path) -> None:
    packed = write_checkpoint(tmp_path / "p", 6, expert_bits=3)
    nibbles = write_checkpoint(tmp_path / "n", 6, expert_bits=4, expert_code_bits=3)
    first, second = (expert_values(convert(p, tmp_path / f"s{p.name}")) for p in (packed, nibbles))
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_tokenizer_and_config_files_come_along(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": 1}')
    (source / "notes.txt").write_text("not ours")
    store = convert(source, tmp_path / "s")
    copied = {path.name for path in store.path.iterdir() if path.is_file()}
    assert copied == {
        "store.json",
        "resident.bin",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_progress_rises_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = write_checkpoint(tmp_path / "m")
    convert(source, tmp_path / "s", experts3bit=True, progress=lambda *at: seen.append(at))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("model.layers.1.mlp.switch_mlp.up_proj.scales", 0x7FC0),
        ("model.layers.0.self_attn.q_proj.biases", 0xFF80),
        ("model.norm.weight", 0x7F80),
        ("model.layers.0.self_attn.k_proj.bias", 0x7FC1),
    ],
)
def test_a_value_that_is_not_finite_is_refused_and_nothing_is_left(
    tmp_path: Path, tensor: str, value: int
) -> None:
    source = write_checkpoint(tmp_path / "m", 1)
    info = Checkpoint.open(source).tensors[tensor]
    with info.path.open("r+b") as file:
        file.seek(info.offset + info.nbytes - 2)
        file.write(value.to_bytes(2, "little"))
    with pytest.raises(CheckpointError, match=f"{tensor} in .* not finite"):
        convert(source, tmp_path / "out" / "s")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_cut_short_while_it_is_converted_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", 1)

    def cut(done: int, total: int) -> None:
        with (source / "model.safetensors").open("r+b") as file:
            file.truncate(20_000)

    with pytest.raises(CheckpointError, match="cannot be read"):
        convert(source, tmp_path / "out" / "s", progress=cut, piece_nbytes=4096)
    assert list((tmp_path / "out").iterdir()) == []


@given(checkpoint_choices(), seeds, layouts, st.booleans())
def test_records_that_memory_does_not_hold_are_made_of_the_same_bytes(
    choices: Choices, seed: int, layout: Layout, quantised: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        source = write_choices(Path(folder, "m"), seed, choices)
        plain = "quantization" not in json.loads((source / "config.json").read_text())
        options: dict[str, Any] = {"layout": layout, "piece_nbytes": 1 << 13}
        if plain and quantised:
            options["quantize"] = QuantSpec(4, 64)
        sound = convert(source, Path(folder, "s"), **options)
        three = sound.layout.experts_3bit is not None
        if three:
            sound = convert(source, Path(folder, "s"), **options, experts3bit=True)
        patch.setattr(records, "_LARGE_NBYTES", 0)
        large = convert(source, Path(folder, "large"), **options, experts3bit=three)
        check_same_store(large, sound)


def test_an_existing_store_of_the_same_checkpoint_is_used(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    convert(source, tmp_path / "s")
    calls: list[int] = []
    convert(source, tmp_path / "s", progress=lambda done, _: calls.append(done))
    assert not calls


def test_a_store_whose_contents_are_damaged_is_converted_anew_where_that_is_allowed(
    tmp_path: Path,
) -> None:
    source = write_checkpoint(tmp_path / "m", 0)
    store = convert(source, tmp_path / "s")
    record = next((store.path / "experts").iterdir())
    record.write_bytes(b"\xff" * record.stat().st_size)
    assert not verify(convert(source, tmp_path / "s")).ok
    assert verify(convert(source, tmp_path / "s", replace_damaged=True)).ok


def test_an_empty_folder_may_be_the_destination(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    assert convert(write_checkpoint(tmp_path / "m"), tmp_path / "s").path == tmp_path / "s"


def test_anything_else_at_the_destination_is_refused_and_kept(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "precious").write_text("data")
    with pytest.raises(StoreError, match="exists and is not a store"):
        convert(source, tmp_path / "d")
    assert (tmp_path / "d" / "precious").read_text() == "data"
    convert(source, tmp_path / "s")
    with pytest.raises(StoreError, match="another checkpoint or layout"):
        convert(write_checkpoint(tmp_path / "m2", 9), tmp_path / "s")
    with pytest.raises(StoreError, match="another checkpoint or layout"):
        convert(source, tmp_path / "s", layout="row")


def test_a_destination_that_appears_meanwhile_is_used(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    elsewhere = convert(source, tmp_path / "elsewhere").path

    def appear(done: int, total: int) -> None:
        if elsewhere.exists():
            elsewhere.rename(tmp_path / "s")

    assert convert(source, tmp_path / "s", progress=appear).path == tmp_path / "s"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "s"]


# Processes of their own: killed, interrupted, racing, measured.

HALFWAY = """
import sys, time
from pathlib import Path
from aegis.convert.convert import convert
source, destination, wait = sys.argv[1:]
calls = []
def progress(done, total):
    calls.append(done)
    if 2 * done >= total and not Path(wait).exists():
        Path(wait + ".half").touch()
        while not Path(wait).exists():
            time.sleep(0.01)
try:
    convert(source, destination, progress=progress)
except KeyboardInterrupt:
    sys.exit(130)
print(len(calls))
"""


def start(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    folder = tempfile.gettempdir()
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, **options)


def wait_until_half(process: subprocess.Popen[str], flag: Path) -> None:
    half = flag.with_name(flag.name + ".half")
    while not half.exists():
        assert process.poll() is None
        time.sleep(0.01)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_a_killed_conversion_leaves_no_store_and_blocks_nobody(tmp_path: Path, out: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    process = start(HALFWAY, source, out / "s", tmp_path / "go")
    wait_until_half(process, tmp_path / "go")
    process.kill()
    process.communicate()
    assert not (out / "s").exists()
    assert any(".partial-" in path.name for path in out.iterdir())
    check_same_values(source, convert(source, out / "s"))
    assert [path.name for path in out.iterdir()] == ["s"]


def test_an_interrupted_conversion_leaves_what_is_finished(tmp_path: Path, out: Path) -> None:
    source = write_checkpoint(tmp_path / "m", num_experts=24)
    process = start(HALFWAY, source, out / "s", tmp_path / "go")
    wait_until_half(process, tmp_path / "go")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    [partial] = out.iterdir()
    assert {path.name for path in partial.rglob("*.*")} == {"resident.bin", JOURNAL}
    check_same_values(source, convert(source, out / "s", experts3bit=True))
    assert [path.name for path in out.iterdir()] == ["s"]
    assert not list(out.rglob(JOURNAL))


def test_two_processes_convert_the_same_model_once(tmp_path: Path, out: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    first = start(HALFWAY, source, out / "s", tmp_path / "go")
    wait_until_half(first, tmp_path / "go")
    second = start(HALFWAY, source, out / "s", tmp_path / "go")
    (tmp_path / "go").touch()
    outputs = [int(process.communicate()[0]) for process in (first, second)]
    assert outputs[0] > 0
    assert outputs[1] == 0
    assert [path.name for path in out.iterdir()] == ["s"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, small_disk: Path
) -> None:
    source = write_checkpoint(tmp_path / "m")
    calls: list[int] = []
    with pytest.raises(StoreError, match=r"has 0 MiB free, but the store takes \d+ MiB"):
        convert(source, small_disk / "s", progress=lambda done, _: calls.append(done))
    assert not calls
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_gives_a_sentence_and_leaves_what_is_finished(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "check_space", lambda *asked: "")
    subprocess.run(["mount", "-o", "remount,size=400k", str(small_disk)], check=True)
    source = write_checkpoint(tmp_path / "m", num_experts=24)
    for _ in range(2):  # Again and again, until there is room.
        with pytest.raises(StoreError, match=r"the disk of .* is full") as raised:
            convert(source, small_disk / "s")
        assert [note[:30] for note in raised.value.__notes__] == ["1 MiB that are finished are ke"]
        [partial] = small_disk.iterdir()
        assert {path.name for path in partial.rglob("*.*")} == {"resident.bin", JOURNAL}
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    check_same_values(source, convert(source, small_disk / "s"))


def test_what_is_finished_is_kept_though_the_next_file_took_the_journals_room(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is written while the next file is made."""
    folder = out / "s"

    full = threading.Event()

    def write(path: Path, data: bytes, durable: bool) -> None:
        if any(out.rglob("layer*")):
            full.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(path, data, durable)

    def wait_for_the_next_file(path: Path) -> None:
        while not full.is_set() and not any(out.rglob("layer*")):
            time.sleep(0.001)
        sync_folder(path)

    source = write_checkpoint(tmp_path / "m")
    with monkeypatch.context() as patched:
        patched.setattr(journal, "write_file", write)
        patched.setattr(journal, "sync_folder", wait_for_the_next_file)
        with pytest.raises(StoreError, match=r"the disk of .* is full") as raised:
            convert(source, folder)
    assert "are kept" in raised.value.__notes__[0]
    [partial] = out.iterdir()
    assert {path.name for path in partial.rglob("*.*")} == {"resident.bin", JOURNAL}
    check_same_values(source, convert(source, folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, out: Path) -> None:
    out.chmod(0o500)
    with pytest.raises(StoreError, match="cannot be written"):
        convert(write_checkpoint(tmp_path / "m"), out / "s")


PEAK = """
import sys
from pathlib import Path
from aegis.convert.convert import convert
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
small, source, folder, layout = sys.argv[1:]
convert(small, folder + "/small", layout=layout, experts3bit=True)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
convert(source, folder + "/big", layout=layout, experts3bit=True)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("layout", ["il16", "row"])
def test_converting_the_embedded_model_takes_under_24_mib(
    tmp_path: Path, out: Path, layout: str
) -> None:
    small = write_checkpoint(tmp_path / "m")
    process = start(PEAK, small, embedded_path(), out, layout)
    grown = int(process.communicate()[0])
    assert grown < 24 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="asks mincore")
def test_converting_leaves_nothing_in_the_page_cache(tmp_path: Path, out: Path) -> None:
    require_direct_io(tmp_path)
    source = write_checkpoint(tmp_path / "m", 1, num_experts=12, num_hidden_layers=3)
    for file in source.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    store = convert(source, out / "s", experts3bit=True)
    store.load_resident(np.empty(store.layout.resident_nbytes(), np.uint8))
    assert verify(store).ok
    big = [*source.glob("*.safetensors"), *store.path.rglob("*.bin"), *store.path.glob("tok*")]
    cached = {path.name: cached_nbytes(path) for path in big}
    assert not any(cached.values()), cached
