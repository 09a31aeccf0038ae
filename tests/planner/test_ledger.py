"""The ledger and the tables people read."""

from aegis.planner import LedgerRow, PlanRequest, PrefillOption, make_ledger, make_plan
from aegis.planner.explain import explain_ledger, explain_plan

MIB = 1 << 20
REQUEST = PlanRequest(
    cap_nbytes=100 * MIB,
    runtime_nbytes=50 * MIB,
    resident_nbytes=10 * MIB,
    embedding_nbytes=0,
    kv_nbytes=5 * MIB,
    options=[PrefillOption(16, MIB)],
    slot_nbytes=MIB,
    num_moe_layers=4,
    num_experts=8,
    num_experts_per_tok=2,
)


def test_the_ledger_has_every_planned_item_and_hides_nothing_measured() -> None:
    rows = make_ledger(
        [("runtime", 50), ("kv_cache", 5)],
        {"runtime": 48, "surprise": 3},
        total_nbytes=60,
        peak_nbytes=55,
    )
    assert rows == [
        LedgerRow("runtime", 50, 48),
        LedgerRow("kv_cache", 5, None),
        LedgerRow("surprise", 0, 3),
        LedgerRow("total", 60, 55),
    ]


def test_items_measured_together_are_one_row_at_the_place_of_the_first() -> None:
    rows = make_ledger(
        [("staging", 2), ("kv_cache", 5), ("hot_tier", 8)],
        {"slots": 10, "kv_cache": 5},
        total_nbytes=60,
        peak_nbytes=55,
        together={"slots": ("staging", "hot_tier")},
    )
    assert rows[:2] == [LedgerRow("slots", 10, 10), LedgerRow("kv_cache", 5, 5)]


def test_the_ledger_reads_as_aligned_text() -> None:
    lines = explain_ledger([LedgerRow("kv_cache", 5 * MIB, None), LedgerRow("total", 9 * MIB, MIB)])
    assert lines == [
        "ledger    planned  measured",
        "KV cache    5 MiB         -",
        "total       9 MiB     1 MiB",
    ]


def test_the_plan_shows_only_items_that_take_memory() -> None:
    text = "\n".join(explain_plan(make_plan(REQUEST)))
    assert "hot tier" in text
    assert "100 MiB" in text
    assert "recurrent state" not in text


def test_a_plan_that_does_not_fit_shows_the_shortage() -> None:
    refused = PlanRequest(**(vars(REQUEST) | {"cap_nbytes": 60 * MIB}))
    assert "8 MiB short" in explain_plan(make_plan(refused))[-1]
