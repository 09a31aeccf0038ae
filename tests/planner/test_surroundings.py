"""A plan knows what machine and container allow: it is refused or it warns, and says why."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from aegis.planner import PlanRequest, PrefillOption, Surroundings, make_plan
from aegis.planner.explain import explain_plan

MIB = 1 << 20
SIZE = st.none() | st.integers(1, 2000 * MIB)


def request(cap_mib: int, **around: int | str | None) -> PlanRequest:
    """A model whose experts take 600 MiB, and 110 MiB for everything else."""
    surroundings = Surroundings(**around)  # type: ignore[arg-type]
    return PlanRequest(
        cap_nbytes=cap_mib * MIB,
        runtime_nbytes=60 * MIB,
        resident_nbytes=30 * MIB,
        embedding_nbytes=0,
        kv_nbytes=6 * MIB,
        options=[PrefillOption(32, 4 * MIB)],
        slot_nbytes=MIB,
        num_moe_layers=20,
        num_experts=30,
        num_experts_per_tok=4,
        reserve_nbytes=10 * MIB,
        around=surroundings,
    )


@given(st.integers(1, 1000), SIZE, SIZE)
def test_a_plan_fits_if_the_cap_suffices_and_what_it_takes_exists(
    cap_mib: int, ceiling: int | None, free: int | None
) -> None:
    plan = make_plan(request(cap_mib, ceiling_nbytes=ceiling, free_nbytes=free))
    alone = make_plan(request(cap_mib))
    assert (plan.items, plan.min_cap_nbytes) == (alone.items, alone.min_cap_nbytes)
    exists = ceiling is None or plan.total_nbytes <= ceiling
    assert plan.feasible == (alone.feasible and exists)
    assert alone.warnings == ()
    if not plan.feasible:
        assert plan.warnings == ()
        assert plan.refusal()
        assert plan.shortfall
    else:
        above = ceiling is not None and plan.cap_nbytes > ceiling
        scarce = free is not None and plan.total_nbytes - 10 * MIB > free
        assert len(plan.warnings) == above + scarce


@given(st.integers(150, 1000), st.integers(114 * MIB, 2000 * MIB))
@example(500, 114 * MIB)
def test_the_cap_that_a_refusal_suggests_opens(cap_mib: int, ceiling: int) -> None:
    plan = make_plan(request(cap_mib, ceiling_nbytes=ceiling))
    if not plan.feasible:
        assert f"at most {ceiling}B" in plan.refusal()
        suggested = replace(request(1, ceiling_nbytes=ceiling), cap_nbytes=ceiling)
        assert make_plan(suggested).feasible


def test_a_refusal_names_the_container_and_what_to_do() -> None:
    plan = make_plan(request(500, ceiling_nbytes=300 * MIB, ceiling="this container's memory"))
    assert plan.refusal() == (
        "the plan takes 500 MiB, but this container's memory ends at 300 MiB;"
        f" use a cap of at most {300 * MIB}B"
    )
    assert plan.shortfall == "200 MiB above this container's memory"
    assert "200 MiB above this container's memory" in explain_plan(plan)[-1]


def test_a_plan_may_take_all_that_there_is_and_not_a_byte_more() -> None:
    assert make_plan(request(500, ceiling_nbytes=500 * MIB)).feasible
    assert not make_plan(request(500, ceiling_nbytes=500 * MIB - 1)).feasible


def test_where_no_cap_would_open_the_refusal_does_not_suggest_one() -> None:
    refusal = make_plan(request(500, ceiling_nbytes=80 * MIB)).refusal()
    assert f"even the smallest cap that opens, {114 * MIB}B, is above it" in refusal
    assert refusal.endswith("is above it, so use a shorter context")
    assert "at most" not in refusal


def test_a_cap_beyond_the_container_is_worth_a_word_where_the_plan_fits() -> None:
    plan = make_plan(request(4000, ceiling_nbytes=1000 * MIB, ceiling="this container's memory"))
    assert plan.feasible
    (warning,) = plan.warnings
    assert "the cap of 3.9 GiB is above this container's memory, which ends at 1000 MiB" in warning
    assert explain_plan(plan)[-1] == f"warning: {warning}"
    data = plan.to_json()
    assert (data["warnings"], data["ceiling_nbytes"]) == ([warning], 1000 * MIB)


def test_little_free_memory_is_worth_a_word_but_no_refusal() -> None:
    plan = make_plan(request(400, free_nbytes=300 * MIB))
    assert plan.feasible
    (warning,) = plan.warnings
    assert "only 300 MiB are free now" in warning
    assert make_plan(request(400, free_nbytes=390 * MIB)).warnings == ()
