"""A machine with nothing wrong, files of machines that are not here, and quick selftests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aegis.checkpoint.storage import DIRECT
from aegis.doctor.cache import CacheFolder
from aegis.doctor.disk import DiskTest, ReadSpeed
from aegis.doctor.facts import BackendFact, EmbeddedModel, Facts
from aegis.doctor.huge_pages import HugePages
from aegis.doctor.processor import Processor
from aegis.engine.limits import MemoryLimits

MIB, GIB = 1 << 20, 1 << 30

HEALTHY = Facts(
    versions={
        "aegis": "1.2.3",
        "python": "3.11.2",
        "numpy": "2.0",
        "tokenizers": "0.20",
        "os": "Some Linux",
        "kernel": "Linux 6.1",
    },
    processor=Processor(
        name="Some Processor",
        architecture="x86_64",
        cores=8,
        usable_cores=8,
        quota_cores=None,
        instructions=("avx512", "avx2"),
        isa="avx512",
        isas=("avx512", "avx2", "scalar"),
        wanted_isa=None,
    ),
    memory=MemoryLimits(total=32 * GIB, available=24 * GIB, swap=0),
    swap_nbytes=0,
    address_space_nbytes=None,
    huge_pages=HugePages("madvise", 32 * MIB, 32 * MIB),
    cache=CacheFolder(Path("/home/u/.cache/aegis"), True, "ext4", 100 * GIB, DIRECT, 1),
    cache_error=None,
    disk=DiskTest(
        folder=Path("/home/u/.cache/aegis"),
        direct=True,
        file_nbytes=256 * MIB,
        speeds=(ReadSpeed(65536, True, 2 * GIB), ReadSpeed(65536, False, GIB)),
    ),
    backends=(
        BackendFact("mlx", "the mlx backend needs MLX", None),
        BackendFact("native", None, None),
        BackendFact("reference", None, None),
    ),
    default_backend="native",
    compiler="/usr/bin/c++",
    model=EmbeddedModel("small", 4096, 300 * MIB, 140 * MIB, 330 * MIB, 65536),
    model_error=None,
)


def changed(part: str, **fields: Any) -> Facts:
    """The healthy machine with something else in one of its parts."""
    return replace(HEALTHY, **{part: replace(getattr(HEALTHY, part), **fields)})


def write_root(root: Path, files: Mapping[str, str]) -> Path:
    """Files as /proc and /sys have them, under another root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
