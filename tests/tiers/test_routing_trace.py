"""A trace's file: what was recorded comes back, and damage is refused."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.tiers import RoutingTrace, TraceError, TraceRecorder
from aegis.tiers.trace import ids_digest


def drawn(seed: int, tokens: int, layers: int, experts: int, per_token: int) -> RoutingTrace:
    """A trace whose routers choose at random and guess what they choose, then others."""
    rng = np.random.default_rng(seed)
    orders = np.argsort(rng.random((tokens, layers, experts)), axis=-1)
    width = min(16, experts)
    recorder = TraceRecorder(layers, experts, width)
    for token in range(tokens):
        for layer in range(layers):
            for ahead in (1, 2):
                if layer + ahead < layers:
                    recorder.guessed(ahead, orders[token, layer + ahead])
            recorder.chose(np.sort(orders[token, layer, :per_token]).astype(np.int32))
    return recorder.trace("m", list(range(tokens)))


def same(one: RoutingTrace, other: RoutingTrace) -> bool:
    parts = zip((one.chosen, *one.guesses), (other.chosen, *other.guesses), strict=True)
    named = [(t.model, t.num_experts, t.ids_sha256) for t in (one, other)]
    return named[0] == named[1] and all(np.array_equal(a, b) for a, b in parts)


@given(
    st.integers(0, 2**16),
    st.integers(0, 5),
    st.integers(1, 4),
    st.sampled_from([1, 3, 20, 256, 257]),
    st.integers(1, 3),
)
def test_what_was_recorded_is_what_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    tokens: int,
    layers: int,
    experts: int,
    per_token: int,
) -> None:
    path = tmp_path_factory.mktemp("trace") / "routing.trace"
    trace = drawn(seed, tokens, layers, experts, min(experts, per_token))
    trace.save(path)
    assert same(RoutingTrace.load(path), trace)
    assert list(path.parent.iterdir()) == [path]
    ids = trace.chosen.size + sum(part.size for part in trace.guesses)
    assert path.stat().st_size < 512 + ids * (1 if experts <= 256 else 2)


def test_the_digest_tells_token_ids_apart() -> None:
    assert ids_digest([1, 2]) == ids_digest((1, 2)) != ids_digest([2, 1])
    assert len(ids_digest([])) == 64


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the file says of itself."""
    data = path.read_bytes()
    size = int.from_bytes(data[8:12], "little")
    head = json.loads(data[12 : 12 + size])
    change(head)
    said = json.dumps(head).encode()
    path.write_bytes(data[:8] + len(said).to_bytes(4, "little") + said + data[12 + size :])


def expert_beyond(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] = 200
    path.write_bytes(data)
    ids = data[12 + int.from_bytes(data[8:12], "little") :]
    rewritten(path, lambda head: head.update(crc32=zlib.crc32(ids)))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "cannot be read"),
    "another kind": (lambda path: path.write_bytes(b"PK\3\4"), "is not a trace of aegis"),
    "empty": (lambda path: path.write_bytes(b""), "is not a trace of aegis"),
    "only a name": (lambda path: path.write_bytes(b"AEGISTRC"), "it ends early"),
    "no object": (
        lambda path: path.write_bytes(b"AEGISTRC\2\0\0\0[]"),
        "its description is no object",
    ),
    "no JSON": (lambda path: path.write_bytes(b"AEGISTRC\2\0\0\0{,"), "is damaged"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), "length is not what"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "length is not what"),
    "newer": (lambda path: rewritten(path, lambda h: h.update(version=2)), "its version is 2"),
    "no version": (lambda path: rewritten(path, lambda h: h.pop("version")), "its version is"),
    "text": (lambda path: rewritten(path, lambda h: h.update(tokens="3")), "its tokens is"),
    "negative": (lambda path: rewritten(path, lambda h: h.update(tokens=-1)), "its tokens is"),
    "true": (lambda path: rewritten(path, lambda h: h.update(num_layers=True)), "num_layers"),
    "huge": (lambda path: rewritten(path, lambda h: h.update(num_experts=1 << 30)), "its sizes"),
    "more chosen": (
        lambda path: rewritten(path, lambda h: h.update(num_experts_per_tok=21)),
        "its sizes are of no model",
    ),
    "an expert beyond": (expert_beyond, "an expert that there is not"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    damage, match = DAMAGE[name]
    path = tmp_path / "routing.trace"
    drawn(1, 3, 2, 20, 2).save(path)
    damage(path)
    with pytest.raises(TraceError, match=match) as caught:
        RoutingTrace.load(path)
    assert str(path) in str(caught.value)


@given(data=st.data())
def test_no_flipped_bit_of_the_ids_passes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "routing.trace"
    drawn(1, 3, 2, 20, 2).save(path)
    content = bytearray(path.read_bytes())
    start = 12 + int.from_bytes(content[8:12], "little")
    content[data.draw(st.integers(start, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(TraceError, match="checksum mismatch"):
        RoutingTrace.load(path)


def test_a_trace_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "routing.trace"
    path.write_bytes(b"before")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        drawn(1, 3, 2, 20, 2).save(path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
