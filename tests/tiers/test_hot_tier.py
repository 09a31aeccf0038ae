import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tier_fakes import STRIDE, CountingPool, SlotReader, check_slots

from aegis.tiers import Counters, ExpertTiers, SlotPool
from aegis.tiers.guess import Guesser
from aegis.tiers.hot_tier import HotTier
from aegis.tiers.policy import POLICIES, Lfu, open_policy
from aegis.tiers.simulate import NoFiles
from aegis.tiers.slots import NOWHERE

NUM_LAYERS, NUM_EXPERTS, CHOSEN = 4, 24, 4


def skewed_trace(tokens: int, seed: int = 0) -> NDArray[np.int32]:
    """[tokens, layers, chosen]: some experts are liked for good, others for a while."""
    rng = np.random.default_rng(seed)
    liking = rng.gumbel(size=(NUM_LAYERS, NUM_EXPERTS))
    mood = np.zeros_like(liking)
    rows = []
    for _ in range(tokens):
        mood = 0.9 * mood + 0.3 * rng.normal(size=mood.shape)
        score = liking + mood + 0.7 * rng.gumbel(size=mood.shape)
        rows.append(np.sort(np.argsort(-score, axis=1)[:, :CHOSEN], axis=1))
    return np.array(rows, dtype=np.int32)


def replay(trace: NDArray[np.int32], num_slots: int, width: int = 0, **options: str) -> Counters:
    """Decode the trace with a guess that is right three times out of four."""
    slots = SlotPool(num_slots, STRIDE)
    tiers = ExpertTiers(
        NoFiles(NUM_LAYERS, NUM_EXPERTS, STRIDE),
        slots,
        num_experts_per_tok=CHOSEN,
        staging_slots=min(num_slots, NUM_EXPERTS),
        guess_width=width,
        pool=CountingPool(),
        **options,
    )
    rng = random.Random(1)
    for token in trace:
        for layer_index, chosen in enumerate(token):
            acquisition = tiers.acquire(layer_index, chosen)
            if width and layer_index + 1 < NUM_LAYERS:
                ranked = [int(e) for e in token[layer_index + 1] if rng.random() < 0.75]
                ranked += [rng.randrange(NUM_EXPERTS) for _ in range(2)]
                tiers.guess(layer_index + 1, ranked)
            while not acquisition.complete:
                acquisition.wait()
            acquisition.release()
    check_slots(slots)
    tiers.close()
    return tiers.stats.totals("decode")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("width", [0, 4])
def test_the_hit_rate_does_not_fall_as_slots_grow(policy: str, width: int) -> None:
    trace = skewed_trace(150)
    slot_counts = [4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 120]
    rates = [replay(trace, count, width, policy=policy).hit_rate for count in slot_counts]
    for before, after in pairwise(rates):
        assert after >= before - 0.02, rates


def test_frequency_beats_recency_and_chance_when_slots_are_few() -> None:
    trace = skewed_trace(300)
    rates = {name: replay(trace, 20, policy=name).hit_rate for name in POLICIES}
    assert rates["lfu"] > rates["random"] > 0
    assert rates["lfu"] > rates["lru"]


def test_a_guess_raises_the_hit_rate() -> None:
    trace = skewed_trace(200)
    assert replay(trace, 24, 4).hit_rate > replay(trace, 24, 0).hit_rate + 0.1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("width", [0, 6])
def test_a_pool_that_holds_every_expert_reads_each_once(policy: str, width: int) -> None:
    total = NUM_LAYERS * NUM_EXPERTS
    counters = replay(skewed_trace(300), total, width, policy=policy)
    assert counters.read_nbytes <= total * STRIDE
    assert counters.wasted == 0


def test_equal_seeds_give_equal_reads() -> None:
    trace = skewed_trace(100)
    assert replay(trace, 20, 4) == replay(trace, 20, 4)


def fill(slots: SlotPool, keys: int) -> None:
    for key in range(keys):
        slot = slots.reclaim()
        slots.begin(slot, key)
        slots.arrive(slot)


def test_only_a_hotter_expert_takes_a_victims_slot_and_never_a_pinned_one() -> None:
    slots, policy = SlotPool(3, STRIDE), Lfu(8)
    hot = HotTier(slots, policy, reserve=1, seed=0)
    fill(slots, 3)
    for key, count in ((0, 5), (1, 3), (2, 3)):
        policy.touch(key, count)
    assert hot.consider(slots.slot_of[0])
    assert hot.consider(slots.slot_of[1])
    assert not hot.consider(slots.slot_of[2])
    policy.touch(2)
    slots.pin(slots.slot_of[1])
    assert not hot.consider(slots.slot_of[2])
    slots.unpin(slots.slot_of[1])
    assert hot.consider(slots.slot_of[2])
    assert {slots.key_of[slot] for slot in slots.hot} == {0, 2}


def test_whoever_does_not_join_is_told_so() -> None:
    slots, policy = SlotPool(4, STRIDE), Lfu(8)
    hot = HotTier(slots, policy, reserve=2, seed=0)
    fill(slots, 4)
    assert hot.settle(slots.slot_of[0]) is True
    assert hot.consider(slots.slot_of[1]) is True
    # The tier is full, and the newcomer no hotter than anybody.
    assert hot.settle(slots.slot_of[2]) is False
    assert hot.consider(slots.slot_of[2]) is False
    policy.touch(2)
    for key in (0, 1):
        slots.pin(slots.slot_of[key])
    assert hot.consider(slots.slot_of[2]) is False
    assert sorted(slots.key_of[slot] for slot in slots.hot) == [0, 1]


