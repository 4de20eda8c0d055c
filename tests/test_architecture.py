"""The house: which room may import which. Data runs one way, and pure rooms do no I/O; CONTRIBUTING.md says the same in words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "fse_convert"
GROUND = {"codes", "errors", "exit_codes", "progress", "torch_threads"}
"""Rooms of one file that anybody may import, and that import nothing of the package but one another."""
ARROWS: dict[str, set[str]] = {
    "layout": set(),
    "checkpoint": set(),
    "model": {"layout", "checkpoint"},
    "sidecar": {"checkpoint"},
    "output": {"checkpoint"},
    "servers": {"layout", "checkpoint", "model"},
    "restoration": {"layout", "checkpoint", "output", "sidecar"},
    "plan": {"layout", "checkpoint", "model", "sidecar", "servers"},
    "serving": {"layout", "checkpoint", "output", "sidecar", "model", "servers"},
    "inspection": {"checkpoint", "model", "sidecar", "servers", "plan"},
    "verification": {"checkpoint", "model", "sidecar", "output", "servers", "plan"},
    "conversion": {"layout", "checkpoint", "output", "model", "sidecar", "servers", "plan", "verification"},
    "doctor": {"output", "servers", "verification"},
    "report": {
        "checkpoint", "output", "sidecar", "model", "servers", "plan", "inspection", "verification", "restoration", "conversion",
        "doctor",
    },
    "cli": {
        "checkpoint", "output", "sidecar", "servers", "plan", "inspection", "verification", "restoration", "conversion", "doctor",
        "report",
    },
    "testing": {"checkpoint", "sidecar", "model", "servers", "plan"},
    "api": {"checkpoint", "output", "servers", "plan", "inspection", "verification", "restoration", "conversion"},
}  # fmt: skip
"""What each room may import besides the ground: type-only and late imports count."""
ENTRANCES = {"__init__", "__main__"}
PURE = {"layout", "model", "servers", "plan"}
READS = {"plan.source"}
"""Files of pure rooms that read: the one place where a source is opened."""
IO = {"os", "io", "shutil", "tempfile", "subprocess", "socket", "mmap", "fcntl", "pathlib", "click", "rich", "huggingface_hub"}
TERMINAL = {"click", "rich", "jinja2"}
FLOATS = {
    "layout.ue8m0",
    "layout.to_mxfp4",
    "conversion.recoding",
    "conversion.writer",
    "restoration.recipes",
    "serving.sglang.modules",
    "verification",
    "testing",
}
"""Rooms and files that compute with floats: F32 scales to exponents and back, floats that become MXFP4, experts for the proof, a
server's own scales."""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(p): ast.parse(p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    return module.partition(".")[0]


def nodes(tree: ast.AST, *, late: bool) -> Iterator[ast.AST]:
    """All nodes; without ``late`` none inside of functions, nor those for type checkers."""
    for child in ast.iter_child_nodes(tree):
        if not late and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not late and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from nodes(child, late=late)


def imports(module: str, *, late: bool = True) -> set[str]:
    """What a module imports: modules of the package by their name in it, others by their first part."""
    names: set[str] = set()
    for node in nodes(MODULES[module], late=late):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{a.name}" for a in node.names if node.module.partition(".")[0] == "fse_convert"}
            names |= {n for n in inner if n.removeprefix("fse_convert.") in MODULES} or {node.module}
    ours = {n.removeprefix("fse_convert.") if "." in n else "__init__" for n in names if n.partition(".")[0] == "fse_convert"}
    return ours | {n.partition(".")[0] for n in names if n.partition(".")[0] != "fse_convert"}


def test_every_room_is_in_the_table() -> None:
    assert {room(m) for m in MODULES} - ENTRANCES - GROUND == set(ARROWS)


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m not in ENTRANCES))
def test_rooms_import_only_rooms_below(module: str) -> None:
    allowed = GROUND | ARROWS.get(room(module), set()) | {room(module), "__init__"}
    used = {room(i) for i in imports(module) if i in MODULES}
    assert used - allowed == set()


def test_the_table_has_no_arrow_that_nobody_uses() -> None:
    used = {(room(m), room(i)) for m in MODULES for i in imports(m) if i in MODULES}
    assert {(a, b) for a, rooms in ARROWS.items() for b in rooms} - used == set()


@pytest.mark.parametrize("graph", ["files", "rooms"])
def test_there_is_no_circle(graph: str) -> None:
    """Type-only and late imports count."""
    arrows: dict[str, set[str]] = {}
    for module in MODULES.keys() - {"__init__"}:
        node = room(module) if graph == "rooms" else module
        used = {room(i) if graph == "rooms" else i for i in imports(module) if i in MODULES and i != "__init__"}
        arrows.setdefault(node, set()).update(used - {node})
    while free := {m for m, used in arrows.items() if not used & arrows.keys()}:
        arrows = {m: used for m, used in arrows.items() if m not in free}
    assert arrows == {}


@pytest.mark.parametrize("module", sorted(m for m in MODULES if room(m) in PURE and m not in READS))
def test_pure_rooms_do_no_io(module: str) -> None:
    assert imports(module) & IO == set()
    assert "torch" not in imports(module, late=False) or room(module) == "layout"
    calls = (n for n in nodes(MODULES[module], late=True) if isinstance(n, ast.Call))
    assert [c for c in calls if ast.unparse(c.func) in ("open", "print", "input")] == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_the_command_line_and_reports_know_of_terminals(module: str) -> None:
    assert room(module) in ("cli", "report", "testing") or imports(module) & TERMINAL == set()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_functions_have_at_most_seven_parameters(module: str) -> None:
    """Those of click commands are options."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.FunctionDef) and not any("command" in ast.unparse(d) for d in node.decorator_list):
            a = node.args
            parameters = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg not in ("self", "cls")]
            assert len(parameters) <= 7, node.name


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_readable_in_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 410


@pytest.mark.parametrize("module", sorted(m for m in MODULES if not {m, room(m)} & FLOATS))
def test_bytes_are_handled_as_bytes(module: str) -> None:
    """FP8 and E8M0 as uint8: no float type of torch is named."""
    used = [ast.unparse(n) for n in nodes(MODULES[module], late=True) if isinstance(n, ast.Attribute)]
    assert [u for u in used if u.startswith(("torch.float", "torch.bfloat", "torch.half", "torch.double"))] == []
