"""A command that fails before it has an answer says so in the form that was asked for; JUnit has a case for each question."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.testing.patch import edit_config

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def cases(printed: str) -> dict[str, ET.Element]:
    return {str(case.get("name")): case for case in ET.fromstring(printed).iter("testcase")}


def test_junit_has_a_case_for_every_required_target(made: Made, run: Run) -> None:
    code, out, _ = run("inspect", made(), "--format", "junit", "--require", "vllm-0.30", "--require", "vllm-0.33")
    assert code == 1
    suite = ET.fromstring(out).find("testsuite")
    assert suite is not None
    assert [suite.get(key) for key in ("tests", "errors", "failures")] == ["3", "0", "1"]
    found = cases(out)
    assert list(found) == ["checkpoint", "vllm-0.30", "vllm-0.33"]
    assert [len(case) for case in found.values()] == [0, 1, 0]
    failure = found["vllm-0.30"].find("failure")
    assert failure is not None
    assert failure.get("message") == "not fused"
    assert "width-ratio: shared width 384 is no multiple of the routed width 512 -> " in str(failure.text)


def test_junit_has_the_notes_of_the_checkpoint_and_of_targets_that_pass(made: Made, run: Run) -> None:
    arguments = ("--without-drafter", "--require", "sglang-0.5.23-slots")
    code, out, _ = run("inspect", made("v4-flash"), "--format", "junit", *arguments)
    assert code == 0
    found = {name: str(case.findtext("system-out")) for name, case in cases(out).items()}
    assert "drafter-left-out: the drafter's layers are not judged" in found["checkpoint"]
    assert "slot-requantised: " in found["sglang-0.5.23-slots"]


def test_junit_of_a_broken_checkpoint(source: Made, run: Run) -> None:
    root = source()
    shard = min(root.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-5])
    code, out, _ = run("inspect", root, "--format=junit")
    error = cases(out)["checkpoint"].find("error")
    assert code == 3
    assert error is not None
    assert error.get("message") == "shard-truncated"


@pytest.mark.parametrize("name", ["a<b>&\"'|", "a\x1b\x00b\ufffe".replace("\x00", ""), "a\udcffb", "a]]>\nb"])
def test_no_name_breaks_a_form(name: str, run: Run, tmp_path: Path) -> None:
    code, out, _ = run("inspect", tmp_path / name, "--format", "junit")
    assert code == 3
    assert cases(out)["checkpoint"].find("error") is not None
    code, out, _ = run("inspect", tmp_path / name, "--format", "github")
    assert code == 3
    assert [line.startswith("::error title=no-such-folder::") for line in out.splitlines()].count(True) == 1
    assert "<b>" not in out.partition("\n")[2]


def test_names_in_a_checkpoint_do_not_break_junit(source: Made, run: Run) -> None:
    root = source()
    edit_config(root, lambda config: config.update(model_type="<x>\x01&"))
    assert "checkpoint" in cases(run("inspect", root, "--format", "junit", "--require", "vllm-0.33")[1])


def test_markdown_of_a_failure(run: Run, tmp_path: Path) -> None:
    code, out, err = run("inspect", tmp_path / "no", "--format", "markdown")
    assert code == 3
    assert out.startswith("## fse-convert failed\n\n- `no-such-folder` ")
    assert err.startswith("error[no-such-folder]")


def test_wrong_arguments_are_annotated_too(run: Run) -> None:
    code, out, _ = run("inspect", "--format", "github")
    assert code == 2
    assert out.startswith("::error title=usage::Missing argument")
