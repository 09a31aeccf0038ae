"""What tools/compare_llama.py makes of two engines' runs, without one of the two."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cgroup
import numpy as np
import pytest
from small_model import needs_native

from aegis.convert.convert import convert

TOOL = Path(__file__).parents[1] / "tools" / "compare_llama.py"
GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/compare_llama.py, which is not installed."""
    spec = importlib.util.spec_from_file_location("compare_llama", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_llama"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def case(tool: ModuleType, tmp_path: Path) -> Any:
    """A store, and a file in place of the other engine's."""
    store = convert(GOLDENS / "qwen3_5_moe", tmp_path / "store")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    ids = tmp_path / "ids"
    np.arange(20, 36, dtype=np.int32).tofile(ids)
    return tool.Case(store.path, gguf, tmp_path / "driver", ids, 4, 12, 2, 64)


def _result(said: dict[str, Any] | None, rc: int = 0, kills: int = 0) -> cgroup.Result:
    nothing = cgroup.Counters(0, 0, 0)
    text = "" if said is None else json.dumps(said)
    return cgroup.Result(rc, text, "it says why", 1 << 20, kills, None, nothing)


def test_the_first_tokens_and_the_load_do_not_count(
    tool: ModuleType, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"load_s": 9.0, "prompt_s": 0.5, "token_s": [5.0] * tool.WARM_UP + [0.25] * 4}
    monkeypatch.setattr(cgroup, "run", lambda *given, **more: _result(said))
    run = tool.measured(case, ["x"], None)
    assert run.decode_tps == 4
    assert run.prompt_tps == 8


def test_what_is_killed_is_said_and_not_tried_again(
    tool: ModuleType, case: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"load_s": 1.0, "prompt_s": 1.0, "token_s": [0.5] * 12}
    ran = []

    def run(command: list[str], *given: Any, **more: Any) -> cgroup.Result:
        ran.append(command)
        faster = said | {"token_s": [0.1] * 12}
        return {"a": _result(faster), "b": _result(said), "c": _result(None, -9, 1)}[command[0]]

    monkeypatch.setattr(cgroup, "run", run)
    tool.take_turns(case, 1 << 30, {"aegis": ["a"], "other": ["b"], "greedy": ["c"]}, 3)
    out = capsys.readouterr().out
    assert [command[0] for command in ran] == [*"abc", *"abab"]
    assert "aegis / other: decode 5.00, prompt 1.00" in out
    assert any(line.split() == ["greedy", "killed", "for", "memory"] for line in out.splitlines())
    assert "aegis / greedy" not in out


def test_read_ahead_is_put_back(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "read_ahead_kb"
    place.write_text("8192\n")
    monkeypatch.setattr(tool, "queue_of", lambda path: place)
    seen = []

    def interrupted() -> None:
        with tool.read_ahead(tmp_path, 128):
            seen.append(place.read_text())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == ["128"]
    assert place.read_text() == "8192\n"
    with tool.read_ahead(tmp_path, 0):
        assert place.read_text() == "8192\n"


def test_agreement_does_not_ask_for_the_order(tool: ModuleType) -> None:
    a = np.array([[[1, 2, 3, 4], [0, 1, 2, 3]]])
    b = np.array([[[4, 3, 9, 1], [3, 2, 1, 0]]])
    assert tool.shared(a, b).tolist() == [[0.75, 1.0]]


def test_without_a_build_the_remedy_is_named(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no libllama\.so; give a clone with"):
        tool.build(tmp_path, tmp_path)


@needs_native
def test_the_worker_tells_experts_and_logits_of_each_decoded_token(
    tool: ModuleType, case: Any, tmp_path: Path
) -> None:
    files = tmp_path / "experts", tmp_path / "logits"
    done = subprocess.run(
        tool.aegis_command(case, 1 << 30, *files), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["token_s"]) == 12
    assert said["prompt_s"] > 0
    chosen = np.fromfile(files[0], np.int32).reshape(12, 4, 3)
    assert (np.diff(chosen, axis=-1) > 0).all()
    logits = np.fromfile(files[1], np.float32).reshape(12, 512)
    alone = replace(case, prompt=0)
    again = subprocess.run(
        tool.aegis_command(alone, 1 << 30, *files), capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    every = np.fromfile(files[1], np.float32).reshape(16, 512)
    np.testing.assert_array_equal(every[4:], logits)
