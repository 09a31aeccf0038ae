"""Change the code in small ways, one at a time, and see whether the tests notice.

    python tools/mutate.py planner/plan.py planner/units.py -- tests/planner
    python tools/mutate.py tiers/slots.py -j 2 --list -- tests/tiers

Mutants: a comparison, an arithmetic or a boolean operator turned into its neighbour, a condition
negated, a number moved by one, a statement without a value removed, a returned value replaced by
None. Each runs the tests after ``--`` in a process of its own, forked from one that has already
imported pytest, hypothesis and numpy, and stops at the first failure. Mutants that no test kills
are printed as ``file:line: what was changed`` and counted; the exit code is 1 if there are any.
A line that ends in ``# mutate: equivalent`` and a reason in the line above is left alone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
LIBRARIES = (hypothesis, np)
"""Imported here so that every mutant finds them in memory."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the changed syntax tree, and the change in words."""

    path: Path
    line: int
    change: str
    tree: ast.Module


def module_name(path: Path) -> str:
    """The name under which a file of the repository is installed."""
    parts = list(path.resolve().relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "aegis":
        parts.insert(0, "aegis")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """What may stand in a node's place, in words and as a node; None removes it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        new = copy.deepcopy(node)
        new.ops[0] = COMPARISONS[type(node.ops[0])]()
        yield f"{ast.unparse(node)} -> {ast.unparse(new)}", new
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        new_op = copy.deepcopy(node)
        new_op.op = OPERATORS[type(node.op)]()
        yield f"{ast.unparse(node)} -> {ast.unparse(new_op)}", new_op
    elif isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"{ast.unparse(node)} -> {ast.unparse(other)}", other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"{ast.unparse(node)} -> {ast.unparse(node.operand)}", node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value} -> {node.value + 1}", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield f"{node.value} -> {not node.value}", ast.Constant(not node.value)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        negated: Any = copy.deepcopy(node)
        negated.test = ast.UnaryOp(ast.Not(), negated.test)
        yield f"not ({ast.unparse(node.test)})", negated
    elif isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
        yield f"{ast.unparse(node)} -> return None", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield f"without {ast.unparse(node).splitlines()[0]}", ast.Pass()


def mutable_nodes(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Parent, field and index of every node that runs; annotations and decorators don't."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        items = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if isinstance(item, ast.AST):
                yield parent, field, index
                yield from mutable_nodes(item)


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    source = path.read_text()
    lines = source.splitlines()
    count = sum(1 for _ in mutable_nodes(ast.parse(source)))
    for position in range(count):
        for choice in range(8):
            tree = ast.parse(source)
            parent, field, index = next(
                place for n, place in enumerate(mutable_nodes(tree)) if n == position
            )
            value = getattr(parent, field)
            node = value if index is None else value[index]
            options = list(replacements(node))
            if choice >= len(options):
                break
            line = getattr(node, "lineno", 0)
            if line and lines[line - 1].rstrip().endswith("# mutate: equivalent"):
                break
            change, new = options[choice]
            if index is None:
                setattr(parent, field, new)
            else:
                value[index] = new
            yield Mutant(path, line, change, ast.fix_missing_locations(tree))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a changed tree."""

    def __init__(self, name: str, mutant: Mutant) -> None:
        self.name, self.mutant = name, mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The spec of the changed module; nothing for any other."""
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(
            fullname,
            self.mutant.path,
            loader=self,  # type: ignore[arg-type]
            submodule_search_locations=(
                [str(self.mutant.path.parent)] if self.mutant.path.name == "__init__.py" else None
            ),
        )

    def get_source(self, fullname: str) -> str | None:
        """None: there is no text of the changed tree."""
        return None

    def exec_module(self, module: Any) -> None:
        """Run the changed tree as the module."""
        exec(compile(self.mutant.tree, str(self.mutant.path), "exec"), module.__dict__)


def run_tests(mutant: Mutant, arguments: list[str]) -> int:
    """pytest's exit code in this process, with the mutant in place."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.meta_path.insert(0, Finder(module_name(mutant.path), mutant))
    quiet = ["-x", "-q", "-p", "no:cacheprovider"]
    # hypothesis is imported before pytest could rewrite its asserts.
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*quiet, *arguments]))


def killed(mutant: Mutant, arguments: list[str], seconds: float) -> bool:
    """Whether a test fails, or the tests hang, when this change is made."""
    child = os.fork()
    if child == 0:
        os.setsid()
        code = 70
        try:
            code = run_tests(mutant, arguments)
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main() -> int:
    """Print the survivors."""
    if "--" not in sys.argv:
        sys.exit(__doc__)
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120, help="seconds until a mutant hangs")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_args(sys.argv[1:split])
    arguments = sys.argv[split + 1 :]
    everything = [mutant for path in options.files for mutant in mutants(path)]
    if options.list:
        for mutant in everything:
            print(f"{mutant.path}:{mutant.line}: {mutant.change}")
        return 0
    path = options.files[0]
    unchanged = Mutant(path, 0, "nothing", ast.parse(path.read_text()))
    if killed(unchanged, arguments, options.timeout):
        sys.exit("the tests fail, or hang, without any change")
    with ThreadPoolExecutor(options.jobs) as pool:
        kills = pool.map(lambda m: killed(m, arguments, options.timeout), everything)
        survivors = 0
        for mutant, dead in zip(everything, kills, strict=True):
            if not dead:
                survivors += 1
                print(f"{mutant.path}:{mutant.line}: {mutant.change}", flush=True)
    print(f"{len(everything)} mutants, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
