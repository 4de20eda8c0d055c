"""The house: which room imports which, drawn from the source. Data runs one way, and pure rooms do no I/O."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "fse_convert"
PURE = ["layout", "fusion", "plan", "planning", "notes", "eligibility", "recommendation", "costs", "conflicts"]
IO = {"os", "io", "shutil", "tempfile", "subprocess", "socket", "mmap", "fcntl", "pathlib", "click", "rich", "huggingface_hub"}
TERMINAL = {"click", "rich"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): ast.parse(p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.rglob("*.py"))}


def executed(node: ast.AST, *, late: bool) -> Iterator[ast.stmt]:
    """Statements that run: all but those for type checkers, and without ``late`` those inside of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if not late and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from executed(child, late=late)


def imports(module: str, *, late: bool = True) -> set[str]:
    """Full names of what a module imports: modules of the package by their own name, others by the first part."""
    found: set[str] = set()
    for node in executed(MODULES[module], late=late):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{a.name}" for a in node.names}
            found |= (inner & MODULES.keys()) or {node.module}
    return {n if n in MODULES else n.partition(".")[0] for n in found}


def test_the_import_graph_has_no_circle() -> None:
    graph = {m: {i for i in imports(m) if i in MODULES and i != m} for m in MODULES}
    while free := {m for m, used in graph.items() if not used & graph.keys()}:
        graph = {m: used for m, used in graph.items() if m not in free}
    assert sorted(graph) == []


def rooms() -> list[str]:
    return [m for m in MODULES if m.split(".")[1:2] and m.split(".")[1] in PURE]


@pytest.mark.parametrize("module", rooms())
def test_pure_rooms_do_no_io(module: str) -> None:
    assert imports(module) & IO == set()
    assert "torch" not in imports(module, late=False) or module.startswith("fse_convert.layout")
    assert not [
        n for n in ast.walk(MODULES[module]) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("open", "print", "input")
    ]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_the_command_line_and_reports_know_of_terminals(module: str) -> None:
    room = module.split(".")[1:2]
    assert room in (["cli"], ["report"]) or imports(module) & TERMINAL == set()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_below_the_reports_imports_them(module: str) -> None:
    used = {i for i in imports(module) if i.startswith(("fse_convert.report", "fse_convert.cli"))}
    assert not used or module.split(".")[1] in ("cli", "report", "__main__")
