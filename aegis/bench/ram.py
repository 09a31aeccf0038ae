"""How fast this machine's threads can read memory.

With the C++ kernels it is their own plain read, in huge pages, by their own thread pool; without
them numpy sums, which comes close (it is the one backend that is left then, too).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from aegis.kernels import registry
from aegis.settings import MIB
from aegis.tiers.arena import HUGE_NBYTES, Arena

_WINDOW_NBYTES = 16 * MIB


def ram_limit(threads: int, nbytes: int, seconds: float) -> float:
    """Bytes per second of reading ``nbytes`` over and over for so many seconds: the best pass.

    nbytes: more than caches hold, or they are what is measured.

    Raises:
        ArenaError: the system has no memory for it.
    """
    nbytes = max(nbytes // _WINDOW_NBYTES, 1) * _WINDOW_NBYTES
    with closing(Arena(nbytes)) as arena:
        memory = arena.take("memory", nbytes, HUGE_NBYTES)
        memory[:] = 1
        if registry.reason("native") is None:
            read = _native(threads, int(memory.ctypes.data))
            return _best(read, nbytes, seconds)
        with ThreadPoolExecutor(threads) as workers:
            numbers = memory.view(np.int64)

            def summed(start: int) -> float:
                window = numbers[start // 8 : (start + _WINDOW_NBYTES) // 8]
                begin = time.perf_counter()
                list(workers.map(np.sum, np.array_split(window, threads)))
                return time.perf_counter() - begin

            return _best(summed, nbytes, seconds)


def _native(threads: int, base: int) -> Callable[[int], float]:
    from aegis.kernels.native import _native

    pool = _native.Pool(threads)
    return lambda start: float(_native.time_read(pool, base + start, _WINDOW_NBYTES, 1))


def _best(read: Callable[[int], float], nbytes: int, seconds: float) -> float:
    """Whole passes: a window alone may be the one that the caches have kept."""
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        passed = sum(read(start) for start in range(0, nbytes, _WINDOW_NBYTES))
        best = max(best, nbytes / max(passed, 1e-9))
    return best
