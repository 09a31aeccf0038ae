"""Convert a full-size checkpoint of random weights, beside a plain copy of the same bytes.

    python tools/measure_convert.py /path/with/room [--shape qwen3.6-35b-a3b] [--rounds 2]

The checkpoint is what mlx-lm writes: shards, an index, code words with scales and biases. Copy
(``cp`` and ``sync``) and conversion take turns, each from files that nobody has cached; printed are
their speeds, the ratio, and the most anonymous memory that the conversion had. Room for twice the
checkpoint is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from aegis.checkpoint.fileio import UncachedWriter
from aegis.checkpoint.layout import PARTS
from aegis.kernels.base import Format
from aegis.models import family
from aegis.synthetic.recipe import Recipe, recipe

U8 = NDArray[np.uint8]
SHARD_NBYTES = 5 << 30
PIECE_NBYTES = 8 << 20
_DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint: its name, its type there, its shape, and what fills it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    """``codes``, ``scales``, ``biases`` or ``numbers``."""

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * (4 if self.dtype in ("U32", "F32") else 2)


def module(name: str, shape: tuple[int, ...], fmt: Format) -> Iterator[Tensor]:
    """The tensors of a module, or of a name that is a tensor itself."""
    if fmt.kind == "affine":
        *lead, cols = shape
        yield Tensor(f"{name}.weight", "U32", (*lead, cols * fmt.bits // 32), "codes")
        for kind in ("scales", "biases"):
            dtype = _DTYPES[fmt.dtype]
            yield Tensor(f"{name}.{kind}", dtype, (*lead, cols // fmt.group_size), kind)
        return
    alone = name.endswith((".bias", ".A_log", ".dt_bias"))
    yield Tensor(name if alone else f"{name}.weight", "BF16", shape, "numbers")


def tensors_of(made: Recipe) -> list[Tensor]:
    """All that a checkpoint of this shape holds, by the names that MLX gives them."""
    mapped = family(made.config.model_type).tensor_map(made.config)
    layout, prefix = made.layout("row"), "".join(mapped.prefixes)
    found: dict[str, Tensor] = {}
    for entry in mapped.resident:
        if entry.optional:
            continue
        shape = entry.shape
        if entry.rows:
            shape = (entry.source_rows, *shape[1:])
        elif entry.taps:
            shape = (shape[0] // entry.taps, entry.taps, 1)
        elif entry.stack:
            shape = (entry.stack, shape[0] // entry.stack, *shape[1:])
        source = entry.source or entry.name
        head = "" if source.startswith("lm_head") else "model."
        where = prefix.removesuffix("model.") + head + source
        for tensor in module(where, shape, layout.resident[entry.name].format):
            found[tensor.name] = tensor
    experts = mapped.experts
    for layer in experts.layers:
        for part in PARTS:
            name = prefix + experts.stacked.format(layer=layer, part=part)
            shape = (experts.num_experts, *experts.shapes[part])
            for tensor in module(name, shape, layout.experts.segments[part].format):
                found[tensor.name] = tensor
    return list(found.values())


class RandomBytes:
    """Bytes that look like a tensor's; no two pieces are the same."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._words = rng.integers(0, 1 << 63, PIECE_NBYTES // 8, np.uint64)
        scales = rng.uniform(0.001, 0.01, PIECE_NBYTES // 2).astype(np.float32)
        self._scales = (scales.view(np.uint32) >> 16).astype(np.uint16)
        self._biases = ((scales * -8).view(np.uint32) >> 16).astype(np.uint16)
        self._count = 0

    def pieces(self, tensor: Tensor) -> Iterator[U8]:
        """The data of a tensor in pieces."""
        left = tensor.nbytes
        while left:
            self._count += 1
            take = min(left, PIECE_NBYTES)
            yield self._piece(tensor)[:take]
            left -= take

    def _piece(self, tensor: Tensor) -> U8:
        if tensor.kind == "codes":
            odd = np.uint64(self._count * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
            return (self._words ^ odd).view(np.uint8)
        numbers = self._biases if tensor.kind == "biases" else self._scales
        numbers = np.roll(numbers, self._count)
        if tensor.dtype == "F32":
            return (numbers.astype(np.uint32) << 16).view(np.uint8)
        return numbers.view(np.uint8)


def shards(tensors: list[Tensor]) -> list[list[Tensor]]:
    """In order, each below ``SHARD_NBYTES`` unless a tensor alone is above it."""
    found: list[list[Tensor]] = [[]]
    for tensor in tensors:
        held = sum(t.nbytes for t in found[-1])
        if found[-1] and held + tensor.nbytes > SHARD_NBYTES:
            found.append([])
        found[-1].append(tensor)
    return found


def write_shard(path: Path, tensors: list[Tensor], data: RandomBytes) -> None:
    """One safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        offsets = [start, end]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with UncachedWriter(path) as writer:
        writer.write(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))
        for tensor in tensors:
            for piece in data.pieces(tensor):
                writer.write(piece)


def write_checkpoint(made: Recipe, folder: Path) -> int:
    """Write it; its bytes."""
    folder.mkdir(parents=True)
    data = RandomBytes(made.seed)
    where: dict[str, str] = {}
    parts = shards(tensors_of(made))
    for number, tensors in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_shard(folder / name, tensors, data)
        where |= {tensor.name: name for tensor in tensors}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, pieces in made.files().items():
        (folder / name).write_bytes(b"".join(pieces))
    plain = json.loads((folder / "config.json").read_text())
    bits = made.layout("row")
    prefix = "".join(family(made.config.model_type).tensor_map(made.config).prefixes)
    for entry in bits.resident.values():
        if entry.format.kind == "affine" and entry.format.bits != 4:
            spec = {"group_size": entry.format.group_size, "bits": entry.format.bits}
            plain["quantization"][prefix + entry.name] = spec
    (folder / "config.json").write_text(json.dumps(plain))
    return sum(path.stat().st_size for path in folder.iterdir())


def forget(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def watched(command: list[str | Path]) -> tuple[float, int]:
    """Seconds that a process took, and the most anonymous memory it had."""
    most = 0
    begin = time.monotonic()
    child = subprocess.Popen(command)
    status = Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                most = max(most, int(line.split()[1]) << 10)
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.01)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return time.monotonic() - begin, most


def copy(checkpoint: Path, target: Path) -> float:
    """Seconds of a plain copy that is on the disk."""
    forget(checkpoint)
    begin = time.monotonic()
    subprocess.run(["cp", "-r", checkpoint, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    seconds = time.monotonic() - begin
    forget(target)
    delete(target)
    return seconds


def delete(folder: Path) -> None:
    """Delete it, and wait until the disk has its room back: where file systems discard what is
    deleted, that would go on beside whatever is timed next."""
    shutil.rmtree(folder)
    subprocess.run(["sync", "-f", folder.parent], check=True)
    time.sleep(10)


def main() -> int:
    """Print speeds, ratio and memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="qwen3.6-35b-a3b")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    made = recipe(f"synthetic:{options.shape}")
    checkpoint, other = options.folder / "checkpoint", options.folder / "other"
    nbytes = write_checkpoint(made, checkpoint)
    print(f"a checkpoint of {nbytes / 1e9:.2f} GB", flush=True)
    ratios = []
    for _ in range(options.rounds):
        copied = copy(checkpoint, other)
        forget(checkpoint)
        command = [sys.executable, "-P", "-m", "aegis", "convert", checkpoint, other, "-q"]
        seconds, most = watched(command)
        written = sum(path.stat().st_size for path in other.rglob("*") if path.is_file())
        delete(other)
        ratios.append(copied / seconds)
        print(
            f"copied at {nbytes / copied / 1e6:.0f} MB/s, converted at"
            f" {nbytes / seconds / 1e6:.0f} MB/s into {written / 1e9:.2f} GB: ratio"
            f" {ratios[-1]:.2f}, {most >> 20} MiB of anonymous memory",
            flush=True,
        )
    shutil.rmtree(checkpoint)
    print(f"median ratio {median(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
