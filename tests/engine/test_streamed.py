"""Experts really come from the disk, as often as counted, and leave no page cache behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_model import needs_native
from stores import cached_nbytes

from aegis import Engine
from aegis.checkpoint.pagecache import drop_pages
from aegis.convert.cache import embedded_path, ensure_store

MIB = 1 << 20

pytestmark = needs_native

# A process of its own: nothing but the engine reads between the two looks at the counter. One run
# before the first look brings in every page of code.
PROBE = """
import json, sys
from pathlib import Path
from aegis import Engine

def read_nbytes():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])

with Engine.open(cap=int(sys.argv[1]), context=512, backend="native") as engine:
    list(engine.generate(range(100, 120), max_tokens=4, ignore_eos=True))
    before, counted = read_nbytes(), engine.stats.read_nbytes
    list(engine.generate(range(200, 500), max_tokens=100, ignore_eos=True))
    print(json.dumps([engine.stats.read_nbytes - counted, read_nbytes() - before]))
"""


@pytest.fixture(scope="module")
def smallest_cap(cache: Path) -> int:
    """The smallest cap of the embedded model at a context of 512, its store converted."""
    with Engine.open(cap="1GiB", context=512, backend="native") as engine:
        return engine.plan.min_cap_nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/io")
@pytest.mark.parametrize("above", [0, 8 * MIB])
def test_the_bytes_counted_are_the_bytes_that_the_kernel_read(
    smallest_cap: int, above: int
) -> None:
    command = [sys.executable, "-c", PROBE, str(smallest_cap + above)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counted, read = json.loads(done.stdout)
    assert counted > 50 * MIB
    assert abs(read - counted) <= 0.02 * counted


@pytest.mark.skipif(sys.platform != "linux", reason="asks mincore")
def test_no_page_cache_is_left_behind(smallest_cap: int) -> None:
    store = ensure_store(embedded_path())
    files = [store.resident_path, *store.expert_paths()]
    for file in files:  # Other tests look into this store through the page cache.
        with file.open("rb") as opened:
            drop_pages(opened.fileno())
    assert sum(map(cached_nbytes, files)) == 0
    with Engine.open(store.path, cap=smallest_cap, context=512, backend="native") as engine:
        list(engine.generate(range(100, 140), max_tokens=8, ignore_eos=True))
        assert sum(map(cached_nbytes, files)) == 0
    assert sum(map(cached_nbytes, files)) == 0
