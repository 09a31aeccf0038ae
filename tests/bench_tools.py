"""What a process that measured a configuration might say."""

from __future__ import annotations

from typing import Any


def window(tokens: int, seconds: float, scale: int = 1) -> dict[str, Any]:
    """As ``Window.to_json``."""
    split = {"attention": 0.125, "experts": 0.25, "head": 0.0625, "router": 0.03125, "wait": 0.25}
    split = {name: share * seconds for name, share in split.items()} | {"queue": 0, "device": 0}
    return {
        "tokens": tokens,
        "seconds": seconds,
        "split_s": {**split, "other": seconds - sum(split.values())},
        "busy_s": seconds / 2,
        "token_s": [seconds / tokens] * tokens,
        "hits": 6 * scale,
        "hot_hits": 5 * scale,
        "late": scale,
        "misses": scale,
        "guesses": 4 * scale,
        "useful": 3 * scale,
        "wasted": scale,
        "cancelled": 0,
        "read_nbytes": 1 << 20,
        "wait_s": split["wait"],
        "choices": 8 * scale,
        "hit_rate": 0.75,
    }


def measured() -> dict[str, Any]:
    """Two repetitions of 8 and 4 tokens."""
    return {
        "model": "small",
        "backend": "native",
        "description": "native, two threads",
        "threads": 2,
        "record_nbytes": 1 << 16,
        "peak_nbytes": 100 << 20,
        "given_back_nbytes": 0,
        "touched_nbytes": 3e8,
        "repetitions": [
            {"prompt": window(8, 2.0), "decoded": window(4, 1.0)},
            {"prompt": window(8, 1.0), "decoded": window(4, 2.0, scale=3)},
        ],
    }
