"""``--family``: a model type that is not known, whose names are those of a family that is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.patch import edit_config

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
AS_V4 = ("--family", "DeepSeek-V4")
UNFUSED = "--allow-unfused"


@pytest.fixture
def newcomer(source: Made) -> Path:
    """A checkpoint of DeepSeek-V4's names under a model type that no row has."""
    root = source("v4-flash")
    edit_config(root, lambda config: config.update(model_type="newcomer", architectures=["NewcomerForCausalLM"]))
    return root


def test_the_refusal_names_the_option_and_the_option_helps(newcomer: Path, tmp_path: Path, run: Run) -> None:
    code, _, err = run(newcomer, tmp_path / "out")
    assert (code, "error[family-unknown]" in err) == (3, True)
    assert "add --family DeepSeek-V4" in err
    code, text, _ = run("inspect", newcomer)
    assert (code, "add --family DeepSeek-V4" in " ".join(text.split())) == (0, True)
    assert run(newcomer, tmp_path / "out", *AS_V4, UNFUSED)[0] == 0
    manifest = json.loads((tmp_path / "out" / "fse" / "manifest.json").read_text())
    assert manifest["model"]["family"] == "DeepSeek-V4"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["moe_intermediate_size"] == 512


def test_the_refusal_promises_no_server_that_does_not_run_the_model_type(newcomer: Path, tmp_path: Path, run: Run) -> None:
    _, _, err = run(newcomer, tmp_path / "out", "--target", "vllm-0.33")
    assert "convert for a contract, or a server that runs this model type, and add --family DeepSeek-V4\n" in err
    code, _, err = run(newcomer, tmp_path / "out", "--target", "vllm-0.33", *AS_V4)
    assert (code, "error[server-refuses]" in err) == (1, True)
    assert run(newcomer, tmp_path / "out", "--target", "megamoe-512", *AS_V4)[0] == 0


def test_what_is_written_is_proved_and_restored_without_naming_it_again(newcomer: Path, tmp_path: Path, run: Run) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    assert run(newcomer, out, *AS_V4, UNFUSED)[0] == 0
    assert run("verify", out, "--source", newcomer)[0] == 0
    assert run("verify", out)[0] == 0
    assert run("restore", out, again)[0] == 0
    assert (again / "config.json").read_bytes() == (newcomer / "config.json").read_bytes()


def test_inspect_describes_it(newcomer: Path, run: Run) -> None:
    code, text, _ = run("inspect", newcomer, "--family", "deepseek-v4", "--json")
    assert code == 0
    assert json.loads(text)["family"] == "DeepSeek-V4"


def test_a_family_that_is_not_known_is_a_wrong_option(newcomer: Path, run: Run) -> None:
    code, _, err = run("inspect", newcomer, "--family", "Oldtimer")
    assert (code, "Oldtimer" in err) == (2, True)


def commands(text: str) -> list[list[str]]:
    """The program's own commands in a text, as words."""
    return [shlex.split(line.strip()) for line in text.splitlines() if line.strip().startswith("fse-convert ")]


def test_what_inspect_advises_of_it_works_as_printed(
    newcomer: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = commands(run("inspect", newcomer, *AS_V4, "--tp", 8)[1])
    assert found
    for program, *words in found:
        assert (program, words[-2:]) == ("fse-convert", list(AS_V4))
        assert run(*words)[0] == 0


def test_next_steps_of_it_work_as_printed(newcomer: Path, tmp_path: Path, run: Run) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    _, _, err = run(newcomer, out, *AS_V4, UNFUSED)
    inspect, verify = commands(err.partition("next:")[2])
    _, _, err = run("restore", out, back)
    for program, *words in (inspect, verify, *commands(err)):
        assert program == "fse-convert"
        code, text, _ = run(*words)
        assert (code, "unknown family" in text) == (0, False)
    assert inspect[-2:] == list(AS_V4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("v4-flash", ("--target", "megamoe-512", UNFUSED)),
        ("glm-4.5-quark", ("--shared", "mxfp4", "--lossy")),
        *((kind, ("--tp", "8")) for kind in ("v4.1-flash", "v3", "glm-4.5-quark", "qwen3.5-quark")),
    ],
)
def test_the_family_that_the_refusal_names_converts_it_as_a_model_of_that_family(
    kind: str, options: tuple[str, ...], source: Made, tmp_path: Path, run: Run, digest: Callable[[Path], dict[str, str]]
) -> None:
    root = source(kind)
    assert run(root, tmp_path / "known", *options)[0] == 0
    edit_config(root, rename)
    _, _, err = run(root, tmp_path / "out", *options)
    assert "error[family-unknown]" in err
    named = shlex.split(err.partition("add --family ")[2].splitlines()[0])[0]
    code, _, err = run(root, tmp_path / "out", *options, "--family", named)
    assert code == 0, err
    known, new = (
        {name: value for name, value in digest(tmp_path / folder).items() if name.endswith(".safetensors")}
        for folder in ("known", "out")
    )
    assert known == {name: value for name, value in new.items() if name in known}
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("known", "out"))
    rename(before)
    assert before == after


def rename(config: dict[str, Any]) -> None:
    """Give a model a type that no row has, wherever it stands."""
    config["model_type"] = "newcomer"
    if "text_config" in config:
        config["text_config"]["model_type"] = "newcomer_text"


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_family_beside_a_model_type_that_is_known_is_said_to_be_unused(
    command: str, made: Made, tmp_path: Path, run: Run
) -> None:
    words = (made("v4-flash"),) if command == "inspect" else (made("v4-flash"), tmp_path / "out", "--dry-run")
    for family, told in (("GLM-4-MoE", True), ("DeepSeek-V4", False)):
        code, text, _ = run(command, *words, "--family", family, "--json")
        found = json.loads(text)
        notes = [p["message"] for p in (*found["notes"], *found.get("conflicts", ())) if p["code"] == "option-unused"]
        assert (code, notes) == (0, ["model type 'deepseek_v4' is known as DeepSeek-V4, so GLM-4-MoE is not used"] if told else [])