@pytest.mark.parametrize(
    ("reserve", "cooled"), [(0, []), (1, [2]), (3, [2, 4, 1]), (6, [2, 4, 1, 5, 3])]
)
def test_room_is_made_coldest_first(reserve: int, cooled: list[int]) -> None:
    slots, policy = SlotPool(6, STRIDE), Lfu(8)
    hot = HotTier(slots, policy, reserve=0, seed=0)
    fill(slots, 6)
    for key, count in enumerate((1, 4, 2, 9, 3, 8)):
        policy.touch(key, count)
        assert hot.settle(slots.slot_of[key])
    slots.pin(slots.slot_of[0])
    hot.reserve = reserve
    hot.make_room()
    assert [slots.key_of[slot] for slot in slots.transient] == cooled
    check_slots(slots)


def test_a_cold_slot_is_emptied_and_if_need_be_the_only_one_that_nobody_uses() -> None:
    for seed in range(5):
        slots, policy = SlotPool(30, STRIDE), Lfu(30)
        hot = HotTier(slots, policy, reserve=0, seed=seed)
        assert hot.evict() == NOWHERE
        fill(slots, 30)
        for key in range(30):
            # One in three is cold, so that a sample finds some; the others are not.
            policy.touch(key, 1 if key % 3 == 2 else 9)
            assert hot.settle(slots.slot_of[key])
        assert hot.evict() % 3 == 2
        for slot in slots.hot[:-1]:
            slots.pin(slot)
        last = slots.hot[-1]
        assert hot.evict() == last
        assert hot.evict() == NOWHERE


@given(st.integers(0, 1 << 32), st.sampled_from(["lfu", "lru"]), st.booleans())
def test_the_victim_is_the_coldest_that_nobody_uses(seed: int, name: str, fast: bool) -> None:
    """However slots joined, left and moved, and whatever scale the scores are of."""
    rng = random.Random(seed)
    memory, policy = SlotReader(12), open_policy(name, 30)
    slots = memory.slots
    hot = HotTier(slots, policy, reserve=3, seed=0)
    for _ in range(150):
        policy.tick(10_000 if fast and rng.random() < 0.1 else 1)
        if rng.random() < 0.1:
            slots.shrink(1) if rng.random() < 0.5 else slots.grow(1)
            hot.make_room()
        key = rng.randrange(30)
        slot = slots.slot_of.get(key, NOWHERE)
        if slot == NOWHERE:
            slot = slots.reclaim()
            slot = hot.evict() if slot == NOWHERE else slot
            slots.begin(slot, key)
            slots.arrive(slot)
        policy.touch(key, rng.randint(1, 3))
        if slots.hot_index[slot] == NOWHERE:
            (hot.settle if rng.random() < 0.2 else hot.consider)(slot)
        for other in rng.sample(slots.hot, rng.randint(0, min(3, len(slots.hot)))):
            slots.pin(other)
        scores = [policy.scores[slots.key_of[s]] for s in slots.hot if not slots.pins[s]]
        victim = hot.evict()
        assert (victim == NOWHERE) == (not scores)
        if victim != NOWHERE:
            evicted = [s for s in slots.hot if not slots.pins[s]]
            assert len(evicted) == len(scores) - 1
            left = sorted(policy.scores[slots.key_of[s]] for s in evicted)
            assert left == sorted(scores)[1:]
        slots.pins[:] = [0] * slots.num_slots
    check_slots(slots)


def test_a_slot_that_an_interruption_left_unlisted_is_found_when_it_is_the_last() -> None:
    slots, policy = SlotPool(3, STRIDE), Lfu(8)
    hot = HotTier(slots, policy, reserve=0, seed=0)
    fill(slots, 3)
    assert hot.settle(slots.slot_of[0])
    slots.heat(slots.slot_of[1])
    slots.pin(slots.slot_of[0])
    assert hot.evict() == 1
    assert hot.evict() == NOWHERE


def test_older_counts_fade_and_never_overflow() -> None:
    policy = Lfu(2, half_life=10)
    policy.touch(0, 3)
    policy.tick(20)
    policy.touch(1, 1)
    assert policy.prefers(1, 0)
    for _ in range(1000):
        policy.tick(20)
        policy.touch(1)
    assert policy.prefers(1, 0)
    assert np.isfinite(policy.scores).all()


def test_unknown_names_and_widths_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="lfu, lru, random"):
        open_policy("belady", 4)
    with pytest.raises(ValueError, match="cross-layer, previous, none"):
        Guesser("oracle", 6, 1, 8, 2)
    with pytest.raises(ValueError, match="from 0 to 16"):
        Guesser("previous", 17, 1, 8, 2)


@pytest.mark.parametrize(
    ("kind", "width", "candidates"),
    [
        ("cross-layer", 6, 8),
        ("cross-layer", 12, 10),
        ("cross-layer", 0, 0),
        ("cross-layer", None, 10),
        ("previous", 6, 0),
        ("previous", None, 0),
        ("none", None, 0),
    ],
)
def test_the_router_is_asked_only_for_what_the_guess_can_use(
    kind: str, width: int | None, candidates: int
) -> None:
    assert Guesser(kind, width, 1, 10, 8).candidates == candidates
