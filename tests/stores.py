"""Independent readers for tests: values from a checkpoint and from a store, and edits of both."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from strategies import write_safetensors

from aegis.checkpoint.layout import ExpertBits
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import Store
from aegis.convert.layout import resolve_checkpoint
from aegis.convert.names import SourceWeight
from aegis.convert.verify import verify
from aegis.kernels.base import Weight
from aegis.kernels.formats import MlxArrays, dequantize, dequantize_mlx, raw_dtype

F32 = NDArray[np.float32]


def source_values(weight: SourceWeight) -> F32:
    """float32 values of a checkpoint weight, read with plain file calls."""
    arrays = []
    for index, tensor in enumerate(weight.tensors):
        data = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset)
        codes = index == 0 and weight.format.kind != "dense"
        raw = data.view(np.uint32 if codes else raw_dtype(weight.format))
        if weight.transposed:
            raw = np.swapaxes(raw.reshape(tensor.shape), 1, 2)
        rows = raw.reshape(weight.source_rows or weight.shape[0], -1)
        arrays.append(rows[weight.turn[0] :: weight.turn[1]])
    values = dequantize_mlx(MlxArrays(*arrays), weight.format)
    if weight.rows:
        values = values[np.concatenate([np.arange(*rows) for rows in weight.rows])]
    if weight.taps:
        values = values.reshape(-1, weight.taps).T
    return (values + np.float32(weight.add_one)).reshape(weight.shape)


def raw_tensors(path: Path) -> dict[str, tuple[str, NDArray[Any]]]:
    """Type and raw numbers of every tensor of a checkpoint, as ``write_safetensors`` takes them."""
    tensors = {}
    for name, info in Checkpoint.open(path).tensors.items():
        data = np.fromfile(info.path, np.uint8, info.nbytes, offset=info.offset)
        size = info.nbytes // max(1, int(np.prod(info.shape)))
        raw = data.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size])
        tensors[name] = (info.dtype, raw.reshape(info.shape))
    return tensors


def rewrite(source: Path, folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    """A checkpoint with other tensors; config keys are changed, all else is as in ``source``."""
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    old = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(old | config))
    return folder


def check_same_store(first: Store, second: Store, vision: bool = True) -> None:
    """Fail unless both have the same tensors, byte for byte, and what they say of them is true.

    vision: False: what the first one keeps of a vision-language model the second one has not.
    """
    kept = 0 if vision else first.layout.vision_nbytes
    assert first.layout == replace(second.layout, vision_nbytes=second.layout.vision_nbytes + kept)
    assert vision or (kept and not second.vision_path.exists())
    files = [
        {
            p.relative_to(s.path): p.read_bytes()
            for p in sorted(s.path.rglob("*"))
            if p.suffix == ".bin" or (p.suffix == ".safetensors" and vision)
        }
        for s in (first, second)
    ]
    assert files[0].keys() == files[1].keys()
    for name, data in files[0].items():
        assert data == files[1][name], name
    assert verify(first).ok


PEAK = """
import sys
from pathlib import Path
from aegis.checkpoint.config import QuantSpec
from aegis.convert.convert import convert
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
small, source, folder, layout = sys.argv[1:]
options = {"layout": layout, "experts3bit": True, "quantize": QuantSpec(4, 64)}
convert(small, folder + "/small", **options)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
convert(source, folder + "/big", **options)
print(status("VmHWM") - before, status("VmHWM"))
"""


def memory_of_conversion(small: Path, big: Path, folder: Path, layout: str) -> tuple[int, int]:
    """Bytes that a process grows by at most while it quantises ``big``, once it has converted
    ``small``; and its peak."""
    command = [sys.executable, "-c", PEAK, str(small), str(big), str(folder), layout]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    grown, peak = map(int, done.stdout.split())
    return grown, peak


def checkpoint_values(path: Path) -> tuple[dict[str, F32], dict[tuple[int, int, str], F32]]:
    """All resident tensors by name, and all expert matrices by layer, expert and part."""
    _, resolved = resolve_checkpoint(Checkpoint.open(path))
    experts = {}
    for layer, parts in resolved.experts.items():
        for part, source in parts.items():
            values = {weight.name: source_values(weight) for weight in source.weights}
            stored = sum(map(len, values.values()))
            for expert in range(stored // (source.stride or source.rows)):
                weight, first = source.of(expert)
                experts[layer, expert, part] = values[weight.name][first : first + source.rows]
    return {name: source_values(w) for name, w in resolved.resident.items()}, experts


def expert_values(store: Store, bits: ExpertBits = "4bit") -> dict[tuple[int, int, str], F32]:
    """All expert matrices of a store."""
    layout = store.layout
    geometry = layout.geometry(bits)
    align = 64 if layout.layout == "il16" else 4096
    values = {}
    for layer, path in zip(layout.moe_layers, store.expert_paths(bits), strict=True):
        for expert in range(layout.num_experts):
            for part, segment in geometry.segments.items():
                start = expert * geometry.stride + segment.offset
                data = np.fromfile(path, np.uint8, segment.nbytes, offset=start)
                weight = Weight(segment.shape, segment.format, layout.layout, data)
                values[layer, expert, part] = dequantize(weight, align=align)
    return values


def resident_values(store: Store) -> dict[str, F32]:
    """All resident tensors of a store."""
    buffer = np.empty(store.layout.resident_nbytes(), np.uint8)
    return {name: dequantize(weight) for name, weight in store.load_resident(buffer).items()}


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    """Change a JSON file in place."""
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def edit_header(path: Path, edit: Callable[[Any], object]) -> None:
    """Change a safetensors file's header, leaving its data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def flip_bit(path: Path, offset: int) -> None:
    """Damage one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def cached_nbytes(path: Path) -> int:
    """Bytes of a file that lie in the page cache."""
    size = path.stat().st_size
    if not size:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        assert address != ctypes.c_void_p(-1).value
        resident = ctypes.create_string_buffer(pages)
        assert libc.mincore(address, size, resident) == 0
        libc.munmap(address, size)
    finally:
        os.close(fd)
    return sum(byte & 1 for byte in resident.raw[:pages]) * mmap.PAGESIZE


def require_direct_io(folder: Path) -> None:
    """Skip where the file system keeps its files in memory anyway."""
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        pytest.skip(f"{folder} does not allow direct I/O")
    finally:
        probe.unlink(missing_ok=True)
    if any(f" {mount} tmpfs " in line for line in _mounts() for mount in (_mount_of(folder),)):
        pytest.skip(f"{folder} is a tmpfs")


def _mounts() -> list[str]:
    return Path("/proc/mounts").read_text().splitlines()


def _mount_of(folder: Path) -> str:
    while not folder.is_mount():
        folder = folder.parent
    return str(folder)
