"""The process that probes: ``python -m aegis.predict.worker REQUEST``; see ``aegis.bench.worker``.

It writes a small store into a folder that whoever asks has made and will remove.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aegis.bench.worker import say, serve

if TYPE_CHECKING:
    from aegis.checkpoint.store import Store
    from aegis.tiers.virtual_disk import Disk

STEPS = 100
"""Of the progress that is told."""
_WRITTEN = 50
_LOOK_S = 0.3


class _Steps:
    """Tells how far the probe is."""

    def __init__(self) -> None:
        self._done = 0

    def writing(self, done: int, total: int) -> None:
        """The store is the first half."""
        self.reach(_WRITTEN * done // total if total else _WRITTEN)

    def next(self) -> None:
        """One more part of what comes then."""
        self.reach(min(STEPS, self._done + 8))

    def reach(self, done: int) -> None:
        """So much is done."""
        if done > self._done:
            self._done = done
            say({"done": done})


def probe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write the small store, and measure disk and kernels."""
    from aegis.predict.kernels import measure_kernels

    steps = _Steps()
    store = _written(request, steps)
    first = _looked(store, request)
    steps.next()
    disk = _disk(store, first, request)
    kernels = measure_kernels(
        store.path,
        request["settings"],
        request["depth"],
        disk,
        request["record_nbytes"],
        steps.next,
    )
    second = _looked(store, request)
    disk = _disk(store, {name: first[name] + second[name] for name in first}, request)
    steps.reach(STEPS)
    return {
        "kernels": kernels,
        "disk": {"nbytes_per_s": disk.nbytes_per_s, "latency_s": disk.latency_s},
    }


def _written(request: Mapping[str, Any], steps: _Steps) -> Store:
    from aegis.synthetic.recipe import recipe
    from aegis.synthetic.write import make

    folder = Path(request["folder"])
    (folder / "config.json").write_text(json.dumps(request["config"]))
    shape = recipe(f"synthetic:{folder / 'config.json'}")
    three = request["settings"]["experts"] == "3bit"
    return make(
        shape, folder / "store", request["layout"], experts3bit=three, progress=steps.writing
    )


def _looked(store: Store, request: Mapping[str, Any]) -> dict[str, list[float]]:
    """Bytes per second of rounds of reads, by as many threads as read and one by one; from the
    model's own files where there are any."""
    from aegis.bench.disk import Reads, read_speeds
    from aegis.checkpoint.storage import storage_of
    from aegis.tiers.store import ExpertFiles

    experts = request["settings"]["experts"]
    stride = _looked_nbytes(store, request)
    paths = [Path(path) for path in request["files"]] or list(store.expert_paths(experts))
    count = paths[0].stat().st_size // stride
    direct = storage_of(paths[0]).kind != "buffered"
    with closing(ExpertFiles(paths, stride, stride, count, direct=direct)) as files:
        kinds = [Reads(1, request["settings"]["io_threads"]), Reads(1, 1, ahead=1)]
        together, alone = read_speeds(files, kinds, _LOOK_S)
    return {"together": together, "alone": alone}


def _looked_nbytes(store: Store, request: Mapping[str, Any]) -> int:
    """Of the records that are read to know the disk. Random weights cannot be quantised in every
    way: those of the small store may be a little larger or smaller than the model's."""
    if request["files"]:
        return int(request["record_nbytes"])
    return store.layout.geometry(request["settings"]["experts"]).stride


def _disk(store: Store, speeds: Mapping[str, list[float]], request: Mapping[str, Any]) -> Disk:
    """The disk of the simulator that does as well: what one read takes beyond its bytes' time when
    it is alone is latency, in which others flow."""
    from aegis.tiers.virtual_disk import Disk

    together, alone = (statistics.median(speeds[name]) for name in ("together", "alone"))
    nbytes = _looked_nbytes(store, request)
    latency_s = max(0.0, nbytes / alone - nbytes / together)
    return Disk(together, latency_s, request["settings"]["io_threads"])


if __name__ == "__main__":
    sys.exit(serve(probe))
