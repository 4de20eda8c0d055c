"""What every command prints with ``--json`` is as its published JSON Schema says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fse_convert.cli import cli
from fse_convert.report.schemas import RESPONSES, schema

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def check(run: Run, *args: object, code: int = 0, failure: bool = False) -> dict[str, Any]:
    """Run a command, and validate what it prints as its answer, or as a failure; without a first-level key it is not valid."""
    got, printed, err = run(*args, "--json")
    assert got == code, err
    found: dict[str, Any] = json.loads(printed)
    either: dict[str, Any] = json.loads(schema(str(args[0])))
    Draft202012Validator(either).validate(found)
    validator = Draft202012Validator({**either, "anyOf": [either["anyOf"][failure]]})
    validator.validate(found)
    optional = {"schema_version", "ok", "exit_code", "needs", "files", "bytes", "proof", "edited", "headers_identical", "source"}
    for key in found.keys() - optional:
        assert not validator.is_valid({k: v for k, v in found.items() if k != key}), key
        assert not validator.is_valid({**found, key: {"nothing": "like this"}}), key
    return found


@pytest.mark.parametrize("kind", ["v4.1-flash", "v3", "quark-mxfp4", "nvfp4", "bf16"])
def test_inspections(kind: str, made: Made, run: Run) -> None:
    check(run, "inspect", made(kind))


def test_inspections_that_say_no(made: Made, run: Run, tmp_path: Path) -> None:
    check(run, "inspect", made(), "--require", "vllm-0.30", code=1)
    check(run, "inspect", tmp_path, code=3)


def test_a_conversion_and_what_follows(made: Made, run: Run, tmp_path: Path) -> None:
    source, out = made(), tmp_path / "out"
    check(run, "convert", source, out, "--target", "vllm-0.30", "--dry-run")
    check(run, "convert", source, out, "--target", "vllm-0.30")
    check(run, "verify", out, "--source", source)
    check(run, "verify", out)
    (out / "README.md").write_text("# edited\n")
    assert check(run, "restore", out, tmp_path / "back")["edited"] == ["README.md"]
    with next(out.glob("*.safetensors")).open("r+b") as f:
        f.seek(-1, 2)
        f.write(b"\xa5")
    check(run, "verify", out, "--source", source, code=1)


def test_what_needs_no_checkpoint(run: Run) -> None:
    for command in ("targets", "explain", "doctor"):
        check(run, command)


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "no"),
        ("convert", "no", "out"),
        ("verify", "no"),
        ("restore", "no", "back"),
        ("explain", "nothing"),
        ("targets", "x"),
    ],
)  # fmt: skip
def test_failures(args: tuple[str, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = check(run, *args, code=2 if args[0] in ("explain", "targets", "doctor") else 3, failure=True)
    assert found["ok"] is False


def test_every_command_with_json_prints_its_schema(run: Run) -> None:
    having = {name for name, command in cli.commands.items() if any("--json" in p.opts for p in command.params)}
    assert having == RESPONSES.keys()
    for name in having:
        assert run(name, "--json-schema") == (0, schema(name) + "\n", "")
    assert run("--json-schema")[1] == schema("convert") + "\n"


@pytest.mark.parametrize("command", RESPONSES)
def test_schemas_are_schemas(command: str) -> None:
    Draft202012Validator.check_schema(json.loads(schema(command)))
