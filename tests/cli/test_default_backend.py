"""What computes where nobody says what should: AEGIS_BACKEND, or what is best here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from aegis.engine.planning import settings_for
from aegis.errors import UsageError
from aegis.kernels import registry
from aegis.settings import BACKENDS, Settings, default_backend

PLAN = ("plan", "--json", "--cap", "1GiB")
RUN = ("run", "--json", "-q", "--cap", "4GiB", "-c", "64", "-n", "1", "--raw", "-p", "Hi")


def aegis(env: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that ends."""
    return subprocess.run(
        [sys.executable, "-m", "aegis", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=dict(env),
        check=False,
        timeout=300,
    )


def backend_of(env: Mapping[str, str], *arguments: str) -> str:
    """What computed."""
    done = aegis(env, *RUN, *arguments)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["backend"])


def test_every_backend_can_be_named() -> None:
    assert sorted(BACKENDS) == sorted(["auto", *registry.NAMES])


@pytest.mark.parametrize("named", [None, ""])
def test_without_the_variable_it_is_what_is_best_here(
    monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.delenv("AEGIS_BACKEND")
    if named is not None:
        monkeypatch.setenv("AEGIS_BACKEND", named)
    assert default_backend() == Settings(1).backend == "auto"


def test_the_variable_is_for_settings_that_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_BACKEND", "reference")
    assert settings_for("1GiB", {}).backend == "reference"
    assert settings_for("1GiB", {"backend": "auto"}).backend == "auto"


def test_a_wrong_one_is_refused_unless_a_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_BACKEND", "cuda")
    sentence = "AEGIS_BACKEND is 'cuda'; set it to one of auto, mlx, native, reference, or unset it"
    with pytest.raises(UsageError, match=sentence):
        settings_for("1GiB", {})
    assert settings_for("1GiB", {"backend": "native"}).backend == "native"


def test_the_option_wins_over_the_variable(command_env: dict[str, str]) -> None:
    env = command_env | {"AEGIS_BACKEND": "reference"}
    assert backend_of(env) == "reference"
    assert backend_of(env, "--backend", "auto") == registry.resolve()
    wrong = command_env | {"AEGIS_BACKEND": "cuda"}
    assert backend_of(wrong, "--backend", "reference") == "reference"


@pytest.mark.parametrize("arguments", [PLAN, RUN, ("doctor", "--no-disk")])
def test_a_wrong_variable_is_a_sentence_and_exit_code_2(
    command_env: dict[str, str], arguments: tuple[str, ...]
) -> None:
    done = aegis(command_env | {"AEGIS_BACKEND": "cuda"}, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: AEGIS_BACKEND is 'cuda'; set it to one of auto, mlx, native, reference, or unset"
        " it\n"
    )


def test_help_names_the_variable(command_env: dict[str, str]) -> None:
    for verb in ("run", "plan", "sweep"):
        help_text = aegis(command_env | {"AEGIS_BACKEND": "cuda"}, verb, "--help").stdout
        assert "[default: $AEGIS_BACKEND, or auto]" in " ".join(help_text.split())


@pytest.mark.parametrize(
    ("backend", "layout"), [("mlx", "row"), ("native", "il16"), ("reference", "il16")]
)
def test_a_model_is_converted_for_it(
    command_env: dict[str, str], tmp_path: Path, backend: str, layout: str
) -> None:
    env = command_env | {"AEGIS_BACKEND": backend}
    model = Path(__file__).parent.parent / "goldens/qwen2_moe"
    done = aegis(env, "convert", "--json", "-q", str(model), str(tmp_path / "store"))
    assert json.loads(done.stdout)["layout"] == layout
    named = aegis(
        env, "convert", "--json", "-q", "--layout", "row", str(model), str(tmp_path / "b")
    )
    assert json.loads(named.stdout)["layout"] == "row"


def test_doctor_says_what_the_default_is(command_env: dict[str, str]) -> None:
    env = command_env | {"AEGIS_BACKEND": "reference"}
    found = json.loads(aegis(env, "doctor", "--json", "-q", "--no-disk").stdout)
    assert found["default_backend"] == "reference"
