"""The plan keeps its promises for every request hypothesis can think of."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.planner import (
    MemoryPlan,
    PlanRequest,
    PrefillOption,
    Surroundings,
    make_plan,
    sweep_plans,
)

MIB = 1 << 20
SIZES = st.integers(0, 4000)


@st.composite
def options(draw: st.DrawFn) -> list[PrefillOption]:
    steps = draw(st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True))
    count = len(steps)
    works = draw(st.lists(SIZES, min_size=count, max_size=count))
    rows = draw(st.lists(st.integers(0, 300), min_size=count, max_size=count))
    ladder = zip(sorted(steps), sorted(works), sorted(rows), strict=True)
    return draw(st.permutations([PrefillOption(*rung) for rung in ladder]))


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    chosen = draw(st.integers(1, 6))
    num_experts = draw(st.integers(chosen, 20))
    tied = draw(st.booleans())
    ladder = draw(options())
    return PlanRequest(
        cap_nbytes=draw(st.integers(1, 60_000)),
        runtime_nbytes=draw(SIZES),
        resident_nbytes=draw(SIZES),
        embedding_nbytes=draw(SIZES),
        kv_nbytes=draw(SIZES),
        options=ladder,
        slot_nbytes=draw(st.integers(1, 500)),
        num_moe_layers=draw(st.integers(1, 5)),
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        tied=tied,
        embedding=draw(st.sampled_from(["auto", "ram"] if tied else ["auto", "ram", "disk"])),
        prefill_step=draw(st.sampled_from([None, *(o.prefill_step for o in ladder)])),
        max_slots=draw(st.none() | st.integers(chosen, 80)),
        load_peak_nbytes=draw(st.integers(0, 8000)),
        recurrent_nbytes=draw(SIZES),
        logits_nbytes=draw(SIZES),
        io_nbytes=draw(SIZES),
        reserve_nbytes=draw(SIZES),
    )


def plan_at(request: PlanRequest, cap: int) -> MemoryPlan:
    return make_plan(replace(request, cap_nbytes=cap))


@given(requests())
def test_a_plan_that_fits_never_exceeds_the_cap(request_: PlanRequest) -> None:
    plan = make_plan(request_)
    if plan.feasible:
        assert plan.total_nbytes + plan.unused_nbytes == request_.cap_nbytes
        assert plan.load_peak_nbytes <= request_.cap_nbytes


@given(requests())
def test_the_smallest_cap_is_exact_to_the_byte(request_: PlanRequest) -> None:
    smallest = make_plan(request_).min_cap_nbytes
    assert plan_at(request_, smallest).feasible
    assert smallest == 1 or not plan_at(request_, smallest - 1).feasible


@given(requests())
def test_shortage_and_cap_make_the_smallest_cap(request_: PlanRequest) -> None:
    plan = make_plan(request_)
    assert plan.feasible == (plan.shortage_nbytes == 0)
    if not plan.feasible:
        assert plan.shortage_nbytes + plan.cap_nbytes == plan.min_cap_nbytes
        assert f"{plan.min_cap_nbytes}B" in plan.refusal()


@given(requests(), st.integers(0, 3000))
def test_a_larger_cap_never_has_fewer_slots(request_: PlanRequest, more: int) -> None:
    plan = make_plan(request_)
    larger = plan_at(request_, request_.cap_nbytes + more)
    if plan.feasible:
        assert larger.feasible
        assert larger.total_slots >= plan.total_slots
        assert larger.slots >= plan.slots


@given(requests())
def test_slots_hold_a_token_and_never_more_than_all_experts(request_: PlanRequest) -> None:
    plan = make_plan(request_)
    experts = request_.num_moe_layers * request_.num_experts
    assert request_.num_experts_per_tok <= plan.total_slots <= experts
    assert plan.total_slots <= (request_.max_slots or experts)
    if plan.total_slots == experts:
        assert plan.staging_slots == 0
    else:
        assert 1 <= plan.staging_slots <= max(1, plan.total_slots // 3)
        assert plan.staging_slots <= request_.num_experts


@given(requests())
def test_a_tied_table_is_always_in_memory(request_: PlanRequest) -> None:
    plan = make_plan(request_)
    if request_.tied or request_.embedding == "ram":
        assert plan.embedding == "ram"
    if request_.embedding == "disk":
        assert plan.embedding == "disk"


def request(**changes: object) -> PlanRequest:
    base = PlanRequest(
        cap_nbytes=200 * MIB,
        runtime_nbytes=75 * MIB,
        resident_nbytes=14 * MIB,
        embedding_nbytes=20 * MIB,
        kv_nbytes=8 * MIB,
        options=[PrefillOption(step, step * 40_000, step * 576) for step in (512, 128, 32)],
        slot_nbytes=300_000,
        num_moe_layers=30,
        num_experts=32,
        num_experts_per_tok=4,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_rest_of_the_cap_goes_to_slots() -> None:
    plan = make_plan(request())
    assert plan.unused_nbytes < plan.slot_nbytes
    assert plan.staging_slots == plan.borrowed_slots == 32
    assert dict(plan.items)["hot_tier"] == plan.slots * 300_000


def test_auto_keeps_the_table_on_disk_until_every_expert_has_a_slot() -> None:
    assert make_plan(request()).embedding == "disk"
    roomy = make_plan(request(cap_nbytes=1024 * MIB))
    assert (roomy.embedding, roomy.slots, roomy.prefill_step) == ("ram", 960, 512)


def test_a_small_cap_takes_a_small_prefill_step() -> None:
    steps = [
        plan.prefill_step
        for plan in sweep_plans(request(), [110 * MIB, 145 * MIB, 200 * MIB, 400 * MIB])
    ]
    assert steps == [32, 128, 128, 512]


def test_a_refusal_names_every_item_and_the_shortage() -> None:
    text = make_plan(request(cap_nbytes=64 * MIB, tied=True)).refusal()
    for part in ("runtime 75 MiB", "KV cache 8 MiB", "embedding table 20 MiB", "short"):
        assert part in text


def test_a_refusal_for_the_load_peak_says_so() -> None:
    plan = make_plan(request(load_peak_nbytes=300 * MIB))
    assert plan.min_cap_nbytes == 300 * MIB
    assert "opening briefly needs 300 MiB" in plan.refusal()


def test_a_plan_that_fits_has_no_refusal() -> None:
    with pytest.raises(ValueError, match="nothing to refuse"):
        make_plan(request()).refusal()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tied": True, "embedding": "disk"}, "tied"),
        ({"cap_nbytes": 0}, "cap_nbytes"),
        ({"kv_nbytes": -1}, "negative"),
        ({"num_experts": 3}, "chooses 4"),
        ({"max_slots": 3}, "max_slots"),
        ({"options": []}, "at least one"),
        ({"options": [PrefillOption(8, 9), PrefillOption(16, 8)]}, "cannot need less"),
        ({"prefill_step": 100}, "not one of 32, 128, 512"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        request(**changes)


def test_a_token_may_choose_every_expert() -> None:
    plan = make_plan(request(num_experts=4))
    assert (plan.feasible, plan.total_slots) == (True, 120)


def test_json_carries_what_a_script_needs() -> None:
    plan = make_plan(request())
    data = plan.to_json()
    assert sum(item["nbytes"] for item in data["items"]) == data["total_nbytes"]
    assert (data["slots"], data["borrowed_slots"]) == (plan.slots, plan.staging_slots)
    assert data["feasible"] is True
    assert data["min_cap_nbytes"] == plan.min_cap_nbytes


def stepped(
    cap: int, options: list[PrefillOption], place: str = "ram", chosen: int = 1
) -> MemoryPlan:
    """1000 bytes of runtime, a table of 500, and slots of 100."""
    return make_plan(
        request(
            cap_nbytes=cap,
            runtime_nbytes=1000,
            resident_nbytes=0,
            embedding_nbytes=500,
            embedding=place,
            kv_nbytes=0,
            options=options,
            slot_nbytes=100,
            num_experts_per_tok=chosen,
        )
    )


@pytest.mark.parametrize(("place", "threshold"), [("ram", 1500 + 8 * 20), ("disk", 1000 + 8 * 24)])
def test_a_larger_step_comes_when_it_takes_an_eighth(place: str, threshold: int) -> None:
    options = [PrefillOption(8, 10, 2), PrefillOption(16, 20, 4)]
    steps = [stepped(cap, options, place).prefill_step for cap in (threshold - 1, threshold)]
    assert steps == [8, 16]


def test_a_step_that_would_cost_a_slot_waits_until_it_does_not() -> None:
    # An eighth from 2700 on. The small step has eleven slots there, the large one from 2750 on.
    options = [PrefillOption(8, 10), PrefillOption(16, 150)]
    plans = [stepped(cap, options) for cap in (2699, 2700, 2749, 2750)]
    found = [(plan.prefill_step, plan.total_slots) for plan in plans]
    assert found == [(8, 11), (8, 11), (8, 11), (16, 11)]


def test_the_larger_step_comes_as_soon_as_it_fits_if_that_is_later() -> None:
    # Its eighth is there from 2700 on, the smallest plan from 2710 on, it itself from 2850 on.
    options = [PrefillOption(8, 10), PrefillOption(16, 150)]
    plans = [stepped(cap, options, chosen=12) for cap in (2709, 2710, 2849, 2850)]
    found = [(plan.feasible, plan.prefill_step, plan.total_slots) for plan in plans]
    assert found == [(False, 8, 12), (True, 8, 12), (True, 8, 12), (True, 16, 12)]


def test_of_steps_that_cost_alike_even_the_smallest_cap_takes_the_larger() -> None:
    options = [PrefillOption(8, 10), PrefillOption(16, 10)]
    assert [stepped(cap, options).prefill_step for cap in (1609, 1610)] == [8, 16]


def test_a_cap_for_the_load_peak_alone_has_slots_for_the_rest_of_it() -> None:
    plan = make_plan(request(cap_nbytes=300 * MIB, load_peak_nbytes=300 * MIB))
    assert plan.cap_nbytes == plan.min_cap_nbytes
    assert plan.unused_nbytes < plan.slot_nbytes
    # A smallest plan that takes what opening takes is short for what it is made of.
    short = request(cap_nbytes=MIB, load_peak_nbytes=plan_at(request(), 1).total_nbytes)
    assert "opening briefly" not in make_plan(short).refusal()


def test_a_table_no_larger_than_the_rows_it_would_need_stays_in_memory() -> None:
    for rows, place in ((99, "disk"), (100, "ram"), (101, "ram")):
        asked = request(embedding_nbytes=100, options=[PrefillOption(8, 8, rows)])
        assert make_plan(asked).embedding == place


def test_two_plans_are_equal_whatever_surrounds_them() -> None:
    free = Surroundings(free_nbytes=200 * MIB)
    assert make_plan(request(around=free)) == make_plan(request())


def test_a_third_of_the_slots_is_staging_until_it_holds_a_layer() -> None:
    for slots, staging in ((4, 1), (30, 10), (95, 31), (96, 32), (200, 32)):
        plan = make_plan(request(max_slots=slots, cap_nbytes=400 * MIB))
        assert (plan.total_slots, plan.staging_slots) == (slots, staging)
