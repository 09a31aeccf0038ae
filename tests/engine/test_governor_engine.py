"""The governor of an engine that runs: slots come and go between layers, and no bit changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_tools import difference, result_of
from limit_tools import limits_of, no_limits
from small_model import CONTEXT, IDS, SMALL, needs_native, open_small

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.engine.governor import ProcessGauge
from aegis.errors import CapExceededError

MIB = 1 << 20
NEAR_NBYTES = 4 * MIB

pytestmark = pytest.mark.usefixtures("quick_open")


class Restless:
    """Room that comes and goes at every look, and slots with it."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.rng, self.changes = random.Random(seed), 0
        tiers, governor = engine._opened.tiers, engine._opened.governor
        governor._clock = lambda: float(self.rng.random() < 0.5)
        governor.watch = governor.look  # type: ignore[method-assign]
        self.tiers = tiers
        slots = tiers.slots
        # The small model's slots lie within a few ranges: let single slots go too.
        tiers.release_nbytes = lambda nbytes: self._step()  # type: ignore[method-assign]
        engine._opened.forward._watch = governor.look
        governor._gauges = [self]
        self.least = slots.num_slots

    def _step(self) -> int:
        self.changes += 1
        if self.rng.random() < 0.5:
            self.tiers.release_slots(self.rng.randrange(1, self.tiers.slots.num_slots))
        else:
            self.tiers.restore_slots()
        return 0

    def room(self) -> int:
        """Near the cap every second time."""
        return self.rng.choice([NEAR_NBYTES, 0])

    def exceeded(self) -> str:
        """Never."""
        raise AssertionError

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("step", [None, 3])
def test_giving_slots_back_between_any_layers_changes_no_bit(
    store: Store, backend: str, step: int | None
) -> None:
    from aegis.kernels import registry

    if registry.reason(backend) is not None:
        pytest.skip(str(registry.reason(backend)))
    options = {"backend": backend, "prefill_step": step, "cap": "900MiB"}
    with open_small(store, **options) as engine:
        expected = result_of(engine, IDS, 12)
    for seed in range(3):
        with open_small(store, **options) as engine:
            restless = Restless(engine, seed)
            assert difference(expected, result_of(engine, IDS, 12)) == ""
            assert restless.changes >= 10


def test_an_engine_above_its_cap_stops_with_a_sentence_and_can_go_on_later(store: Store) -> None:
    with open_small(store) as engine:
        tokens = list(engine.generate(IDS, 6, ignore_eos=True))
        gauge = engine._opened.governor._gauges[0]
        assert isinstance(gauge, ProcessGauge)
        running = engine.generate(IDS, 6, ignore_eos=True)
        got = [next(running), next(running)]
        allowed = gauge._before_nbytes
        gauge._before_nbytes -= 1 << 40
        engine._opened.governor._due = 0.0
        with pytest.raises(CapExceededError, match="nothing left to give back; use a larger cap"):
            list(running)
        assert got == tokens[:2]
        slots = engine._opened.tiers.slots
        assert slots.capacity < slots.num_slots or engine.stats.given_back.nbytes == 0
        gauge._before_nbytes = allowed
        assert list(engine.generate(IDS, 6, ignore_eos=True)) == tokens
        assert slots.capacity == slots.num_slots


def test_what_is_given_back_is_counted_and_shown(store: Store) -> None:
    with open_small(store) as engine:
        tiers, given = engine._opened.tiers, engine.stats.given_back
        before = {row.item: row.measured_nbytes for row in engine.ledger()}
        nbytes = tiers.release_nbytes(1)
        assert nbytes > 0
        assert (given.nbytes, given.most_nbytes, given.times) == (nbytes, nbytes, 1)
        assert given.slots == tiers.slots.num_slots - tiers.slots.capacity
        after = {row.item: row.measured_nbytes for row in engine.ledger()}
        assert before["slots"] is not None
        assert after["slots"] == before["slots"] - min(nbytes, before["slots"])
        assert engine.stats.as_dict()["given_back"]["nbytes"] == nbytes
        tiers.release_slots(1)
        assert given.times == 1 + (given.nbytes > nbytes)
        tiers.retake_nbytes(given.nbytes)
        assert given.times <= 2
        engine.stats.reset()
        given = engine.stats.given_back
        assert (given.slots, given.nbytes, given.most_nbytes, given.times) == (0, 0, 0, 0)


def test_every_prompt_reads_the_limits_anew_and_sees_a_container_that_became_tight(
    store: Store, tmp_path: Path
) -> None:
    with open_small(store) as engine:
        expected = list(engine.generate(IDS, 6, ignore_eos=True))
        governor = engine._opened.governor
        governor._limits = lambda: limits_of(tmp_path / "box", 100 * MIB, 98 * MIB)
        governor._limits_due = governor._due = 0.0
        assert list(engine.generate(IDS[::-1], 6, ignore_eos=True))
        assert engine.stats.given_back.times > 0
        # Still full: what was given back stays away, and the tokens are the same.
        assert list(engine.generate(IDS, 6, ignore_eos=True)) == expected
        assert engine.stats.given_back.nbytes > 0
        governor._limits = no_limits
        governor._limits_due = 0.0
        assert list(engine.generate(IDS, 6, ignore_eos=True)) == expected
        assert engine.stats.given_back.nbytes == 0


def test_what_the_governor_gave_back_is_no_room_for_logits(store: Store) -> None:
    with open_small(store) as engine:
        room = engine._room
        before = room._room()
        engine._opened.tiers.release_nbytes(1)
        assert engine.stats.given_back.nbytes > 0
        assert room._room() == before
        engine._opened.governor._limits_due = engine._opened.governor._due = 0.0
        # Room that slots gave for an array counts until the array is gone.
        kept = room.array(before // 2048 + 1, 512)
        assert room._room() > before
        del kept
        room.take_back()
        assert room._room() == before


@needs_native
def test_two_engines_in_one_process_do_not_take_from_each_other(store: Store) -> None:
    least = SMALL.num_experts_per_tok
    with open_small(store) as first, open_small(store, max_slots=least) as second:
        expected = list(first.generate(IDS, 8, ignore_eos=True))
        assert list(second.generate(IDS, 8, ignore_eos=True)) == expected
        assert list(first.generate(IDS[:5], CONTEXT // 4, ignore_eos=True))
        assert first.stats.given_back.times == second.stats.given_back.times == 0
