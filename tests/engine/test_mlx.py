"""The mlx backend computes what the others do, and the same bits in every way to run it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_tools import Result, Way, difference, prompts, result_of, store_of, ways
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_tools import NUMBERS, ON_GPU, PLENTY, mlx_options, needs_mlx
from small_model import IDS, SMALL
from strategies import Choices, checkpoint_choices, seeds

from aegis import Engine
from aegis.checkpoint.layout import ExpertBits
from aegis.checkpoint.store import Store
from aegis.convert.convert import convert
from aegis.convert.identity import embedded_path
from aegis.engine.sampling import Sampler
from aegis.errors import BackendError, UsageError
from aegis.kernels.base import Numbers
from aegis.models.base import MoeBlocks

pytestmark = [needs_mlx, pytest.mark.usefixtures("quick_open")]

GOLDENS = Path(__file__).parents[1] / "goldens"
NEW_TOKENS = 4
TOP_K, EXPERTS = SMALL.num_experts_per_tok, SMALL.num_experts
BESIDE = 4 << 30 if ON_GPU else 0
"""What the driver and its libraries take as they are first used would not fit into a cap that this
process is above with the tests' own memory."""
EVERYTHING = Way(odd_nbytes=BESIDE, options={"guess": "none"})
FEW = settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])

needs_cpu = pytest.mark.skipif(ON_GPU, reason="a GPU computes all goldens, in test_goldens.py")


COMPILE = """
import sys
from aegis import Engine
path, *numbers = sys.argv[1:]
for name in numbers:
    with Engine.open(path, cap="16GiB", backend="mlx", activations=name, context=320) as engine:
        engine.score([(7 * i + i * i) % 500 for i in range(300)], last=60)
        list(engine.generate([5, 90, 411], 30, ignore_eos=True))
"""


@pytest.fixture(scope="module")
def row_store() -> Iterator[Store]:
    """A small random model as this backend wants it."""
    with store_of(SMALL, seed=11, layout="row") as made:
        if ON_GPU:  # A process that has to compile kernels takes more than its cap.
            command = [sys.executable, "-P", "-c", COMPILE, str(made.path), *NUMBERS]
            subprocess.run(command, check=True)
        yield made


LINEAR = replace(SMALL, model_type="qwen3_next", full_attention_interval=3)
"""The same with recurrent states in two of its layers."""
LATENT = replace(SMALL, model_type="deepseek_v3", qk_norm=True, dense_layers=(0,))
"""The same with latent attention, and with a layer without experts."""


WINDOWED = replace(SMALL, model_type="gpt_oss", mxfp4=True)
"""The same with windows, sinks, biases and experts in mxfp4."""


