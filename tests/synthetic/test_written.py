"""What a shape and a seed give: always the same bytes, which any engine can run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES
from fault_tools import contents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import expert_values, resident_values
from strategies import checkpoint_choices
from synthetic_tools import SMALL, shape_of, write_shape

from aegis import Engine, plan
from aegis.checkpoint.store import Store
from aegis.convert.three_bit import add_3bit
from aegis.convert.verify import verify
from aegis.errors import CheckpointError, UsageError
from aegis.kernels import registry
from aegis.kernels.base import Layout
from aegis.synthetic.names import is_synthetic
from aegis.synthetic.recipe import recipe
from aegis.synthetic.shapes import SHAPES
from aegis.synthetic.write import make
from aegis.text.tokenizer import Tokenizer

BACKENDS = [name for name in ("native", "reference") if registry.reason(name) is None]


@pytest.mark.parametrize("layout", ["il16", "row"])
def test_the_seed_fixes_every_byte(layout: Layout, tmp_path: Path) -> None:
    name = write_shape(tmp_path / "shape")
    one, again = (make(recipe(name), tmp_path / n, layout, experts3bit=True) for n in "ab")
    assert contents(one.path) == contents(again.path)
    other = contents(make(recipe(f"{name}@1"), tmp_path / "c", layout, experts3bit=True).path)
    same = {file for file, data in contents(one.path).items() if other[file] == data}
    assert same == {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_layouts_hold_the_same_numbers(tmp_path: Path) -> None:
    made = recipe(write_shape(tmp_path / "shape"))
    one, other = (make(made, tmp_path / n, n, experts3bit=True) for n in ("il16", "row"))
    for values in (expert_values, lambda s: expert_values(s, "3bit"), resident_values):
        first, second = values(one), values(other)
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[key], second[key]) for key in first)


def test_3bit_experts_are_those_that_conversion_derives(tmp_path: Path) -> None:
    made = recipe(write_shape(tmp_path / "shape"))
    at_once = make(made, tmp_path / "a", "il16", experts3bit=True)
    later = make(made, tmp_path / "b", "il16")
    assert not later.has_3bit
    derived = contents(add_3bit(later.path).path)
    assert contents(at_once.path) == derived
    third = make(made, tmp_path / "c", "il16")
    assert contents(make(made, third.path, "il16", experts3bit=True).path) == derived


@pytest.mark.parametrize("layout", ["il16", "row"])
def test_what_is_written_verifies_and_is_what_the_plan_says(layout: Layout, tmp_path: Path) -> None:
    made = recipe(write_shape(tmp_path / "shape"))
    done: list[tuple[int, int]] = []
    store = make(
        made,
        tmp_path / "store",
        layout,
        experts3bit=True,
        progress=lambda now, total: done.append((now, total)),
    )
    assert verify(store).ok
    assert store.layout == made.layout(layout)
    assert (tmp_path / "store" / "tokenizer.json").stat().st_size == made.tokenizer_nbytes
    assert done == sorted(done)
    assert done[-1][0] == done[-1][1]


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_familys_config_gives_a_store_that_runs_alike_at_every_cap(
    model_type: str, data: st.DataObject
) -> None:
    choices = data.draw(checkpoint_choices(model_type=model_type, bits=(4,), dense_router=False))
    ids = data.draw(st.lists(st.integers(0, 511), min_size=2, max_size=12))
    with tempfile.TemporaryDirectory() as folder:
        made = recipe(shape_of(Path(folder) / "shape", choices))
        store = make(made, Path(folder) / "store", "il16")
        for backend in BACKENDS:
            options = {"backend": backend, "context": 64}
            low = plan(store.path, cap=1, **options).min_cap_nbytes
            of_backend = []
            for cap in (low, "1GiB"):
                with Engine.open(store.path, cap=cap, **options) as engine:
                    of_backend.append(engine.score(ids))
            assert np.isfinite(of_backend[0]).all()
            assert of_backend[0].tobytes() == of_backend[1].tobytes()
            assert 0 < of_backend[0].std() < 100


@pytest.mark.parametrize("name", SHAPES)
def test_every_known_shape_has_a_layout_and_a_plan(name: str) -> None:
    made = recipe(f"synthetic:{name}")
    layout = made.layout("il16")
    gate = layout.resident[f"layers.{layout.moe_layers[0]}.mlp.gate"].format.bits
    assert gate == (4 if name.startswith("olmoe") else 8)
    assert {segment.format.bits for segment in layout.experts.segments.values()} == {4}
    assert plan(f"synthetic:{name}", cap="64GiB", backend="reference").total_nbytes > 1 << 30


def test_the_35b_shape_has_the_published_sizes() -> None:
    made = recipe("synthetic:qwen3.6-35b-a3b")
    layout = made.layout("il16")
    assert len(layout.moe_layers) * layout.num_experts == 10240
    assert layout.experts.record_nbytes == 1769472
    assert made.description.shape.vocab_size == 248320
    assert len(made.description.shape.delta_layers) == 30
    assert 1.2 * 2**30 < layout.resident_nbytes() < 1.4 * 2**30
    # Near 200 MiB while it is loaded.
    assert 16_000_000 < made.tokenizer_nbytes < 22_000_000


@pytest.mark.parametrize("vocab_size", [100, 259, 512, 5000])
def test_the_tokenizer_has_the_vocabulary_and_encodes_every_text(
    vocab_size: int, tmp_path: Path
) -> None:
    config = SMALL | {"text_config": SMALL["text_config"] | {"vocab_size": vocab_size}}
    store = make(recipe(write_shape(tmp_path / "shape", config)), tmp_path / "store", "il16")
    tokenizer = Tokenizer.open(store.path)
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.eos_token_ids == {vocab_size - 1}
    text = "Why is the sky blue?\n \t é 🎉 12"
    ids = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert all(0 <= token < vocab_size for token in ids)
    if vocab_size > 258:
        said = tokenizer.decode(ids, skip_special_tokens=False)
        expected = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert said == expected


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("synthetic:", UsageError, "there is no shape '';"),
        ("synthetic:gpt-5", UsageError, "there is no shape 'gpt-5'; choose one of qwen3.6-35b"),
        ("synthetic:gone/config.json", UsageError, "there is no shape 'gone/config.json'"),
        ("synthetic:bad.json", CheckpointError, "lacks model_type"),
        ("synthetic:bert.json", CheckpointError, "model_type 'bert' is not supported"),
        ("synthetic:small.json", CheckpointError, "lacks vocab_size"),
    ],
)
def test_what_is_no_shape_is_refused(
    name: str, error: type[Exception], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{}")
    Path("bert.json").write_text('{"model_type": "bert", "vocab_size": 512}')
    Path("small.json").write_text('{"model_type": "olmoe"}')
    assert is_synthetic(name)
    with pytest.raises(error, match=match):
        recipe(name)


def test_a_seed_behind_an_at_sign_is_one(tmp_path: Path) -> None:
    name = write_shape(tmp_path / "me@home")
    assert recipe(name).seed == 0
    assert recipe(f"{name}@12").seed == 12
    assert recipe("synthetic:olmoe-1b-7b@3").identity != recipe("synthetic:olmoe-1b-7b").identity


def test_a_store_keeps_the_seed_that_it_was_made_from(tmp_path: Path) -> None:
    name = write_shape(tmp_path / "shape") + "@7"
    store = Store.open(make(recipe(name), tmp_path / "store", "il16").path)
    assert store.manifest.source == {"name": name, "identity": recipe(name).identity}
    assert json.loads((store.path / "config.json").read_text())["quantization"]["bits"] == 4
