"""The packages form a DAG, and importing the thin ones loads nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"planner": "aegis.planner", "kernels": "aegis.kernels", "tiers": "aegis.tiers"}
OUTER = {
    "aegis.planner": set(),
    "aegis.kernels": set(),
    "aegis.tiers": {"aegis.kernels"},
}
BELOW = {
    "aegis.planner",
    "aegis.kernels",
    "aegis.tiers",
    "aegis.errors",
    "aegis.settings",
    "aegis.heap",
    "aegis.child",
}
CHECKPOINT = BELOW | {"aegis.checkpoint"}
MAKING = CHECKPOINT | {"aegis.models", "aegis.convert", "aegis.embedded"}
ENGINE = MAKING | {"aegis.text", "aegis.hub", "aegis.synthetic"}
INNER = {
    "aegis.errors": set(),
    "aegis.heap": set(),
    "aegis.child": set(),
    "aegis.settings": {"aegis.errors"},
    "aegis.embedded": {"aegis.errors"},
    "aegis.checkpoint": BELOW,
    "aegis.convert": CHECKPOINT | {"aegis.models", "aegis.embedded"},
    "aegis.hub": CHECKPOINT | {"aegis.models", "aegis.convert"},
    "aegis.models": CHECKPOINT,
    "aegis.synthetic": MAKING,
    "aegis.text": CHECKPOINT,
    "aegis.engine": ENGINE,
    "aegis.api": ENGINE | {"aegis.engine"},
    "aegis": ENGINE | {"aegis.engine", "aegis.api"},
    "aegis.doctor": ENGINE | {"aegis.engine"},
    "aegis.bench": ENGINE | {"aegis.engine"},
    "aegis.predict": ENGINE | {"aegis.engine", "aegis.bench"},
    "aegis.cli": ENGINE | {"aegis.engine", "aegis.doctor", "aegis.bench", "aegis.predict"},
    "aegis.server": ENGINE | {"aegis.engine"},
    "aegis.__main__": {"aegis.cli"},
}
ALLOWED = OUTER | INNER
STDLIB_ONLY = ["planner/*.py", "kernels/base.py", "kernels/registry.py"]


def modules() -> Iterator[tuple[str, Path]]:
    for folder in ("aegis", *FOLDERS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            parts[0] = FOLDERS.get(folder, folder)
            yield ".".join(parts).removesuffix(".__init__"), path


MODULES = dict(modules())


def layer(module: str) -> str:
    """aegis.planner.units -> aegis.planner; aegis itself (its __init__) stays."""
    return ".".join(module.split(".")[:2])


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in the tree, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def without_type_checking(tree: ast.Module) -> ast.Module:
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    return ast.Module(kept, [])


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_layers_below(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    own = layer(module)
    used = {layer(name) for name in imports(tree) if name.split(".")[0] == "aegis"} - {own}
    assert used <= ALLOWED[own], f"{module} may not import {sorted(used - ALLOWED[own])}"


def test_the_layers_have_no_cycle() -> None:
    done: set[str] = set()
    waiting = dict(ALLOWED)
    while waiting:
        free = [name for name, below in waiting.items() if below - {name} <= done]
        assert free, f"cycle among {sorted(waiting)}"
        done.update(free)
        for name in free:
            del waiting[name]


@pytest.mark.parametrize("pattern", STDLIB_ONLY)
def test_the_thin_modules_use_only_the_standard_library(pattern: str) -> None:
    paths = list(ROOT.glob(pattern))
    assert paths
    for path in paths:
        tree = without_type_checking(ast.parse(path.read_text()))
        tops = {name.split(".")[0] for name in imports(tree)}
        foreign = tops - {"aegis"} - sys.stdlib_module_names
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


HEAVY = {"numpy", "tokenizers", "mlx", "jinja2", "rich", "huggingface_hub"}


@pytest.mark.parametrize(
    "module",
    ["aegis", "aegis.planner", "aegis.kernels.base", "aegis.kernels.registry", "aegis.cli"],
)
def test_importing_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