@pytest.fixture(
    scope="module",
    params=[SMALL, LINEAR, LATENT, WINDOWED],
    ids=lambda choices: choices.model_type,
)
def each_store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A small model of each kind."""
    with store_of(request.param, seed=11, layout="row") as made:
        yield made


@st.composite
def mlx_ways(draw: st.DrawFn) -> Way:
    """Any way to run a model on this backend: its prefill step is fixed, and what the cache holds
    from before may have been computed with other shapes."""
    way = draw(ways())
    dropped = ("prefill_step", "embedding", "threads")
    options = {name: value for name, value in way.options.items() if name not in dropped}
    before = tuple(step for step in way.before if step in ("other", "score"))
    if ON_GPU:  # There caps are too large to limit slots.
        options["max_slots"] = draw(st.integers(TOP_K, SMALL.num_hidden_layers * EXPERTS))
    return replace(way, options=options, before=before, odd_nbytes=way.odd_nbytes + BESIDE)


def run(path: Path, top_k: int, way: Way, ids: list[int], **fixed: Any) -> Result:
    """Open the model this way, warm it up, let the cache forget, and ask."""
    with way.open(path, top_k, **fixed) as engine:
        way.warm_up(engine, ids)
        engine.feed([(ids[0] + 1) % 512])
        return result_of(engine, ids, NEW_TOKENS)


@pytest.mark.parametrize("numbers", NUMBERS)
@settings(FEW)
@given(plan=st.lists(mlx_ways(), min_size=2, max_size=3), ids=prompts(30))
def test_the_same_bits_in_every_way(
    each_store: Store, numbers: Numbers, plan: list[Way], ids: list[int]
) -> None:
    fixed = mlx_options(numbers)
    expected = run(each_store.path, TOP_K, EVERYTHING, ids, **fixed)
    for way in plan:
        found = difference(expected, run(each_store.path, TOP_K, way, ids, **fixed))
        assert not found, f"{way}: {found}"


@FEW
@given(checkpoint_choices(), seeds, prompts(8), st.booleans(), st.booleans())
def test_any_model_is_computed_as_by_the_reference_backend(
    choices: Choices, seed: int, ids: list[int], dense: bool, few_slots: bool
) -> None:
    choices = replace(choices, dense=dense)
    slots = {"max_slots": choices.num_experts_per_tok} if few_slots else {}
    results = []
    for layout, options in (
        ("row", mlx_options("f32", cap=PLENTY, **slots)),
        ("il16", {"backend": "reference", "cap": "300MiB", "context": 64}),
    ):
        with (
            store_of(choices, seed, layout="row" if layout == "row" else "il16") as store,
            Engine.open(store.path, **options) as engine,
        ):
            decoded = [engine.logits(engine.feed(ids))[0].copy()]
            decoded += [engine.logits(engine.feed_token(token))[0].copy() for token in ids[:3]]
            results.append(np.concatenate([engine.score(ids, last=None), decoded]))
    one, other = results
    assert np.abs(one - other).max() <= 2e-3 * other.std(), np.abs(one - other).max(axis=1)


def test_experts_of_3_bits_are_read_as_packed(row_store: Store) -> None:
    results = []
    for layout in ("row", "il16"):
        backend = "mlx" if layout == "row" else "reference"
        with (
            store_of(
                replace(SMALL, bits=(4,)),
                seed=3,
                experts3bit=True,
                layout="row" if layout == "row" else "il16",
            ) as store,
            Engine.open(
                store.path, cap=PLENTY, backend=backend, context=64, experts="3bit"
            ) as engine,
        ):
            results.append(engine.score(IDS, last=None))
    one, other = results
    tolerance = 2e-3 if not ON_GPU else 0.1
    assert np.abs(one - other).max() <= tolerance * other.std()


@pytest.mark.parametrize("numbers", NUMBERS)
def test_prompts_longer_than_a_prefill_step_do_not_depend_on_slots(
    each_store: Store, numbers: Numbers
) -> None:
    ids = [(7 * i + i * i) % 500 for i in range(300)]
    logits = []
    for slots in (None, TOP_K, 7):
        options = mlx_options(numbers, context=320, max_slots=slots)
        with Engine.open(each_store.path, cap=PLENTY, **options) as engine:
            logits.append(engine.score(ids, last=60).tobytes())
    assert logits[0] == logits[1] == logits[2]


@pytest.mark.parametrize("numbers", NUMBERS)
def test_tokens_chosen_ahead_are_the_ones_that_logits_choose(
    each_store: Store, numbers: Numbers
) -> None:
    options = mlx_options(numbers)
    with Engine.open(each_store.path, cap=PLENTY, **options) as engine:
        _fill(engine)
        ahead = list(engine.generate(IDS, 12, ignore_eos=True))
        plain, history = [], list(IDS)
        for _ in range(12):
            plain.append(int(engine.logits(engine.feed(history))[0].argmax()))
            history.append(plain[-1])
        assert ahead == plain


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_layer_as_one_call_gives_the_bits_of_its_blocks(
    each_store: Store, numbers: Numbers
) -> None:
    import mlx.core as mx

    with Engine.open(each_store.path, cap=PLENTY, **mlx_options(numbers)) as engine:
        _fill(engine)
        engine.feed(IDS)
        forward, layers = engine._opened.forward, engine._opened.decoder.layers
        with engine.turn, engine.turn.inside():
            x: Any = engine._opened.decoder.embedding(np.array([7], np.int32))
            for layer in layers:
                moe: Any = layer.mlp
                if not isinstance(moe, MoeBlocks):
                    x = moe(layer.attention(x, layer.cache, len(IDS)))
                    continue
                table = forward._table(moe.index)
                assert table is not None
                one, routing = forward._queued[moe.index](x, layer.cache, len(IDS), table)
                after = layer.attention(x, layer.cache, len(IDS))
                apart = moe.router(after, 0)
                experts = apart.experts[0]
                assert np.array_equal(routing.experts, apart.experts)
                slots = np.array(table)[experts].astype(np.int32)
                x = moe.experts(after, apart, experts, slots)
                bits = [np.array(r.astype(mx.float32)).tobytes() for r in (one, x)]
                assert bits[0] == bits[1]


def test_what_is_prepared_while_reads_are_waited_for_changes_no_bit(
    each_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aegis.kernels.mlx import experts

    expect, finish, kept = experts._Row.expect, experts._Row.finish, list[bool]()
    found = []

    def wrongly(row: Any, ids: Any, slots: Any) -> None:
        expect(row, ids, (slots + 1) % TOP_K)

    def finished(row: Any) -> Any:
        before = row._built
        out = finish(row)
        if before is not None:
            kept.append(row._built is before)
        return out

    monkeypatch.setattr(experts._Row, "finish", finished)
    for way in (lambda *ignored: None, expect, wrongly):
        monkeypatch.setattr(experts._Row, "expect", way)
        kept.clear()
        options = mlx_options("f32", max_slots=TOP_K, guess="none")
        with Engine.open(each_store.path, cap=PLENTY, **options) as engine:
            tokens = list(engine.generate(IDS, 12, ignore_eos=True))
            found.append((tokens, engine.score(IDS).tobytes()))
        if way is expect:
            assert all(kept)
            assert kept, "nothing was ever waited for"
        elif way is wrongly:
            assert not any(kept)
    assert found[0] == found[1] == found[2]


def test_experts_nobody_chose_come_too_until_no_routing_is_looked_at(row_store: Store) -> None:
    with Engine.open(row_store.path, cap=PLENTY, **mlx_options("f32")) as engine:
        tiers = engine._opened.tiers
        for _ in range(60):
            list(engine.generate(IDS[:3], 8, ignore_eos=True))
            tables = [tiers.table(layer) for layer in range(SMALL.num_hidden_layers)]
            if all(table is not None for table in tables):
                return
        raise AssertionError(tables)


def _fill(engine: Engine) -> None:
    """Have every expert in a slot."""
    for start in range(0, 480, 40):
        engine.score(list(range(start, start + 40)))
    moe = engine._opened.decoder.moe
    assert all(engine._opened.tiers.table(blocks.index) is not None for blocks in moe)
    assert all(engine._opened.forward._table(blocks.index) is not None for blocks in moe)


def test_a_token_ahead_that_nobody_wants_changes_nothing(each_store: Store) -> None:
    with Engine.open(each_store.path, cap=PLENTY, **mlx_options("f32")) as engine:
        _fill(engine)
        expected = list(engine.generate(IDS, 8, ignore_eos=True))
        engine.feed([3])
        engine.feed(IDS)
        wanted = engine.logits(engine.feed_token(77))[0].tobytes()
        engine.feed([3])
        tokens = engine.generate(IDS, 8, ignore_eos=True)
        assert next(tokens) == expected[0] != 77
        assert engine.logits(engine.feed([*IDS, 77]))[0].tobytes() == wanted
        other = engine.score(IDS[::-1])[0].tobytes()
        assert list(tokens) == expected[1:]
        assert engine.score(IDS[::-1])[0].tobytes() == other


def test_choices_are_counted_though_nobody_waited_for_them(row_store: Store) -> None:
    with Engine.open(row_store.path, cap=PLENTY, **mlx_options("f32")) as engine:
        _fill(engine)
        for count in (1, 2, 24):
            engine.feed([3])
            engine.stats.reset()
            assert len(list(engine.generate(IDS, count, ignore_eos=True))) == count
            counted = engine.stats.totals("decode")
            assert counted.hits == counted.choices == (count - 1) * SMALL.num_hidden_layers * TOP_K
        engine.feed([3])
        engine.stats.reset()
        tokens = engine.generate(IDS, 9, ignore_eos=True)
        assert len([next(tokens) for _ in range(3)]) == 3
        engine.feed([3, 4])
        layers = SMALL.num_hidden_layers
        assert engine.stats.totals("decode").choices == 2 * layers * TOP_K, "not the one ahead"


def test_a_choice_without_a_finite_logit_is_refused_as_on_other_backends(
    row_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    with Engine.open(row_store.path, cap=PLENTY, **mlx_options("f32")) as engine:
        head: Any = engine._opened.decoder.head
        nothing = mx.array(np.full((1, 512), np.nan, np.float32))
        monkeypatch.setattr(head, "_one", lambda _: nothing)
        monkeypatch.setattr(head, "_best", lambda _: mx.array([-1]))
        with pytest.raises(Exception, match="NaN"):
            engine.next_token(IDS, Sampler())


def test_a_kernel_that_does_not_compile_is_one_sentence_and_the_engine_goes_on(
    row_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aegis.kernels.mlx import device

    said = (
        'Failed to compile kernel: /usr/mma.h(55): cannot open source file "crt/mma.h"\n\n1 error'
    )

    def fail(*_: Any) -> None:
        raise RuntimeError(said)

    with Engine.open(row_store.path, cap=PLENTY, **mlx_options("f32")) as engine:
        expected = list(engine.generate(IDS, 4, ignore_eos=True))
        engine.feed([3])
        with monkeypatch.context() as patch:
            patch.setattr(device, "start", fail)
            with pytest.raises(BackendError) as caught:
                engine.next_token(IDS, Sampler())
        message = str(caught.value)
        assert message.startswith("MLX could not compile a kernel for this GPU (/usr/mma.h(55): ")
        assert "\n" not in message
        assert "1 error" not in message
        assert list(engine.generate(IDS, 4, ignore_eos=True)) == expected


def test_the_head_chooses_the_lowest_of_equal_logits_and_finds_what_is_no_number(
    row_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    with Engine.open(row_store.path, cap=PLENTY, **mlx_options("f32")) as engine:
        head: Any = engine._opened.decoder.head
        for special, expected in ((2.0, 70), (np.nan, -1), (np.inf, -1)):
            logits = np.zeros((1, 512), np.float32)
            logits[0, [70, 300, 511]] = special
            monkeypatch.setattr(head, "_products", lambda _, row=logits: mx.array(row))
            assert head._choose(mx.zeros((1, 1))).item() == expected


@pytest.mark.parametrize("slots", [None, TOP_K])
def test_any_thread_may_use_the_engine(each_store: Store, slots: int | None) -> None:
    with Engine.open(each_store.path, cap=PLENTY, **mlx_options("f32", max_slots=slots)) as engine:
        expected = list(engine.generate(IDS, 6, ignore_eos=True))
        found: list[list[int]] = []

        def work() -> None:
            hidden = engine.feed(IDS[:4])
            engine.logits(hidden)
            found.append(list(engine.generate(IDS, 6, ignore_eos=True)))

        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        hidden = engine.feed(IDS[:5])
        thread = threading.Thread(target=lambda: found.append([int(engine.logits(hidden).size)]))
        thread.start()
        thread.join()
        assert found == [expected, expected, [512]]
        assert list(engine.generate(IDS, 6, ignore_eos=True)) == expected


def test_what_is_measured_is_no_more_than_planned(each_store: Store) -> None:
    with Engine.open(each_store.path, cap=PLENTY, **mlx_options("f32", context=512)) as engine:
        engine.nll([(7 * i) % 500 for i in range(500)])
        list(engine.generate(IDS, 4, ignore_eos=True))
        rows = {row.item: row for row in engine.ledger()}
        for name in ("resident_weights", "kv_cache", "workspace", "slots"):
            measured = rows[name].measured_nbytes
            assert measured is not None
            assert 0 < measured <= rows[name].planned_nbytes, name


def test_memory_goes_back_when_the_engine_closes(each_store: Store) -> None:
    import mlx.core as mx

    before = mx.get_active_memory()
    engine = Engine.open(each_store.path, cap=PLENTY, **mlx_options("f32"))
    engine.score(IDS)
    assert mx.get_active_memory() > before + (1 << 18)
    engine.close()
    assert mx.get_active_memory() <= before + (1 << 18)
    assert mx.get_cache_memory() == 0


def test_a_prefill_step_cannot_be_chosen(row_store: Store) -> None:
    with pytest.raises(UsageError, match="in steps of"):
        Engine.open(row_store.path, cap=PLENTY, prefill_step=32, **mlx_options("f32"))


@needs_cpu
def test_a_cpu_computes_in_float32_only(row_store: Store) -> None:
    with pytest.raises(UsageError, match="--activations"):
        Engine.open(row_store.path, cap=PLENTY, **mlx_options("bf16"))


@needs_cpu
@pytest.mark.parametrize("experts", ["4bit", "3bit"])
def test_the_embedded_model_gives_the_goldens_of_its_first_steps(
    cache: Path, tmp_path: Path, experts: ExpertBits
) -> None:
    model, name = None, "golden.json"
    if experts == "3bit":
        store = convert(embedded_path(), tmp_path / "s", layout="row", experts3bit=True)
        model, name = store.path, "golden_3bit.json"
    golden = json.loads((GOLDENS / "smolmoe-135m" / name).read_text())
    case = min(golden["prompts"], key=lambda prompt: len(prompt["ids"]))
    options = mlx_options("f32", context=128, max_slots=40, experts=experts)
    with Engine.open(model, cap="1GiB", **options) as engine:
        hidden = engine.feed(case["ids"])
        for step, token in enumerate(case["greedy_ids"][:4]):
            logits = engine.logits(hidden)[0]
            assert int(logits.argmax()) == token
            wanted = case["step_top20_logits"][step]
            error = np.abs(logits[case["step_top20_ids"][step]] - wanted).max()
            assert error <= 2e-3 * case["logit_std"][step]
            hidden = engine.feed_token(token)
