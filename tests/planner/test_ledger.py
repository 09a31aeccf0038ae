"""The ledger and the tables people read."""

from aegis.planner import LedgerRow, PlanRequest, PrefillOption, make_ledger, make_plan
from aegis.planner.explain import align, explain_ledger, explain_plan

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


def test_the_plan_reads_as_an_aligned_table_with_remarks() -> None:
    assert explain_plan(make_plan(REQUEST)) == [
        "memory plan",
        "runtime            50 MiB",
        "resident weights   10 MiB",
        "KV cache            5 MiB",
        "workspace           1 MiB  prefill 16 tokens at a time",
        "hot tier           32 MiB  32 slots of 1 MiB",
        "total              98 MiB",
        "cap               100 MiB  2 MiB unused",
    ]
    one = PlanRequest(**(vars(REQUEST) | {"cap_nbytes": 70 * MIB}))
    assert explain_plan(make_plan(one))[5:7] == [
        "staging            1 MiB  1 slot, lent to the hot tier while decoding",
        "hot tier           3 MiB  3 slots of 1 MiB",
    ]


def test_nothing_is_an_empty_table_and_a_row_may_be_short_or_long() -> None:
    assert align([]) == []
    assert align([["a", "1"], ["bbb"], ["c", "22", "rest"]]) == ["a     1", "bbb", "c    22  rest"]


def test_a_ledger_row_is_an_object_of_its_fields() -> None:
    assert LedgerRow("total", 9, None).to_json() == {
        "item": "total",
        "planned_nbytes": 9,
        "measured_nbytes": None,
    }


def test_items_that_a_request_leaves_out_take_nothing() -> None:
    plan = make_plan(REQUEST)
    zero = ("embedding_rows", "recurrent_state", "logits", "io_buffers", "runtime_reserve")
    assert all(dict(plan.items)[name] == 0 for name in zero)
    assert plan.load_peak_nbytes == 0
    assert PrefillOption(16, MIB).embedding_rows_nbytes == 0


def test_a_table_on_disk_takes_the_rows_of_one_chunk() -> None:
    changes = {"embedding_nbytes": 90, "embedding": "disk", "options": [PrefillOption(16, 40, 7)]}
    items = dict(make_plan(PlanRequest(**(vars(REQUEST) | changes))).items)
    assert (items["embedding_table"], items["embedding_rows"]) == (0, 7)
    changes["embedding"] = "ram"
    items = dict(make_plan(PlanRequest(**(vars(REQUEST) | changes))).items)
    assert (items["embedding_table"], items["embedding_rows"]) == (90, 0)


def test_a_plan_that_does_not_fit_shows_the_shortage() -> None:
    refused = PlanRequest(**(vars(REQUEST) | {"cap_nbytes": 60 * MIB}))
    assert "8 MiB short" in explain_plan(make_plan(refused))[-1]
