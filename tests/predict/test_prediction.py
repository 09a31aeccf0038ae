"""What is predicted follows from slots, disk and times as it must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_tools import traces
from synthetic_tools import layout_of

from aegis.planner import MemoryPlan
from aegis.predict.cut import Sizes
from aegis.predict.prediction import Prediction, predict, slower, times_of
from aegis.predict.probe import Kernels, Probe
from aegis.synthetic.recipe import recipe
from aegis.synthetic.shapes import SHAPES
from aegis.synthetic.shipped import shipped_trace
from aegis.tiers.replay import replay
from aegis.tiers.simulate import Times
from aegis.tiers.trace import RoutingTrace
from aegis.tiers.virtual_disk import Disk

RECORD = 8192
TIMES = Times(layer_s=4e-3, shared_s=1e-3, expert_s=5e-4, head_s=1e-2, read_s=1e-4)
KERNELS = Kernels(1e-3, 2e-3, 3e-3, 1e-4, 8e-4, 5e-3, 2e-4)
EQUAL = 1 + 1e-9


def plan(slots: int, staging: int = 0) -> MemoryPlan:
    return MemoryPlan(
        cap_nbytes=1 << 30,
        feasible=True,
        items=(),
        slots=slots,
        staging_slots=staging,
        slot_nbytes=RECORD,
        prefill_step=64,
        embedding="ram",
        min_cap_nbytes=1 << 30,
        load_peak_nbytes=0,
    )


def predicted(
    trace: RoutingTrace, slots: int, disk: Disk, kernels: Kernels = KERNELS, guess: str = "none"
) -> Prediction:
    return predict(plan(slots), TIMES, kernels, disk, trace, RECORD, guess=guess)


@given(traces(), st.integers(1, 60), st.floats(1e4, 1e9), st.floats(1, 1e3), st.floats(0, 0.01))
def test_a_faster_disk_never_predicts_slower(
    trace: RoutingTrace, slots: int, rate: float, faster: float, latency: float
) -> None:
    slow = predicted(trace, slots, Disk(rate, latency))
    fast = predicted(trace, slots, Disk(rate * faster, latency))
    assert fast.tokens_per_s * EQUAL >= slow.tokens_per_s
    assert fast.simulated.counters.hits == slow.simulated.counters.hits


@given(traces(), st.floats(1e4, 1e9))
def test_with_a_slot_for_every_expert_only_computing_takes_time(
    trace: RoutingTrace, rate: float
) -> None:
    _, layers, per_token = trace.shape
    every = layers * trace.num_experts
    found = predicted(trace, every + 32, Disk(rate), replace(KERNELS, slower=3, slower_busy=0.5))
    said = found.to_json()
    assert said["hit_rate"] == 1
    assert said["wait_s"] == said["read_nbytes_per_token"] == 0
    assert said["s_per_token"] == pytest.approx(TIMES.token_s(layers, per_token))


@pytest.mark.parametrize("guess", ["none", "cross-layer"])
def test_a_larger_cap_never_predicts_slower(guess: str) -> None:
    trace = shipped_trace("embedded")
    assert trace is not None
    disk = Disk(5e6, 1e-4)
    speeds = [
        predicted(trace, slots, disk, guess=guess).tokens_per_s
        for slots in (8, 40, 100, 200, 320, 480)
    ]
    assert speeds == sorted(speeds)


@given(traces(), st.integers(1, 60), st.integers(0, 9), st.sampled_from(["lfu", "lru"]))
def test_hits_are_those_of_a_replay(
    trace: RoutingTrace, slots: int, staging: int, policy: str
) -> None:
    found = predict(
        plan(slots, staging), TIMES, KERNELS, Disk(1e6), trace, RECORD, policy=policy, guess="none"
    )
    again = replay(trace.twice(), slots + staging, policy=policy, skip=trace.shape[0])
    assert found.to_json()["hit_rate"] == again.hit_rate
    assert found.simulated.counters.misses == again.misses


def test_blocks_are_slower_as_far_as_reads_are_under_way() -> None:
    kernels = replace(KERNELS, slower=1.5, slower_busy=0.5)
    assert slower(TIMES, kernels, 0.0) == TIMES
    half, whole = slower(TIMES, kernels, 0.25), slower(TIMES, kernels, 0.9)
    assert half.layer_s == pytest.approx(1.25 * TIMES.layer_s)
    assert whole.expert_s == pytest.approx(1.5 * TIMES.expert_s)
    assert whole.read_s == TIMES.read_s
    assert slower(TIMES, KERNELS, 1.0) == TIMES


def test_every_kind_of_layer_counts_as_often_as_the_model_has_it() -> None:
    """30 layers with DeltaNet, 10 with attention; the head has 4 times the rows that ran."""
    layout = recipe("synthetic:qwen3.6-35b-a3b").layout("il16")
    probe = Probe(KERNELS, Disk(1e9), Sizes(4, 256, 248320 // 4), own_files=False)
    times = times_of(layout, probe, "4bit")
    assert times.head_s == pytest.approx(4 * KERNELS.head_s)
    before = (30 * KERNELS.delta_s + 10 * KERNELS.attention_s) / 40
    assert times.layer_s == pytest.approx(before + KERNELS.between_s + KERNELS.router_s)
    assert times.shared_s + 8 * times.expert_s == pytest.approx(KERNELS.experts_s)
    # A shared expert as large as a routed one, and its gate.
    assert times.shared_s == pytest.approx(times.expert_s, rel=0.03)
    few = times_of(layout, replace(probe, sizes=Sizes(4, 32, 248320 // 4)), "4bit")
    rows_s = times.head_s / 248320
    assert few.layer_s - times.layer_s == pytest.approx(2 * (256 - 32) * rows_s)


def test_layers_without_experts_are_outside_of_the_others(tmp_path: Path) -> None:
    raw = SHAPES["qwen3-30b-a3b"] | {"mlp_only_layers": [0, 1, 2], "num_hidden_layers": 12}
    layout = layout_of(tmp_path / "shape", raw)
    probe = Probe(KERNELS, Disk(1e9), Sizes(4, 128, 151936), own_files=False)
    times = times_of(layout, probe, "4bit")
    outside = KERNELS.attention_s + KERNELS.between_s + KERNELS.mlp_s
    assert times.head_s == pytest.approx(KERNELS.head_s + 3 * outside)
    assert times.shared_s == 0
    whole = 9 * (KERNELS.attention_s + KERNELS.between_s + KERNELS.router_s + KERNELS.experts_s)
    assert times.token_s(9, 8) == pytest.approx(times.head_s + whole)


def test_the_disk_beside_computing_is_what_is_left_of_it() -> None:
    probe = Probe(replace(KERNELS, disk_left=0.25), Disk(8e8, 1e-4, 3), Sizes(1, 1, 1), True)
    assert probe.computing_disk == Disk(2e8, 1e-4, 3)
    assert probe.to_json()["disk"]["nbytes_per_s"] == 8e8
