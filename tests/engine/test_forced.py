"""The stream of tokens that benchmarks force."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aegis.engine.forced import ForcedSampler, token_stream


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


EXPECTED = [239241, 183853, 93374, 136132, 239578, 65039, 188176, 54176]
