"""Likelihoods in windows, and distances of two models: each against plain numpy on all logits."""

from __future__ import annotations

import errno
import json
import os
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_model import SMALL, needs_native
from strategies import write_choices

from aegis import Engine
from aegis.checkpoint import storage
from aegis.checkpoint.storage import Storage
from aegis.checkpoint.store import Store
from aegis.convert.cache import embedded_path
from aegis.convert.convert import convert
from aegis.engine.comparison import Comparison, log_sum, windows
from aegis.engine.evaluate import compare, likelihood
from aegis.engine.logits_file import LogitsFile, disk_folder, logits_nbytes
from aegis.errors import LogitsError, StoreError, UsageError

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "goldens/smolmoe-135m/golden.json").read_text()
)["perplexity"]
IDS = [(7 * i * i + 13 * i) % 500 for i in range(40)]
CONTEXT = 16

F64 = NDArray[np.float64]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("evaluate")
    source = write_choices(folder / "m", 3, replace(SMALL, bits=(4,)))
    return convert(source, folder / "s", experts3bit=True)


def opened(store: Store, **options: Any) -> AbstractContextManager[Engine]:
    options = {"cap": "1GiB", "backend": "reference", "context": CONTEXT} | options
    return Engine.open(store.path, **options)


def log_probabilities(store: Store, stride: int, **options: Any) -> F64:
    """[len(IDS) - 1, vocab_size], each position from the first window that has it."""
    rows: list[Any] = []
    with opened(store, **options) as engine:
        for start in range(0, len(IDS), stride):
            scores = engine.score(IDS[start : min(start + CONTEXT, len(IDS) - 1)], last=None)
            rows.extend(scores[len(rows) - start :].astype(np.float64))
            if len(rows) == len(IDS) - 1:
                break
    logits = np.array(rows)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_windows_look_at_every_position_once(
    positions: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    found = list(windows(positions, context, stride))
    looked = [at for window in found for at in range(window.first, window.end)]
    assert looked == list(range(positions))
    assert [window.start for window in found] == [stride * i for i in range(len(found))]
    for window in found:
        assert window.start <= window.first < window.end <= window.start + context
        # Behind the first window a position has at least what two windows share before it.
        assert window.start == 0 or window.first - window.start == context - stride


@pytest.mark.parametrize("stride", [1, 5, CONTEXT])
def test_perplexity_is_that_of_every_window_scored_alone(store: Store, stride: int) -> None:
    logs = log_probabilities(store, stride)
    expected = -logs[np.arange(len(IDS) - 1), IDS[1:]].mean()
    done: list[tuple[int, int]] = []
    with opened(store) as engine:
        found = likelihood(engine, IDS, stride, lambda *now: done.append(now))
    assert found.mean_nll == pytest.approx(expected, abs=1e-6)
    assert found.perplexity == pytest.approx(np.exp(expected), rel=1e-6)
    assert done == [(i + 1, len(IDS) - 1) for i in range(len(IDS) - 1)]


def test_distances_are_those_of_all_predictions_at_once(store: Store, tmp_path: Path) -> None:
    first, second = (log_probabilities(store, 8, experts=bits) for bits in ("4bit", "3bit"))
    one, other, found = compare(
        lambda: opened(store), lambda: opened(store, experts="3bit"), IDS, 8, 512, tmp_path
    )
    divergence = (np.exp(first) * (first - second)).sum(axis=1)
    assert found.mean == pytest.approx(divergence.mean(), rel=1e-6)
    assert found.median == pytest.approx(np.median(divergence), rel=1e-6)
    assert found.most == pytest.approx(divergence.max(), rel=1e-6)
    for at, value in found.percentiles.items():
        assert value == pytest.approx(np.percentile(divergence, at), rel=1e-6)
    best = [np.argsort(-logs, axis=1)[:, :20] for logs in (first, second)]
    assert found.top1 == (best[0][:, 0] == best[1][:, 0]).mean()
    shared = [len(set(a) & set(b)) / 20 for a, b in zip(*map(np.ndarray.tolist, best), strict=True)]
    assert found.top20 == pytest.approx(np.mean(shared))
    assert 0 < found.top1 < 1 > found.top20 > 0
    for likely, logs in ((one, first), (other, second)):
        nll = -logs[np.arange(len(IDS) - 1), IDS[1:]].mean()
        assert likely.mean_nll == pytest.approx(nll, abs=1e-6)
    assert not list(tmp_path.iterdir())


def test_a_model_is_at_no_distance_from_itself(store: Store, tmp_path: Path) -> None:
    one, other, found = compare(lambda: opened(store), lambda: opened(store), IDS, 8, 512, tmp_path)
    assert one == other
    assert (found.mean, found.most, found.top1, found.top20) == (0, 0, 1, 1)


@needs_native
def test_the_first_likelihoods_of_the_text_that_comes_along_are_the_golden_ones(
    cache: Path,
) -> None:
    text = (embedded_path() / "perplexity.txt").read_bytes().decode()
    assert text == GOLDEN["text"]
    with Engine.open(cap="1GiB", context=CONTEXT) as engine:
        ids = engine.tokenizer.encode(text)
        assert ids == GOLDEN["ids"]
        found = likelihood(engine, ids[:9], 8)
    assert found.mean_nll == pytest.approx(np.mean(GOLDEN["first_8_nll"]), abs=1e-3)


def test_a_small_vocabulary_is_shared_whole() -> None:
    logits = np.array([[0, 1, 2], [2, 1, 0]], np.float32)
    comparison = Comparison(1)
    comparison.note(0, logits[0], logits[1], (log_sum(logits[0]), log_sum(logits[1])))
    found = comparison.result()
    assert (found.top1, found.top20) == (0, 1)
    assert found.mean == pytest.approx(np.exp(logits[0] - log_sum(logits[0])) @ [-2, 0, 2])


@pytest.mark.parametrize("stride", [0, CONTEXT + 1])
def test_a_stride_that_leaves_tokens_out_is_refused(store: Store, stride: int) -> None:
    with opened(store) as engine, pytest.raises(UsageError, match=r"it can be 1 to 16"):
        likelihood(engine, IDS, stride)


def test_a_text_of_one_token_predicts_nothing(store: Store) -> None:
    with opened(store) as engine, pytest.raises(UsageError, match=r"fewer than two tokens"):
        likelihood(engine, IDS[:1], 1)


def test_logits_come_back_from_disk_bit_by_bit_and_leave_nothing(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(700, 1030)).astype(np.float32)
    with LogitsFile(tmp_path, 1030) as file:
        assert not list(tmp_path.iterdir())
        for row in rows:
            file.append(row)
        file.written()
        for row in rows:
            assert np.array_equal(file.next(), row)
    assert logits_nbytes(700, 1030) == 700 * 8192


def test_logits_are_not_kept_where_they_would_take_memory_or_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk_folder(tmp_path / "not there yet", 1) == tmp_path
    with pytest.raises(StoreError, match=r"MiB free.* evaluate fewer tokens"):
        disk_folder(tmp_path, 1 << 60)
    monkeypatch.setattr(storage, "storage_of", lambda folder: Storage("memory"))
    with pytest.raises(StoreError, match=r"lies in memory.* set AEGIS_CACHE"):
        disk_folder(tmp_path, 1)


def test_a_full_disk_ends_a_comparison_in_one_sentence(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ways = [lambda: opened(store), lambda: opened(store)]
    monkeypatch.setattr("aegis.checkpoint.fileio.os.pwrite", full)
    with pytest.raises(StoreError, match=r"the disk of .* is full; make room or set AEGIS_CACHE"):
        compare(*ways, IDS, 8, 512, tmp_path)
    assert not list(tmp_path.iterdir())


def test_logits_that_are_no_numbers_end_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(store) as engine:
        monkeypatch.setattr(
            engine, "visit_logits", lambda ids, first, see: see(0, np.full(512, np.nan, np.float32))
        )
        with pytest.raises(LogitsError, match=r"at token 0 of the text sum to nan"):
            likelihood(engine, IDS, 8)


def test_an_engine_goes_on_after_a_visitor_failed(store: Store) -> None:
    def fail(position: int, logits: Any) -> None:
        raise StoreError("the disk is full")

    with opened(store) as engine:
        before = engine.score(IDS[:9])
        with pytest.raises(StoreError, match="full") as held:
            engine.visit_logits(IDS[:12], 3, fail)
        # Whoever holds the error holds what was interrupted: that has ended all the same.
        assert held.tb is not None
        assert not engine._opened.tiers._prefilling
        assert np.array_equal(engine.score(IDS[:9]), before)


@pytest.mark.parametrize("first", [0, 3, CONTEXT - 1])
def test_visits_begin_where_they_shall(store: Store, first: int) -> None:
    found: list[int] = []
    with opened(store, prefill_step=5) as engine:
        engine.visit_logits(IDS[:CONTEXT], first, lambda at, _: found.append(at))
    assert found == list(range(first, CONTEXT))
