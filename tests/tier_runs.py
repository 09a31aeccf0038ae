"""Expert tiers as an engine uses them, in any configuration, with every byte checked."""

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from tier_fakes import (
    STRIDE,
    SlotReader,
    check_slots,
)

from aegis.tiers import (
    GUESS_KINDS,
    POLICIES,
    ExpertFiles,
    ExpertTiers,
    ReadPool,
)

NUM_LAYERS = 3


@dataclass
class Setup:
    """A drawn configuration of the tiers."""

    num_experts: int
    chosen: int
    num_slots: int
    staging_slots: int
    policy: str
    guess: str
    guess_width: int | None
    seed: int


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_experts = draw(st.sampled_from([2, 5, 12]))
    chosen = draw(st.integers(1, min(4, num_experts)))
    most = NUM_LAYERS * num_experts + 2
    num_slots = draw(st.one_of(st.just(chosen), st.integers(chosen, most)))
    return Setup(
        num_experts,
        chosen,
        num_slots,
        draw(st.one_of(st.just(1), st.integers(1, num_slots))),
        draw(st.sampled_from(list(POLICIES))),
        draw(st.sampled_from(GUESS_KINDS)),
        draw(st.one_of(st.none(), st.integers(0, 16))),
        draw(st.integers(0, 1 << 32)),
    )


def open_tiers(
    files: ExpertFiles, memory: SlotReader, setup: Setup, pool: ReadPool | None
) -> ExpertTiers:
    return ExpertTiers(
        files,
        memory.slots,
        num_experts_per_tok=setup.chosen,
        staging_slots=setup.staging_slots,
        policy=setup.policy,
        guess=setup.guess,
        guess_width=setup.guess_width,
        pool=pool,
        seed=setup.seed,
    )


def decode_layer(
    tiers: ExpertTiers, memory: SlotReader, layer_index: int, chosen: list[int], ranked: list[int]
) -> None:
    """One layer as the engine does it; every expert comes once, with its own bytes."""
    with tiers.acquire(layer_index, np.array(chosen, dtype=np.int32)) as acquisition:
        delivered = memory.check(layer_index, acquisition.ready())
        tiers.guess((layer_index + 1) % NUM_LAYERS, ranked)
        while not acquisition.complete:
            delivered += memory.check(layer_index, acquisition.wait())
        assert sorted(delivered) == chosen
        assert acquisition.wait()[0].size == 0
    check_slots(memory.slots)


def prefill_layer(
    tiers: ExpertTiers,
    memory: SlotReader,
    layer_index: int,
    experts: list[int],
    next_guess: list[int] | None,
    rows: list[int] | None,
) -> None:
    delivered: list[int] = []
    for batch in tiers.prefill_layer(layer_index, experts, next_guess, rows):
        delivered += memory.check(layer_index, batch)
        check_slots(memory.slots)
    assert delivered == experts


def some_experts(rng: random.Random, num_experts: int, at_least: int = 0) -> list[int]:
    return sorted(rng.sample(range(num_experts), rng.randint(at_least, num_experts)))


def use_at_random(tiers: ExpertTiers, memory: SlotReader, setup: Setup, steps: int) -> int:
    """Prompts, tokens and shrinking in a drawn order; returns how many experts were asked for."""
    rng = random.Random(setup.seed)
    everyone = range(setup.num_experts)
    choices = 0
    for _ in range(steps):
        action = rng.choice(["token", "token", "token", "prompt", "release", "restore", "abandon"])
        if action == "token":
            for layer_index in range(NUM_LAYERS):
                chosen = sorted(rng.sample(everyone, setup.chosen))
                ranked = rng.sample(everyone, rng.randint(0, setup.num_experts))
                decode_layer(tiers, memory, layer_index, chosen, ranked)
                choices += len(chosen)
        elif action == "prompt":
            for layer_index in range(NUM_LAYERS):
                experts = some_experts(rng, setup.num_experts)
                guess = rng.choice([None, some_experts(rng, setup.num_experts)])
                rows = rng.choice([None, [rng.randint(1, 9) for _ in experts]])
                prefill_layer(tiers, memory, layer_index, experts, guess, rows)
                choices += len(experts)
            if rng.random() < 0.5:
                tiers.end_prefill()
        elif action == "release":
            if rng.random() < 0.5:
                tiers.release_nbytes(rng.randint(0, 2 * setup.num_slots * STRIDE))
            else:
                tiers.release_slots(rng.randint(0, setup.num_slots))
            assert memory.slots.capacity >= setup.chosen
        elif action == "restore":
            if rng.random() < 0.5:
                tiers.retake_nbytes(rng.randint(0, setup.num_slots * STRIDE))
            tiers.restore_slots()
            assert memory.slots.capacity == setup.num_slots
        else:
            experts = some_experts(rng, setup.num_experts, 1)
            choices += len(experts)
            visit = tiers.prefill_layer(0, experts, some_experts(rng, setup.num_experts))
            memory.check(0, next(visit))
            if rng.random() < 0.5:
                visit.close()
        check_slots(memory.slots)
    return choices
