"""The tool that gives a store's weights to mlx-lm gives it the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mlx_tools import needs_mlx

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.convert.convert import convert
from aegis.errors import AegisError

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests/goldens"
IDS = [7, 300, 41, 5, 5, 120, 9]


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@needs_mlx
def test_mlx_lm_computes_the_stores_logits(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    import mlx.core as mx
    from store_in_mlx_lm import load

    store: Store = convert(GOLDENS / "qwen3_5_moe", tmp_path / "s", layout="row")
    model = load(store, mx.float32)
    found = np.array(model(mx.array([IDS]))[0].astype(mx.float32))
    options = {"backend": "mlx", "activations": "f32", "context": 64}
    with Engine.open(store.path, cap="16GiB", **options) as engine:
        expected = engine.score(IDS, last=None)
    assert np.abs(found - expected).max() <= 2e-3 * expected.std()


@needs_mlx
def test_another_family_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    from store_in_mlx_lm import load

    store = convert(GOLDENS / "qwen3_moe", tmp_path / "s", layout="row")
    with pytest.raises(AegisError, match="only qwen3_5_moe in layout row"):
        load(store)
