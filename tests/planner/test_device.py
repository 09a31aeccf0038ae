"""A GPU with memory of its own: one cap for host and device, or one for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aegis.planner import DeviceShare, MemoryPlan, PlanRequest, PrefillOption, Surroundings
from aegis.planner import make_plan as plan_request
from aegis.planner.explain import explain_plan
from aegis.planner.footprint import DEVICE_ITEMS

MIB = 1 << 20
SIZES = st.integers(1, 900 * MIB)


def request(
    cap: int,
    device_cap: int | None = None,
    ceiling: int | None = None,
    host_ceiling: int | None = None,
) -> PlanRequest:
    """70 MiB on the host, 150 MiB and experts of 600 MiB on the device."""
    around = Surroundings(ceiling_nbytes=ceiling, ceiling="the GPU's memory", cap="device cap")
    return PlanRequest(
        cap_nbytes=cap,
        runtime_nbytes=60 * MIB,
        resident_nbytes=30 * MIB,
        embedding_nbytes=20 * MIB,
        kv_nbytes=6 * MIB,
        options=[PrefillOption(32, 14 * MIB)],
        slot_nbytes=MIB,
        num_moe_layers=20,
        num_experts=30,
        num_experts_per_tok=4,
        tied=True,
        reserve_nbytes=10 * MIB,
        around=Surroundings(ceiling_nbytes=host_ceiling),
        device=DeviceShare(80 * MIB, device_cap, around),
    )


def parts(plan: MemoryPlan) -> tuple[int, int]:
    """What lies on the host and on the device."""
    device = sum(nbytes for name, nbytes in plan.items if name in DEVICE_ITEMS)
    return sum(nbytes for _, nbytes in plan.items) - device, device


@given(SIZES, SIZES, st.none() | SIZES, st.none() | SIZES)
def test_each_side_is_under_its_own_cap(
    cap: int, device_cap: int, ceiling: int | None, host_ceiling: int | None
) -> None:
    plan = plan_request(request(cap, device_cap, ceiling, host_ceiling))
    host, device = parts(plan)
    assert (plan.host_nbytes, plan.device_nbytes) == (host, device)
    assert plan.device is not None
    assert (plan.min_cap_nbytes, plan.device.min_cap_nbytes) == (70 * MIB, 154 * MIB)
    fits = cap >= 70 * MIB and device_cap >= 154 * MIB
    exists = device <= (ceiling or device) and host <= (host_ceiling or host)
    assert plan.feasible == (fits and exists)
    if plan.feasible:
        assert (host, plan.total_slots) == (70 * MIB, min(600, (device_cap - 150 * MIB) // MIB))
        assert plan.unused_nbytes == cap - host
        assert plan.unused_device_nbytes == device_cap - device >= 0
    else:
        assert plan.refusal().count("does not fit") == (cap < 70 * MIB) + (device_cap < 154 * MIB)
    assert any("device cap" in line for line in explain_plan(plan))


@given(SIZES, st.none() | st.integers(154 * MIB, 900 * MIB))
@example(500 * MIB, 300 * MIB)
@example(500 * MIB, 154 * MIB)
@example(224 * MIB - 1, None)
def test_one_cap_is_for_both_and_slots_end_with_the_devices_memory(
    cap: int, ceiling: int | None
) -> None:
    plan = plan_request(request(cap, None, ceiling))
    host, device = parts(plan)
    assert plan.min_cap_nbytes == 224 * MIB
    assert plan.feasible == (cap >= 224 * MIB)
    if plan.feasible:
        room = min(cap - 220 * MIB, (ceiling or 900 * MIB) - 150 * MIB)
        assert plan.total_slots == min(600, room // MIB)
        assert host + device <= cap
        assert device <= (ceiling or device)
    assert plan.unused_device_nbytes == plan.device_shortage_nbytes == 0
    assert plan.device is not None
    assert plan.device.min_cap_nbytes == 154 * MIB


@pytest.mark.parametrize(
    ("device_cap", "unused", "words"),
    [
        (200 * MIB + 300 * 1024, 300 * 1024, "200.3 MiB  300 KiB unused"),
        (760 * MIB, 10 * MIB, "760 MiB  10 MiB unused"),
    ],
)
def test_what_a_device_cap_leaves_is_less_than_a_slot_or_behind_the_last_expert(
    device_cap: int, unused: int, words: str
) -> None:
    plan = plan_request(request(100 * MIB, device_cap))
    assert plan.unused_device_nbytes == unused
    assert explain_plan(plan)[-1] == f"device cap        {words}"


def test_refusals_name_the_side_that_is_short_and_the_smallest_caps() -> None:
    device = plan_request(request(100 * MIB, 100 * MIB)).refusal()
    assert device.startswith("the plan does not fit the device cap of 100 MiB: device runtime 80")
    assert device.endswith(f"54 MiB short; the smallest device cap that opens is {154 * MIB}B")
    assert "reserve" not in device
    host = plan_request(request(50 * MIB, 200 * MIB)).refusal()
    assert host.startswith("the plan does not fit the cap of 50 MiB on the host: runtime 60 MiB")
    assert host.endswith(f"20 MiB short; the smallest cap that opens is {70 * MIB}B")
    assert "KV cache" not in host
    together = plan_request(request(200 * MIB)).refusal()
    assert "device runtime 80 MiB" in together
    assert "runtime reserve 10 MiB" in together


def test_a_device_that_is_too_small_is_named() -> None:
    small = plan_request(request(900 * MIB, None, 120 * MIB))
    assert not small.feasible
    assert small.refusal() == (
        "the plan takes 154 MiB, but the GPU's memory ends at 120 MiB; even the smallest device"
        f" cap that opens, {154 * MIB}B, is above it, so use a shorter context"
    )
    assert small.device_shortfall == "34 MiB above the GPU's memory"
    assert explain_plan(small)[-1].endswith("34 MiB above the GPU's memory")
    large = plan_request(request(900 * MIB, 700 * MIB, 300 * MIB))
    assert f"use a device cap of at most {300 * MIB}B" in large.refusal()
    warned = plan_request(request(900 * MIB, 900 * MIB, 800 * MIB))
    assert warned.feasible
    assert "device cap of 900 MiB is above the GPU's memory" in warned.warnings[0]


@pytest.mark.parametrize("device_cap", [None, 700 * MIB])
def test_a_host_that_is_too_small_is_named_whatever_the_device_has(device_cap: int | None) -> None:
    plan = plan_request(request(900 * MIB, device_cap, None, 69 * MIB))
    assert not plan.feasible
    assert plan.refusal().startswith("the plan takes 70 MiB, but this machine's memory ends at 69")
    assert plan_request(request(900 * MIB, device_cap, None, 70 * MIB)).feasible


def test_the_smallest_caps_of_both_sides_open_together() -> None:
    plan = plan_request(request(70 * MIB, 154 * MIB))
    assert plan.feasible
    assert plan.unused_nbytes == plan.unused_device_nbytes == 0
    assert plan.shortfall == plan.device_shortfall == ""
    alone = plan_request(replace(request(400 * MIB), device=None))
    assert (alone.device_nbytes, alone.device_shortfall) == (0, "")


def test_what_is_free_on_the_device_is_warned_of_to_the_byte() -> None:
    asked = request(900 * MIB, 300 * MIB)
    assert asked.device is not None
    for free, warnings in ((300 * MIB, 0), (300 * MIB - 1, 1)):
        around = Surroundings(free_nbytes=free, cap="device cap")
        plan = plan_request(replace(asked, device=replace(asked.device, around=around)))
        assert len(plan.warnings) == warnings
        # What surrounds a plan does not make it another one.
        assert plan == plan_request(asked)


def test_the_plan_is_a_table_with_each_side_and_its_cap() -> None:
    assert explain_plan(plan_request(request(100 * MIB, 200 * MIB)))[-6:] == [
        "hot tier           34 MiB  34 slots of 1 MiB",
        "total             270 MiB",
        "on the host        70 MiB",
        "cap               100 MiB  30 MiB unused",
        "on the device     200 MiB",
        "device cap        200 MiB  0 B unused",
    ]
    assert explain_plan(plan_request(request(60 * MIB, 100 * MIB)))[-4:] == [
        "on the host        70 MiB",
        "cap                60 MiB  10 MiB short of the smallest that opens",
        "on the device     154 MiB",
        "device cap        100 MiB  54 MiB short of the smallest that opens",
    ]
    together = explain_plan(plan_request(request(400 * MIB)))[-1]
    assert together == "cap               400 MiB  0 B unused"


def test_the_plan_as_json_says_what_the_device_holds() -> None:
    for device_cap in (None, 300 * MIB):
        plan = plan_request(request(400 * MIB, device_cap))
        found = plan.to_json()
        assert found["device_cap_nbytes"] == device_cap
        assert found["min_device_cap_nbytes"] == (None if device_cap is None else 154 * MIB)
        sizes = {item["name"]: item["nbytes"] for item in found["items"]}
        assert sum(sizes[name] for name in found["device_items"]) == found["device_nbytes"]
    alone = plan_request(replace(request(400 * MIB), device=None)).to_json()
    assert not [name for name in alone if "device" in name]


def test_an_embedding_table_that_stays_on_disk_has_its_rows_on_the_host() -> None:
    option = PrefillOption(32, 14 * MIB, embedding_rows_nbytes=5 * MIB)
    asked = replace(request(200 * MIB, 200 * MIB), tied=False, options=[option])
    plan = plan_request(asked)
    assert plan.embedding == "disk"
    assert parts(plan) == (75 * MIB, 200 * MIB)
    assert plan.min_cap_nbytes == 75 * MIB


def test_no_runtime_is_less_than_nothing() -> None:
    DeviceShare(0, 1)
    with pytest.raises(ValueError, match="runtime_nbytes is -1: it cannot be negative"):
        DeviceShare(-1)


@pytest.mark.parametrize("nbytes", [0, -5])
def test_a_device_cap_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="device_cap_nbytes"):
        DeviceShare(MIB, nbytes)
