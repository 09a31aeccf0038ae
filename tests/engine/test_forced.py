"""The stream of tokens that benchmarks force."""

from __future__ import annotations

import hashlib
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.engine.forced import ForcedSampler, token_stream
from aegis.errors import LogitsError


@given(st.integers(0, 2**40), st.integers(1, 3000))
def test_ids_are_of_the_vocabulary_and_the_seed_says_which(seed: int, vocab_size: int) -> None:
    ids = list(islice(token_stream(seed, vocab_size), 130))
    assert ids == list(islice(token_stream(seed, vocab_size), 130))
    assert all(0 <= token < max(1, vocab_size - 16) for token in ids)


def test_the_stream_never_changes() -> None:
    """Figures of benchmarks are compared across versions."""
    first = list(islice(token_stream(0, 248320), 8))
    assert first == EXPECTED
    assert first != list(islice(token_stream(1, 248320), 8))


def test_few_tokens_make_up_most_of_it() -> None:
    ids = np.array(list(islice(token_stream(3, 50304), 20000)))
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    assert 0.02 < counts[0] / len(ids) < 0.08
    assert 0.35 < counts[:100].sum() / len(ids) < 0.55
    assert len(counts) > 4000


def test_the_sampler_takes_the_stream_whatever_the_logits_say() -> None:
    sampler = ForcedSampler(5, 512)
    assert not sampler.is_greedy
    found = [sampler.sample(np.zeros(512, np.float32), []) for _ in range(70)]
    assert found == list(islice(token_stream(5, 512), 70))


def test_what_it_saw_is_summed_up_bit_by_bit() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 9000)).astype(np.float32)
    samplers = [ForcedSampler(2, 9000) for _ in range(3)]
    assert samplers[0].nll is None
    taken = [samplers[0].sample(row) for row in logits]
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    exact -= logits[np.arange(3), taken]
    assert samplers[0].nll == pytest.approx(exact.mean(), rel=1e-8)
    assert samplers[0].logits_digest == hashlib.blake2b(logits, digest_size=16).hexdigest()
    changed = logits.copy()
    changed[1, 5] = np.nextafter(changed[1, 5], np.float32(9))
    for before, after in zip(logits[:2], changed, strict=False):
        samplers[1].sample(before)
        samplers[2].sample(after)
    digests = {sampler.logits_digest for sampler in samplers}
    assert len(digests) == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(LogitsError, match="likelihood of nan; run `aegis verify`"):
        ForcedSampler(0, 512).sample(np.full(512, value, np.float32))


EXPECTED = [239241, 183853, 93374, 136132, 239578, 65039, 188176, 54176]
