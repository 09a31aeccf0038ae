"""What is installed: one import name, the embedded model, one version."""

import importlib.metadata
import importlib.resources
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


@pytest.fixture(scope="module")
def distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("aegis-moe")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("aegis runs from a source tree here, not from an installed distribution")


def test_the_only_import_name_is_aegis(distribution: importlib.metadata.Distribution) -> None:
    tops = {path.parts[0] for path in distribution.files or [] if path.suffix == ".py"}
    editable = {top for top in tops if top.startswith("_") and "editable" in top}
    assert tops - editable <= {"aegis"}


def test_the_version_is_said_once(distribution: importlib.metadata.Distribution) -> None:
    import aegis

    project = tomllib.loads(PROJECT.read_text())["project"]
    assert aegis.__version__ == distribution.version == project["version"]


def test_the_command_and_the_licence_are_part_of_it(
    distribution: importlib.metadata.Distribution,
) -> None:
    scripts = {entry.name: entry.value for entry in distribution.entry_points}
    assert scripts == {"aegis": "aegis.cli:main"}
    assert distribution.metadata["License-Expression"] == "Apache-2.0"


def test_the_embedded_model_is_complete_and_the_package_typed() -> None:
    package = importlib.resources.files("aegis")
    assert (package / "py.typed").is_file()
    names = {entry.name for entry in (package / "embedded").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names


@pytest.mark.parametrize("line", ["-c 'from aegis import plan'", "-m aegis plan -q"])
def test_in_the_root_of_a_clone_the_bare_sources_are_told_from_the_package(
    line: str, tmp_path: Path
) -> None:
    (tmp_path / "aegis").symlink_to(PROJECT.parent / "aegis")
    libraries = str(Path(click.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-S", *shlex.split(line)],  # -S: an editable install would be found first
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "", "PYTHONPATH": libraries},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "start Python in another folder or as python -P" in done.stderr.splitlines()[-1]


def test_every_name_of_the_public_api_can_be_imported() -> None:
    import aegis

    for name in set(aegis.__all__) - {"__version__"}:
        assert getattr(aegis, name) is not None
