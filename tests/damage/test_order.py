"""What is read when: headers once, and all that can be wrong before anything is converted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_model import needs_native
from strategies import write_checkpoint

from aegis import Engine, plan
from aegis.checkpoint import source
from aegis.convert import convert as conversion
from aegis.convert.cache import cached_store_path
from aegis.convert.three_bit import add_3bit
from aegis.errors import BackendError, StoreError, TokenizerError


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    return write_checkpoint(tmp_path / "m", 1, num_hidden_layers=1, num_experts=2, shards=2)


def open_and_close(folder: Path) -> None:
    Engine.open(folder, cap="300MiB", context=64).close()


def test_every_header_is_read_once_whether_converted_before_or_not(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = source.read_header

    def counted(path: Path) -> Any:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(source, "read_header", counted)
    for _ in range(2):
        read.clear()
        open_and_close(checkpoint)
        assert sorted(read) == sorted(file.name for file in checkpoint.glob("*.safetensors"))


def test_a_damaged_tokenizer_is_refused_before_anything_is_converted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("converted")

    monkeypatch.setattr(conversion, "convert", never)
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"m/tokenizer\.json"):
        open_and_close(checkpoint)


@needs_native
@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"num_attention_heads": 8, "head_dim": 8}, "its head_dim is 8, and only multiples of 16"),
        ({"num_attention_heads": 4, "head_dim": 272}, "its head_dim is 272, and only multiples"),
    ],
)
def test_sizes_without_kernels_are_refused_before_anything_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, int], said: str
) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    folder = write_checkpoint(tmp_path / "m", 1, num_hidden_layers=1, num_experts=2, **choices)
    for ask in (lambda **cap: plan(folder, context=64, **cap), lambda **cap: Engine.open(folder)):
        with pytest.raises(BackendError, match=rf"cannot compute this model: {said}.*reference"):
            ask(cap="300MiB")
    assert not (tmp_path / "cache").exists()
    with Engine.open(folder, cap="1GiB", context=64, backend="reference") as engine:
        assert len(engine.score([1, 2, 3]))


def test_3bit_experts_that_are_missing_are_named_before_anything_is_converted(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = checkpoint.rename(tmp_path / "my model")
    with pytest.raises(StoreError, match=r"3-bit experts yet; make .* --experts 3bit '/.*model''"):
        Engine.open(folder, cap="300MiB", context=64, experts="3bit")
    assert not (tmp_path / "cache").exists()
    open_and_close(folder)
    with pytest.raises(StoreError, match=r"has no 3-bit experts yet"):
        Engine.open(folder, cap="300MiB", context=64, experts="3bit")
    conversion.convert(folder, cached_store_path(folder), experts3bit=True)
    add_3bit(cached_store_path(folder))
    Engine.open(folder, cap="300MiB", context=64, experts="3bit").close()


def test_a_store_for_another_backend_is_refused_by_the_plan_too(checkpoint: Path) -> None:
    store = conversion.convert(checkpoint, checkpoint.parent / "s", layout="row")
    for ask in (plan, Engine.open):
        with pytest.raises(StoreError, match=r"has layout row, but il16 is needed"):
            ask(store.path, cap="300MiB", context=64)


@needs_native
def test_the_kernels_are_written_for_all_that_is_planned() -> None:
    """What planning says about the C++ blocks is what they say themselves."""
    from aegis.kernels.native.sizes import (
        HEAD_DIM_STEP,
        MOST_EXPERTS,
        MOST_HEAD_DIM,
        MOST_LATENT,
    )

    root = Path(__file__).parents[2] / "kernels" / "native" / "include"
    text = "".join(path.read_text() for path in sorted(root.glob("*.h")))
    found = {name: int(n) for name, n in re.findall(r"constexpr \w+ (kM\w+|kK\w+) = (\d+);", text)}
    assert found["kMaxExperts"] == MOST_EXPERTS
    assert found["kMaxHeadDim"] == MOST_HEAD_DIM
    assert found["kKeyLanes"] == HEAD_DIM_STEP
    assert (found["kMaxValueDim"], found["kMaxKeyDim"] - found["kMaxValueDim"]) == MOST_LATENT


def test_a_better_tokenizer_in_the_model_counts_at_once(checkpoint: Path, tmp_path: Path) -> None:
    open_and_close(checkpoint)
    (checkpoint / "tokenizer_config.json").write_text('{"eos_token": "nothing_else"}')
    with Engine.open(checkpoint, cap="300MiB", context=64) as engine:
        assert engine.tokenizer.special_tokens["eos_token"] == "nothing_else"


def test_copied_files_of_a_store_are_compared_before_they_are_used(
    checkpoint: Path, tmp_path: Path
) -> None:
    store = conversion.convert(checkpoint, tmp_path / "s").path
    open_and_close(store)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        damaged = Path(shutil.copytree(store, tmp_path / f"damaged-{name}"))
        content = bytearray((damaged / name).read_bytes())
        content[content.rindex(b"}")] = ord(" ")
        (damaged / name).write_bytes(content)
        with pytest.raises(StoreError, match=rf"{name} is damaged \(checksum mismatch\)"):
            open_and_close(damaged)
