"""The GitHub Action, its steps run as GitHub runs them, and the workflow of the examples that uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from fse_convert.exit_codes import ExitCode

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

REPOSITORY = Path(__file__).resolve().parents[2]
ACTION: dict[str, Any] = yaml.safe_load((REPOSITORY / "action.yml").read_text(encoding="utf-8"))
WORKFLOW: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / "publish-gate.yml").read_text(encoding="utf-8"))
SETUP, INSTALL, INSPECT = ACTION["runs"]["steps"]
Gate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Run the step that inspects; returns exit code, stdout and the job's summary."""
    (tmp_path / "fse" / "bin").mkdir(parents=True)
    (tmp_path / "fse" / "bin" / "fse-convert").symlink_to(Path(sys.executable).parent / "fse-convert")

    def run(checkpoint: object, require: str, timeout: str = "1m") -> tuple[int, str, str]:
        summary, outputs = tmp_path / "summary.md", tmp_path / "outputs"
        values = {"inputs.checkpoint": str(checkpoint), "inputs.require": require, "inputs.token": "", "inputs.timeout": timeout}
        given = {name: values[re.fullmatch(r"\$\{\{ (.+) \}\}", text)[1]] for name, text in INSPECT["env"].items()}  # type: ignore[index]
        places = {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(outputs)}
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", INSPECT["run"]]
        done = subprocess.run(shell, capture_output=True, text=True, env={**os.environ, **places, **given}, check=False)
        assert outputs.read_text() == f"report={tmp_path}/fse-report.html\n"
        return done.returncode, done.stdout, summary.read_text(encoding="utf-8")

    return run


def test_a_server_that_does_not_fuse_fails_the_job(gate: Gate, made: Callable[..., Path], tmp_path: Path) -> None:
    code, out, summary = gate(made(), "vllm-0.33 vllm-0.30")
    assert code == ExitCode.NO
    assert out.startswith("::error title=vllm-0.30 does not fuse::width-ratio")
    assert summary.startswith("## ")
    assert "required: `vllm-0.30` not fused" in summary
    assert "::error" not in summary
    assert (tmp_path / "fse-report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_targets_may_stand_on_lines_of_their_own(gate: Gate, made: Callable[..., Path]) -> None:
    code, out, _ = gate(made(), "\n  vllm-0.33\n  vllm-0.30\n")
    assert (code, out.partition("::width")[0]) == (ExitCode.NO, "::error title=vllm-0.30 does not fuse")


def test_a_checkpoint_that_fuses_passes(gate: Gate, made: Callable[..., Path]) -> None:
    code, out, summary = gate(made(width=512), "vllm-0.30 vllm-0.33")
    assert (code, "::error" in out) == (ExitCode.OK, False)
    assert "**Passed: every layer fuses in vllm-0.30, vllm-0.33.**" in summary


@pytest.mark.parametrize(
    ("checkpoint", "require", "code", "title"),
    [
        ("/no/such/folder", "vllm-0.33", ExitCode.INVALID, "no-such-folder"),
        ("hf://not a model", "vllm-0.33", ExitCode.USAGE, "hub-address"),
        ("/", "vllm-9", ExitCode.USAGE, "target-unknown"),
        ("--help", "vllm-0.33", ExitCode.INVALID, "no-such-folder"),
        ("/", " \n", ExitCode.USAGE, "no target"),
    ],
)
def test_a_failure_is_an_annotation_and_in_the_summary(checkpoint: str, require: str, code: int, title: str, gate: Gate) -> None:
    got, out, summary = gate(checkpoint, require)
    assert got == code
    assert out.startswith(f"::error title={title}::")
    assert summary.startswith("## fse-convert failed\n")
    assert f"`{title}`" in summary


def test_a_hub_that_does_not_answer_in_time_is_told(gate: Gate, made: Callable[..., Path]) -> None:
    code, out, summary = gate(made(), "vllm-0.33", "0.01s")
    assert code == 124
    assert out == "::error title=timeout::no answer within 0.01s\n"
    assert "no answer within 0.01s" in summary


def test_it_installs_what_the_package_needs_but_torch() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["hub"])]
    pinned = dict(text.split("==") for text in INSTALL["env"]["PACKAGES"].split())
    assert pinned.keys() == {r.name for r in needed} - {"torch"}
    assert all(r.specifier.contains(pinned[r.name]) for r in needed if r.name != "torch")


def test_every_action_is_pinned_by_commit_and_every_job_has_a_timeout() -> None:
    steps = WORKFLOW["jobs"]["inspect"]["steps"]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in (SETUP, *steps))
    assert all(job["timeout-minutes"] for job in WORKFLOW["jobs"].values())


def test_the_workflow_gives_what_the_action_asks_for() -> None:
    given = next(step for step in WORKFLOW["jobs"]["inspect"]["steps"] if "fse-convert" in step["uses"])["with"]
    assert given.keys() <= ACTION["inputs"].keys()
    assert {name for name, about in ACTION["inputs"].items() if about.get("required")} <= given.keys()
