"""The registry of codes and the package say the same, and some test names every code."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fse_convert.cli.explain import complete_code
from fse_convert.codes import Kind, all_codes

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "fse_convert"
KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
WORD = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
Run = Callable[..., tuple[int, str, str]]


def trees(root: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}


SOURCES = {path: tree for path, tree in trees(PACKAGE).items() if path.relative_to(PACKAGE).parts[0] != "testing"}


def texts(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def parameters(node: ast.AST) -> list[str]:
    """The parameters of a function, or of the class that a dataclass is, without ``self``."""
    if isinstance(node, ast.ClassDef):
        own = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        return parameters(own[0]) if own else fields
    assert isinstance(node, ast.FunctionDef)
    return [a.arg for a in node.args.args if a.arg != "self"]


def makers() -> dict[str, int]:
    """Position of the parameter ``code`` in every function and class that has one, those that inherit it included."""
    nodes = [n for tree in SOURCES.values() for n in ast.walk(tree) if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
    found = {n.name: parameters(n).index("code") for n in nodes if "code" in parameters(n) and n.name != "__init__"}
    for n in nodes:
        if isinstance(n, ast.ClassDef) and not parameters(n):
            found.update((n.name, found[b.id]) for b in n.bases if isinstance(b, ast.Name) and b.id in found)
    return found | {"Reason": found["Problem"]}


def constants() -> dict[str, str]:
    """The package's named texts."""
    values = [n for tree in SOURCES.values() for n in tree.body if isinstance(n, ast.Assign)]
    return {ast.unparse(n.targets[0]): n.value.value for n in values if isinstance(n.value, ast.Constant)}


def made() -> Iterator[str]:
    """Every literal that stands where a code is asked for."""
    at, named = makers(), constants()
    for tree in SOURCES.values():
        variable = False
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                defaults = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
                yield from (text for a, default in defaults if a.arg == "code" for text in texts(default))
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name == "__init__":  # of a base class that takes a code
                yield from (a.value for a in node.args if isinstance(a, ast.Constant) and KEBAB.fullmatch(str(a.value)))
            given = [k.value for k in node.keywords if k.arg == "code"]
            if given or name in at:
                given = given or node.args[at[name] : at[name] + 1]
                found = {text for argument in given for text in texts(argument) if WORD.fullmatch(text)}
                found |= {named[a.id] for a in given if isinstance(a, ast.Name) and a.id in named}
                variable = variable or any(isinstance(a, ast.Name) and a.id not in named for a in given)
                yield from found
        if variable:  # a table of this file has the code first in its rows
            rows = (n for n in ast.walk(tree) if isinstance(n, ast.Tuple) and len(n.elts) > 1)
            yield from (
                r.elts[0].value for r in rows if isinstance(r.elts[0], ast.Constant) and KEBAB.fullmatch(str(r.elts[0].value))
            )


def test_every_code_of_the_package_is_in_the_registry_and_no_other() -> None:
    codes = set(made()) | {"permission"}  # in the table of errno, and no kebab
    assert len(all_codes()) == (PACKAGE / "codes.txt").read_text(encoding="utf-8").count("\n\n") + 1, "a code is there twice"
    assert sorted(codes ^ all_codes().keys()) == []


@pytest.mark.parametrize("name", all_codes())
def test_a_code_is_explained_in_whole_sentences(name: str) -> None:
    code = all_codes()[name]
    assert WORD.fullmatch(name)
    assert code.meaning.endswith(".")
    assert code.way_out.endswith(".") or code.way_out.startswith("pip install")
    assert len(set(code.kinds)) == len(code.kinds) > 0


def test_every_code_is_named_by_a_test() -> None:
    """By a whole word of a literal, as in ``error[nan]``; `tests/conftest.py` tells whether a whole run made it, too."""
    files = [tree for path, tree in trees(TESTS).items() if path != Path(__file__)]
    words = {word for tree in files for text in texts(tree) for word in WORD.findall(text)}
    assert sorted(all_codes().keys() - words) == []


def test_explain_says_meaning_and_way_out(run: Run) -> None:
    code, text, err = run("explain", "nan", "scale-inexact")
    assert (code, err) == (0, "")
    nan, inexact = (all_codes()[name] for name in ("nan", "scale-inexact"))
    assert text.splitlines() == [
        "nan: error", nan.meaning, nan.way_out, "", "scale-inexact: error, reason, mismatch", inexact.meaning, inexact.way_out,
    ]  # fmt: skip


def test_explain_lists_all_codes_by_kind(run: Run) -> None:
    code, text, _ = run("explain")
    assert code == 0
    names = re.findall(r"[a-z0-9-]+(?=,|$)", "\n".join(line for line in text.splitlines() if line.startswith("  ")), re.MULTILINE)
    assert sorted(names) == sorted(all_codes())
    assert [line for line in text.splitlines() if not line.startswith("  ")] == [
        f"{kind.heading} ({sum(c.kinds[0] is kind for c in all_codes().values())})" for kind in Kind
    ]


def test_explain_as_json(run: Run) -> None:
    answer = json.loads(run("explain", "locked", "--json")[1])
    locked = all_codes()["locked"]
    assert answer["ok"] is True
    assert answer["codes"] == [{"name": "locked", "kinds": ["error"], "meaning": locked.meaning, "way_out": locked.way_out}]
    assert [c["name"] for c in json.loads(run("explain", "--json")[1])["codes"]] == list(all_codes())


@pytest.mark.parametrize(("name", "hint"), [("shard-mising", "did you mean shard-missing?"), ("?", "see: fse-convert explain")])
def test_an_unknown_code_gets_the_nearest(name: str, hint: str, run: Run) -> None:
    code, text, err = run("explain", "nan", name)
    assert (code, text) == (2, "")
    assert f"error[code-unknown]: no code {name!r}" in err
    assert hint in err


def test_the_shell_completes_codes() -> None:
    assert sorted(complete_code(None, None, "no-such")) == ["no-such-folder", "no-such-model", "no-such-revision"]  # type: ignore[arg-type]
    assert complete_code(None, None, "x") == []  # type: ignore[arg-type]


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_about_a_checkpoint_leads_to_its_explanation(
    terminal: bool, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    last = run(tmp_path / "nowhere", tmp_path / "out")[2].splitlines()[-1]
    assert ("more: fse-convert explain no-such-folder" in last) is terminal
    assert "explain" not in run("convert")[2]
